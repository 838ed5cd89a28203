"""The record in MLflow: nothing doubled, nothing lost in an outage, nothing that misleads."""

from __future__ import annotations

import base64
import http.server
import json
import math
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sweeps import mlflow_view as view
from sweeps.mlflow_store import make_client, prepare_sqlite
from sweeps.objectives import OBJECTIVES
from sweeps.outcome import TrialOutcome
from sweeps.pareto import Frontier, frontier
from sweeps.record import LEFT_FRONTIER, Recorder, tracking_uri
from sweeps.spec import SweepSpec
from trainers.errors import UserError
from trainers.result import Accounts, Evaluation, PhaseMemory, RankMemory, Save, TrialResult, Update

SWEEP = "lora_small-20250101-1"
T0 = 1_700_000_000.25
SPEC = SweepSpec.model_validate(
    {"space": "lora_small", "system": {"micro_batch_size": [1, 2, 4]}, "learning": {"learning_rate": [1e-4, 2e-4]}}
)


def measured(updates: int = 3) -> TrialResult:
    return TrialResult(
        stop_reason="budget",
        updates=tuple(Update(k, 100 * k, 100, 60, 120, 2.0 / k, 1.0, 1e-5, 0.5) for k in range(1, updates + 1)),
        evaluations=(Evaluation(0, 0, 3.0, 0.2), Evaluation(updates, 100 * updates, 1.23456789, 0.2)),
        saves=(Save(100 * updates, 0.1, 2**20),),
        memory={"forward": PhaseMemory((RankMemory(2**30, 2**30, Accounts(weights=2**30)),))},
        host_peak_bytes=2**30,
        fingerprints=("a",) * updates,
        seconds={"model": 1.0},
        num_workers=2,
        effective_config={},
    )


def outcome(
    n: int, *, memory: float = 1.0, cost: float | None = 0.5, speed: float = 1000.0, **changes: Any
) -> TrialOutcome:
    metrics = {
        "peak_memory_gib": memory,
        "target_tokens_per_second": speed,
        "eval_loss": 1.23456789,
        "consumed_tokens": 1_234_567.0,
    }
    fields: dict[str, Any] = {
        "sweep_id": SWEEP,
        "trial_id": f"{n:03d}",
        "candidate_id": f"c{n}",
        "status": "COMPLETED",
        "num_workers": 2,
        "started_at": T0 + 10 * n,
        "ended_at": T0 + 10 * n + 9,
        "config": {"strategy": "ddp", "micro_batch_size": 4, "learning_rate": 1e-4, "lora_rank": None},
        "trial_config": {"model": "embedded", "learning": {"learning_rate": 1e-4}},
        "metrics": metrics | ({} if cost is None else {"cost_per_quality_usd": cost}),
        "result": measured().to_json(),
    }
    return TrialOutcome.model_validate(fields | changes)


def failed(n: int, status: str = "FAILED", **changes: Any) -> TrialOutcome:
    return outcome(n, status=status, reason_kind="crash", reason="exit code 1", result=None, **changes)


def front(outcomes: Sequence[TrialOutcome]) -> Frontier:
    trials = {o.trial_id: o.metrics for o in outcomes if o.status == "COMPLETED"}
    return frontier(trials, [OBJECTIVES[name] for name in SPEC.objectives])


class Store:
    """A database of its own for one test, and what is in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def recorder(self, spec: SweepSpec = SPEC, sweep: str = SWEEP, folder: Path | None = None) -> Recorder:
        made = Recorder(spec, sweep, folder or self.folder / "runs" / sweep)
        made.check()
        made.open()
        assert made.notes == []
        return made

    def journal(self, outcomes: Sequence[TrialOutcome]) -> None:
        folder = self.folder / "runs" / SWEEP
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "trials.jsonl").write_text("".join(o.to_line() for o in outcomes))

    @property
    def client(self) -> Any:
        return make_client(tracking_uri())

    def runs(self, role: str, spec: SweepSpec = SPEC) -> list[Any]:
        experiment = self.client.get_experiment_by_name(spec.space)
        found = self.client.search_runs([experiment.experiment_id], f"tags.sweep.role = '{role}'")
        return sorted(found, key=lambda run: str(run.data.tags.get("trial.id")))

    def history(self, run: Any, key: str) -> list[tuple[int, float, int]]:
        return [(m.step, m.value, m.timestamp) for m in self.client.get_metric_history(run.info.run_id, key)]

    def artifact(self, run: Any, path: str) -> str:
        found: str = self.client.download_artifacts(run.info.run_id, path)
        return Path(found).read_text()


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "mlflow.db"  # a schema takes seconds to make, and a moment to copy
    prepare_sqlite(f"sqlite:///{path}")
    assert [p.name for p in path.parent.iterdir()] == ["mlflow.db"]
    return path


@pytest.fixture
def store(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    shutil.copy(template, tmp_path / "mlflow.db")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    return Store(tmp_path)


def test_import_is_light() -> None:
    code = "import sys, sweeps.record; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


# -- what a trial becomes -----------------------------------------------------------------------------------------


def test_a_trial_in_full(store: Store) -> None:
    trial = outcome(7)
    store.recorder().record(trial)
    (run,), (parent,) = store.runs("trial"), store.runs("sweep")
    assert (run.info.run_name, run.info.status) == ("007 ddp 2x4", "FINISHED")
    assert (run.info.start_time, run.info.end_time) == (round((T0 + 70) * 1000), round((T0 + 79) * 1000))
    assert run.data.params == {"strategy": "ddp", "micro_batch_size": "4", "learning_rate": "0.0001"}
    expected = {
        "mlflow.parentRunId": parent.info.run_id,
        "sweep.id": SWEEP,
        "sweep.role": "trial",
        "trial.id": "007",
        "trial.attempt": "1",
        "trial.config_hash": "c7",
        "trial.kind": "quality",
        "trial.status": "COMPLETED",
        "frontier": "false",
        "mlflow.runColor": "#b0b0b0",
    }
    assert expected.items() <= run.data.tags.items()
    finals = {
        "memory/peak_memory_gib": 1.0,
        "throughput/target_tokens_per_second": 1000.0,
        "quality/eval_loss": 1.23457,
        "cost/cost_per_quality_usd": 0.5,
        "quality/consumed_tokens": 1_234_567.0,
        "cost/gpu_hours": 0.005,
    }
    assert finals.items() <= run.data.metrics.items()
    assert [h[:2] for h in store.history(run, "train/loss")] == [(100, 2.0), (200, 1.0), (300, 0.666667)]
    assert [h[:2] for h in store.history(run, "eval/loss")] == [(0, 3.0), (300, 1.23457)]
    assert store.artifact(run, "config/config.yaml") == "model: embedded\nlearning:\n  learning_rate: 0.0001\n"
    assert json.loads(store.artifact(run, "memory.json"))["forward"]["ranks"][0]["accounts"]["weights"] == 2**30
    parts = {"updates", "evaluations", "saves", "seconds", "speed"}
    assert set(json.loads(store.artifact(run, "timing.json"))) == parts
    assert store.artifact(run, "log.txt").count("\n") == 1 + 3 + 2 + 1 + 1


def test_the_sweep_in_full(store: Store) -> None:
    trials = [outcome(0), outcome(1, memory=2.0), failed(2, "OOM"), outcome(3, memory=0.5, cost=0.9, speed=1.0)]
    store.journal(trials)
    recorder = store.recorder()
    for trial in trials:
        recorder.record(trial)
    recorder.close(trials, front(trials), "FINISHED", "every legal candidate was tried", "2 configurations")
    (parent,) = store.runs("sweep")
    assert (parent.info.run_name, parent.info.status) == (SWEEP, "FINISHED")
    assert parent.data.params.items() >= {"space": "lora_small", "searcher": "guided", "seed": "0"}.items()
    assert parent.data.tags["sweep.space_hash"] == view.space_hash(SPEC.model_copy(update={"runs_dir": "elsewhere"}))
    totals = {
        "sweep/frontier_size": 2.0,
        "sweep/trials_completed": 3.0,
        "sweep/trials_oom": 1.0,
        "sweep/gpu_hours": 0.02,
    }
    assert totals.items() <= parent.data.metrics.items()
    volumes = store.history(parent, "sweep/hypervolume")
    assert [step for step, _, _ in volumes] == [1, 2, 3, 4]
    assert [v for _, v, _ in volumes] == sorted(v for _, v, _ in volumes)
    final = front(trials).hypervolume
    assert final is not None
    assert volumes[-1][1] == pytest.approx(final, rel=1e-5)
    ranks = {
        run.data.tags["trial.id"]: (
            run.data.tags["frontier"],
            run.data.metrics.get("frontier/rank"),
            run.data.tags["mlflow.runColor"],
        )
        for run in store.runs("trial")
    }
    assert ranks == {
        "003": ("true", 0.0, "#e7298a"),
        "000": ("true", 1.0, "#e7298a"),
        "001": ("false", None, "#b0b0b0"),
        "002": ("false", None, "#b0b0b0"),
    }
    note = parent.data.tags["mlflow.note.content"]
    assert note.startswith("2 configurations\n\n[Compare the trials](#/experiments/")
    assert "[002](#/experiments/" in note
    assert "mlflow ui" in note
    assert store.artifact(parent, "frontier/trials.csv").startswith("trial,attempt,kind,status,frontier_rank,strategy")
    assert store.artifact(parent, "trials.jsonl").count("\n") == 4
    url = recorder.url()
    assert url.startswith("http://127.0.0.1:5000/#/experiments/")
    assert f"viewStateShareKey={SWEEP}" in url
    assert "workflowType=machine_learning" in url
    assert recorder.ui_command() == f"mlflow ui --backend-store-uri sqlite:///{store.folder}/mlflow.db"


def test_secrets_of_the_environment_stay_at_home(store: Store) -> None:
    spec = SPEC.model_copy(update={"env": {"HF_TOKEN": "hf_abc", "NCCL_DEBUG": "INFO"}})
    trial = outcome(0)
    store.journal([trial])
    recorder = store.recorder(spec)
    recorder.record(trial)
    recorder.close([trial], front([trial]), "FINISHED", "", "")
    (parent,) = store.runs("sweep")
    sent = store.artifact(parent, "spec.yaml")
    assert "hf_abc" not in sent
    assert "NCCL_DEBUG: INFO" in sent


def test_a_trial_that_left_the_frontier_sorts_behind_it(store: Store) -> None:
    trials = [outcome(0)]
    recorder = store.recorder()
    recorder.close(trials, front(trials), "KILLED", "interrupted", "1")
    trials.append(outcome(1, memory=0.5))
    recorder = store.recorder()
    recorder.close(trials, front(trials), "FINISHED", "done", "2")
    old, new = store.runs("trial")
    assert (old.data.tags["frontier"], old.data.metrics["frontier/rank"]) == ("false", LEFT_FRONTIER)
    assert (new.data.tags["frontier"], new.data.metrics["frontier/rank"]) == ("true", 0)
    experiment = store.client.get_experiment_by_name("lora_small").experiment_id
    order = store.client.search_runs([experiment], "tags.sweep.role = 'trial'", order_by=["metrics.`frontier/rank`"])
    assert [run.data.tags["trial.id"] for run in order] == ["001", "000"]


@pytest.mark.parametrize(
    ("strategy", "workers", "micro", "name"),
    [
        ("ddp", 2, 4, "047 ddp 2x4"),
        ("fsdp2", 8, 16, "047 fsdp2 8x16"),
        ("fsdp2", 128, 16, "047 fsdp2 128"),
        ("an_unusually_long_one", 1, 1, "047 an_unusual"),
    ],
)
def test_names_fit_the_list_of_runs(strategy: str, workers: int, micro: int, name: str) -> None:
    trial = outcome(47, num_workers=workers, config={"strategy": strategy, "micro_batch_size": micro})
    assert view.run_name(trial) == name
    assert len(name) <= 14


def test_values_have_one_text() -> None:
    """E02 and E18: the same value is the same text whichever way it comes, and plain data whatever holds it."""
    trial = outcome(1, config={"learning_rate": 1e-4, "on": True, "mesh": {"tp": (1, 2)}, "absent": None, "n": 3})
    there = view.params(trial)
    assert there == {"learning_rate": "0.0001", "on": "true", "mesh.tp": "[1, 2]", "n": "3"}
    assert view.params(TrialOutcome.model_validate_json(trial.to_line())) == there


def test_param_keys_are_reversible(store: Store) -> None:
    """E16."""
    names = ["mesh[0]=tp*2", "a b/c:d.e-f_g", "a//b", "/a", "..", ".", "../a", "_x5b_", "_x5b[", "é", "%", "x" * 251]
    trial = outcome(1, config={name: i for i, name in enumerate(names)})
    store.recorder().record(trial)
    (run,) = store.runs("trial")
    back = {view.param_name(key): value for key, value in run.data.params.items()}
    long = next(key for key in back if key.startswith("xxx"))
    assert run.data.tags[f"param.{long[-12:]}"] == "x" * 251
    back["x" * 251] = back.pop(long)
    assert back == {name: str(i) for i, name in enumerate(names)}
    assert view.param_key("a b/c:d.e-f_g") == "a b/c:d.e-f_g"
    rng = random.Random(0)
    for _ in range(2000):
        name = "".join(rng.choices("_x5b[]/.a%", k=rng.randint(1, 9)))
        assert view.param_name(view.param_key(name)) == name


# -- values that mislead ------------------------------------------------------------------------------------------


def test_no_nan_and_no_infinity(store: Store) -> None:
    """E04 and E05: a figure without a value is absent, so no filter or sort finds a stand-in."""
    diverged = TrialResult(
        **{
            **measured().__dict__,
            "updates": (
                Update(1, 100, 100, 60, 120, 2.5, 1.0, 1e-4, 0.5),
                Update(2, 200, 100, 60, 120, math.nan, math.inf, 1e-4, 0.5),
            ),
        }
    )
    nan = outcome(0, cost=None, result=diverged.to_json(), status="STOPPED", reason_kind="nan", metrics={})
    recorder = store.recorder()
    recorder.record(nan)
    recorder.record(TrialOutcome.model_validate_json(nan.to_line().replace('"000"', '"001"')))  # NaN is null there
    recorder.record(outcome(2, cost=None, metrics={"eval_loss": 2.5}))
    recorder.record(outcome(3, cost=None))
    runs = store.runs("trial")
    for run in runs[:2]:
        assert [(s, v) for s, v, _ in store.history(run, "train/loss")] == [(100, 2.5)]
        assert "loss none" in store.artifact(run, "log.txt")
    assert all(abs(v) < 1e300 for run in runs for v in run.data.metrics.values())
    assert "cost/cost_per_quality_usd" not in runs[3].data.metrics
    assert runs[3].data.tags["trial.undefined"] == "cost_per_quality_usd"
    experiment = store.client.get_experiment_by_name("lora_small").experiment_id
    key = "metrics.`quality/eval_loss`"
    below = store.client.search_runs([experiment], f"{key} < 3", order_by=[key])
    assert [run.data.tags["trial.id"] for run in below] == ["003", "002"]


def test_statuses(store: Store) -> None:
    """E10, and a trial that did not run through has no objective."""
    expected = {
        "COMPLETED": "FINISHED",
        "OOM": "FINISHED",
        "INFEASIBLE": "FINISHED",
        "STOPPED": "FINISHED",
        "FAILED": "FAILED",
    }
    store.recorder().sync([failed(n, status) for n, status in enumerate(expected)])
    objectives = {view.metric_key(name) for name in OBJECTIVES}
    for run, (status, shown) in zip(store.runs("trial"), expected.items(), strict=True):
        assert (run.info.status, run.data.tags["trial.status"]) == (shown, status)
        assert run.data.tags["trial.reason"] == "exit code 1"
        assert run.info.end_time is not None
        assert bool(objectives & set(run.data.metrics)) == (status in ("COMPLETED", "STOPPED"))


# -- again and again ----------------------------------------------------------------------------------------------


def test_replay_changes_nothing(store: Store) -> None:
    trials = [outcome(n, memory=1 + n) for n in range(3)] + [failed(3)]
    store.journal(trials)

    def once() -> Any:
        recorder = store.recorder()
        for trial in trials:
            recorder.record(trial)
        recorder.sync(trials)
        recorder.close(trials, front(trials), "FINISHED", "done", "headline")
        assert recorder.notes == []
        assert recorder.pending == 0
        (parent,), runs = store.runs("sweep"), store.runs("trial")
        ids = [run.info.run_id for run in (parent, *runs)]
        keys = ("sweep/hypervolume", "sweep/gpu_hours", "frontier/rank", "train/loss", "eval/loss", "quality/eval_loss")
        return ids, {(run.info.run_id, key): store.history(run, key) for run in (parent, *runs) for key in keys}

    first = once()
    assert len(first[0]) == 5
    assert [len(h) for h in first[1].values()].count(3) == 3
    assert once() == first
    (store.folder / "runs" / SWEEP / "mlflow_id").unlink()  # what was remembered is lost; the journal is there
    assert once() == first


def test_resume_continues_the_run(store: Store) -> None:
    store.recorder().close([outcome(0)], front([outcome(0)]), "KILLED", "interrupted", "1")
    (before,) = store.runs("sweep")
    assert before.info.status == "KILLED"
    recorder = store.recorder()
    (parent,) = store.runs("sweep")
    assert (parent.info.run_id, parent.info.status) == (before.info.run_id, "RUNNING")
    recorder.sync([outcome(0), outcome(1)])
    assert [run.data.tags["trial.id"] for run in store.runs("trial")] == ["000", "001"]


def test_a_half_sent_trial_is_completed(store: Store) -> None:
    """A process that dies between the first and the last call leaves a run that has not ended."""
    recorder = store.recorder()
    trial = outcome(0)
    tags = view.tags(trial, SWEEP, recorder._run_id, SPEC.objectives)
    orphan = {**tags, "trial.id": "009"}
    for some in (tags, orphan):
        store.client.create_run(recorder._store.experiment_id, tags=some)
    store.recorder().sync([trial])
    sent, ended = store.runs("trial")
    assert sent.info.status == "FINISHED"
    assert len(store.history(sent, "train/loss")) == 3
    assert ended.info.status == "KILLED"
    assert ended.data.tags["trial.reason"]


def test_drift_is_told_not_overwritten(store: Store) -> None:
    """E02: another value under the same name is neither logged by half nor lost without a word."""
    store.recorder().record(outcome(0))
    other = Recorder(SPEC.model_copy(update={"seed": 7}), SWEEP, store.folder / "runs" / SWEEP)
    other.check()
    other.open()
    other.record(outcome(0, candidate_id="another", config={"learning_rate": 3e-4}))
    (run,), (parent,) = store.runs("trial"), store.runs("sweep")
    assert run.data.params["learning_rate"] == "0.0001"
    assert parent.data.params["seed"] == "0"
    assert parent.data.tags["sweep.drift"] == "seed: 0 → 7"
    assert len(other.notes) == 2
    assert "another configuration" in other.notes[1]
    assert other.pending == 0


def test_one_refused_trial_does_not_hold_up_the_others(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = store.recorder()
    with monkeypatch.context() as patch:
        patch.setattr(view, "params", lambda _: {"bad[key]": "1"})
        recorder.record(outcome(0))
    recorder.sync([outcome(0), outcome(1)])
    assert recorder.pending == 0
    assert "refused trial 000" in recorder.notes[0]
    assert [run.info.status for run in store.runs("trial")] == ["KILLED", "FINISHED"]
    store.recorder().sync([outcome(0), outcome(1)])
    assert [run.info.status for run in store.runs("trial")] == ["FINISHED", "FINISHED"]


def test_two_sweeps_with_one_name(store: Store) -> None:
    """E17: two checkouts lead to the same id on the same day; names are labels."""
    spec = SPEC.model_copy(update={"run_name": "mine"})
    first, second = store.recorder(spec), store.recorder(spec, folder=store.folder / "other" / SWEEP)
    first.record(outcome(0))
    second.record(outcome(0, memory=9.0))
    second.close([outcome(0, memory=9.0)], front([outcome(0)]), "FINISHED", "done", "1")
    parents, runs = store.runs("sweep"), store.runs("trial")
    assert len({p.info.run_id for p in parents}) == 2
    assert {p.info.run_name for p in parents} == {"mine"}
    assert {r.data.metrics["memory/peak_memory_gib"] for r in runs} == {1.0, 9.0}
    assert {r.data.tags["mlflow.parentRunId"] for r in runs} == {p.info.run_id for p in parents}
    assert first.url() != second.url()


def test_runs_of_a_dead_process_are_ended(store: Store) -> None:
    """E09."""
    recorder = store.recorder()
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    experiment, host = recorder._store.experiment_id, socket.gethostname()
    sweeps = {"dead": (host, gone.pid), "alive": (host, os.getppid()), "elsewhere": ("another-host", gone.pid)}
    for name, (where, pid) in sweeps.items():
        tags = {"sweep.id": name, "sweep.role": "sweep", "sweep.host": where, "sweep.pid": str(pid)}
        parent = store.client.create_run(experiment, tags=tags)
        store.client.create_run(
            experiment, tags={"mlflow.parentRunId": parent.info.run_id, "sweep.role": "trial", "trial.id": name}
        )
    store.recorder()
    assert {run.data.tags["sweep.id"]: run.info.status for run in store.runs("sweep")} == {
        SWEEP: "RUNNING",
        "dead": "KILLED",
        "alive": "RUNNING",
        "elsewhere": "RUNNING",
    }
    assert {run.data.tags["trial.id"]: run.info.status for run in store.runs("trial")} == {
        "dead": "KILLED",
        "alive": "RUNNING",
        "elsewhere": "RUNNING",
    }
    dead = next(run for run in store.runs("sweep") if run.data.tags["sweep.id"] == "dead")
    assert dead.data.tags["sweep.reason"] == "the sweep's process is gone; resume it with resume=dead"


# -- stores that are away, or wrong -------------------------------------------------------------------------------


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


# -- what the page shows ------------------------------------------------------------------------------------------


def test_the_saved_view_opens_the_comparison(store: Store) -> None:
    """The contract with the pinned MLflow: format and key as its page reads them."""
    recorder = store.recorder()
    recorder.close([outcome(0)], front([outcome(0)]), "FINISHED", "done", "1")
    experiment = store.client.get_experiment_by_name("lora_small")
    saved = json.loads(experiment.tags[f"mlflow.sharedViewState.{SWEEP}"])
    assert set(saved) == {"name", "createdAt", "state"}
    assert saved["state"].startswith("deflate;")
    state = json.loads(zlib.decompress(base64.b64decode(saved["state"].removeprefix("deflate;"))))
    assert state["searchFilter"] == f"tags.sweep.role = 'trial' and tags.sweep.id = '{SWEEP}'"
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`frontier/rank`", True)
    assert {"metrics.`cost/cost_per_quality_usd`", "params.`micro_batch_size`"} <= set(state["selectedColumns"])
    shown = [c for c in state["compareRunCharts"] if not c["deleted"]]
    assert [c["type"] for c in shown] == ["SCATTER"] * 3 + ["PARALLEL"] + ["LINE"] * 2
    assert shown[0]["xaxis"] == {"key": "memory/peak_memory_gib", "type": "METRIC"}
    assert shown[3]["selectedParams"] == ["learning_rate", "micro_batch_size"]
    assert shown[3]["selectedMetrics"] == [view.metric_key(name) for name in SPEC.objectives]
    sections = {s["uuid"] for s in state["compareRunSections"]}
    assert all(c["metricSectionId"] in sections for c in state["compareRunCharts"])
    (run,) = store.runs("trial")
    drawn = {c["metricKey"] for c in state["compareRunCharts"] if "metricKey" in c}
    assert set(run.data.metrics) <= drawn  # any other would get a chart of its own


def test_parallel_coordinates_have_the_axes_that_all_trials_have() -> None:
    """The page leaves out every run that lacks one: with an axis of one strategy it would show none of the others."""
    axes = {"learning": {"learning_rate": [1e-4, 2e-4]}, "system": {"strategy": ["ddp", "zero"], "zero_stage": [2, 3]}}
    spec = SweepSpec.model_validate({"space": "lora_small", **axes})
    zero = outcome(0, config={"learning_rate": 1e-4, "strategy": "zero", "zero_stage": 2})
    ddp = outcome(1, config={"learning_rate": 1e-4, "strategy": "ddp"})
    for trials, shared in (([zero], ["zero_stage"]), ([zero, ddp], [])):
        saved = json.loads(view.saved_view(spec, SWEEP, trials, 0))
        state = json.loads(zlib.decompress(base64.b64decode(saved["state"].removeprefix("deflate;"))))
        (chart,) = [c for c in state["compareRunCharts"] if c["type"] == "PARALLEL"]
        assert sorted(chart["selectedParams"]) == sorted(["learning_rate", "strategy", *shared])
        assert "params.`zero_stage`" in state["selectedColumns"]


def test_the_note_fits_with_500_trials() -> None:
    trials = [
        outcome(n, memory=1 + n, speed=1000.0 + n, config={"strategy": "s" * 40, "learning_rate": 1e-4})
        if n % 2
        else failed(n)
        for n in range(500)
    ]
    links = {o.trial_id: f"#/experiments/1/runs/{'0' * 32}" for o in trials}
    note = view.note(SPEC, trials, front(trials), links, headline="h" * 900, view="#/view", commands=["mlflow ui"])
    assert len(note) <= 8000
    assert note.count("| [") == 15
    assert "… and 235 more: frontier.json" in note
    assert "250 of 500 trials did not complete" in note
    assert note.endswith("```\nmlflow ui\n```")
