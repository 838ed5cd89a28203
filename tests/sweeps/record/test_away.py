"""Stores that are away, or wrong: nothing lost in an outage."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sweeps.record import Recorder, tracking_uri
from tests.sweeps.record.trials import SPEC, SWEEP, Store, front, outcome
from trainers.errors import UserError


@pytest.mark.parametrize("uri", ["file:./mlruns", "./mlruns", "/tmp/mlruns", "mlruns"])
def test_file_stores_are_refused(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """E14."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(UserError, match=r"MLflow refuses .*MLFLOW_TRACKING_URI=sqlite:///mlflow\.db"):
        Recorder(SPEC, SWEEP, Path("runs")).check()


def test_tracking_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlruns" / "0").mkdir(parents=True)
    (tmp_path / "mlruns" / "0" / "meta.yaml").write_text("experiment_id: '0'\n")  # MLflow's own default would fail
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri() == f"sqlite:///{tmp_path}/mlflow.db"
    for given, meant in {
        "sqlite:///sub/x.db": f"sqlite:///{tmp_path}/sub/x.db",
        "http://host:5000": "http://host:5000",
        "postgresql+psycopg2://u:p@h/d": "postgresql+psycopg2://u:p@h/d",
        "": f"sqlite:///{tmp_path}/mlflow.db",
    }.items():
        monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
        assert tracking_uri() == meant
    for given, said in {
        "localhost:5000": "did you mean http://localhost:5000",
        "sqlite://": "in memory",
        "ftp://host": "no store ftp",
    }.items():
        monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
        with pytest.raises(UserError, match=said):
            tracking_uri()


def test_ui_command_and_url_of_other_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    for uri, command, base in [
        ("http://me:secret@host:5000/", None, "http://host:5000"),
        ("sqlite:////a b/x.db", "mlflow ui --backend-store-uri 'sqlite:////a b/x.db'", "http://127.0.0.1:5000"),
        ("postgresql://u:secret@h/d", 'mlflow ui --backend-store-uri "$MLFLOW_TRACKING_URI"', "http://127.0.0.1:5000"),
    ]:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        recorder = Recorder(SPEC, SWEEP, Path("runs"))
        assert (recorder.ui_command(), recorder.url()) == (command, base)


def test_check_says_what_is_wrong(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (store.folder / "file").touch()
    (store.folder / "text.db").write_text("not a database" * 100)
    started = time.monotonic()
    for uri, said in {
        f"http://127.0.0.1:{port}": r"does not answer \(Connection refused\): start the server",
        f"sqlite:///{store.folder}/file/x.db": "cannot open .*a folder that you can write to",
        "sqlite:////proc/x.db": "cannot open .*a folder that you can write to",
        f"sqlite:///{store.folder}/text.db": "cannot open .*not a database",
    }.items():
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(UserError, match=said):
            Recorder(SPEC, SWEEP, store.folder).check()
    assert time.monotonic() - started < 15


@pytest.fixture
def forbidding() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(403)
            self.end_headers()
            self.wfile.write(b"Invalid Host header - possible DNS rebinding attack detected")

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_unknown_host_names_the_option(forbidding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{forbidding}")
    with pytest.raises(UserError, match=f"--allowed-hosts {forbidding}"):
        Recorder(SPEC, SWEEP, Path("runs")).check()


def test_a_deleted_experiment_is_named(store: Store) -> None:
    recorder = store.recorder()
    store.client.delete_experiment(recorder._store.experiment_id)
    with pytest.raises(UserError, match="'lora_small' is deleted: restore it"):
        Recorder(SPEC, SWEEP, store.folder).check()


def test_an_outage_costs_no_trial(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    recorder = store.recorder()
    recorder.record(outcome(0))
    trials = [outcome(n) for n in range(3)]
    with monkeypatch.context() as outage:
        for name in ("create_run", "search_runs", "log_batch", "update_run", "get_run"):

            def away(*_: Any, **__: Any) -> None:
                raise MlflowException("API request failed: Connection refused")

            outage.setattr(MlflowClient, name, away)
        for trial in trials[1:]:
            recorder.record(trial)
        assert recorder.pending == 2
        assert len(recorder.notes) == 1
        assert "MLflow does not answer" in recorder.notes[0]
        assert "2 trials wait in trials.jsonl and are sent when it is back" in recorder.notes[0]
        recorder.close(trials, front(trials), "FINISHED", "done", "headline")
        assert recorder.pending == 2
        assert recorder.url()
    recorder.sync(trials)
    assert (recorder.pending, recorder.notes) == (0, [])
    assert [run.data.tags["trial.id"] for run in store.runs("trial")] == ["000", "001", "002"]
    (parent,) = store.runs("sweep")
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["sweep/trials_completed"] == 3


def test_an_answer_that_was_lost_doubles_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    recorder = store.recorder()
    create = MlflowClient.create_run
    with monkeypatch.context() as outage:

        def unanswered(*args: Any, **kwargs: Any) -> None:
            create(*args, **kwargs)
            raise MlflowException("timed out")

        outage.setattr(MlflowClient, "create_run", unanswered)
        recorder.record(outcome(0))
    recorder.record(outcome(1))
    assert [(run.data.tags["trial.id"], run.info.status) for run in store.runs("trial")] == [
        ("000", "FINISHED"),
        ("001", "FINISHED"),
    ]


def test_artifacts_that_cannot_be_uploaded(store: Store) -> None:
    """E12: metrics go on, and the summary says where the rest is."""
    (store.folder / "mlruns").write_text("a file, where the artifacts' folder should be")
    recorder = Recorder(SPEC, SWEEP, store.folder / "runs" / SWEEP)
    recorder.check()
    recorder.open()
    recorder.record(outcome(0))
    recorder.close([outcome(0)], front([outcome(0)]), "FINISHED", "done", "1")
    (run,), (parent,) = store.runs("trial"), store.runs("sweep")
    assert run.info.status == parent.info.status == "FINISHED"
    assert run.data.metrics["quality/eval_loss"] == 1.23457
    assert len(recorder.notes) == 1
    assert str(store.folder / "runs" / SWEEP) in recorder.notes[0]
    assert (store.folder / "runs" / SWEEP / "frontier" / "trials.csv").is_file()
