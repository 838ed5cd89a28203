"""The command line: one clear message for bad input, exit statuses, resuming, Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sweeps import run
from sweeps.journal import Journal
from tests.sweeps.factories import ONE_WAY

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "space=lora_small", "launcher=inline", "system.num_workers=1", "system.micro_batch_size=4", "target_eval_loss=6.0",
    "budget.tokens_per_trial=1500", "eval_fraction=0.02", *(f"{key}={value}" for key, value in ONE_WAY.items()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["space=lora_smal"], ["unknown space 'lora_smal' (did you mean lora_small?)"]),
        ([], ["usage: python sweeps/run.py"]),
        (["lora_small"], ["did you mean space=lora_small?"]),
        (["space=lora_small", "objectives=[eval_loss,eval_loss]"], ["each objective once"]),
        (["space=lora_small", "runs_dir="], ["runs_dir= has no value"]),
        (["model=embedded"], ["space=… is missing"]),
        (["space=lora_small", "budget.trails=3"], ["unknown key budget.trails=3 (did you mean budget.trials?)"]),
        (
            ["space=lora_small", "learning.learning_rate=fast", "searcher=gird", "sytem.num_workers=2"],
            ["learning.learning_rate=fast", "did you mean grid?", "did you mean system.num_workers?"],
        ),
        (["space=lora_small", "data=nothing.jsonl"], ["data not found: nothing.jsonl"]),
        (
            ["space=lora_small", "model=./nothing", "budget.trails=3"],
            ["model=./nothing: no such folder", "did you mean budget.trials?"],
        ),
        (["space=lora_small", "cluster=h100x9"], ["cluster=h100x9: unknown (did you mean h100x8?)"]),
        (["space=lora_small", "model="], ["model= has no value"]),
        (["space=lora_small", "device=cuda", "launcher=inline"], ["device=cuda: this process sees no CUDA device"]),
        ([*SMALL, "learning.lora_targets=q_prj"], ["'q_prj' is no layer of this model; it has q_proj, k_proj"]),
        (["space=lora_small", "resume="], ["resume= has no value"]),
        (["space=lora_small", "resume=latest"], ["resume=latest: there are no sweeps in"]),
        (["space=lora_small", "system.num_workers=999"], ["needs 999 CPUs", "system.num_workers="]),
        (["space=lora_small", "device=cuda", "system.num_workers=1"], ["needs 1 GPUs", "device=cpu"]),
    ],
)
def test_bad_input(
    arguments: list[str], messages: list[str], store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run.main(arguments) == 2
    shown = capsys.readouterr()
    for message in messages:
        assert message in shown.err + shown.out
    assert "Traceback" not in shown.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "0 rows"),
        ('{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": 3}\n', "line 2"),
        ('{"prompt": "' + "x" * 3000 + '", "completion": "b"}\n{"prompt": "c", "completion": "d"}\n', "line 1"),
    ],
)
def test_bad_data(
    content: str, message: str, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("d.jsonl").write_text(content)
    assert run.main([*SMALL, "data=d.jsonl"]) == 2
    assert message in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["d.jsonl"]


def test_every_fault_of_a_space_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sections that are no sections, with right overrides beside them: the file is at fault."""
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text("learning: 3\nsystem: [1]\nbudget: foo\n")
    assert run.main(["space=bad.yaml", "system.num_workers=1", "budget.trials=1"]) == 2
    shown = capsys.readouterr().err
    for key in ("learning", "system", "budget"):
        assert f"error: {key}" in shown


def test_help_lists_spaces_keys_types_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for text in ("lora_small", "budget.trials: int or null = null", "learning.learning_rate: float or list",
                 "system.strategy: ddp|fsdp2|zero or list = ddp", "resume: latest or a sweep's id"):  # fmt: skip
        assert text in shown


def test_run_then_resume(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report names the frontier and the next commands; resuming runs the rest, and nothing else may change."""
    monkeypatch.chdir(tmp_path)
    assert run.main([*SMALL, "budget.trials=1"]) == 0
    shown = capsys.readouterr().out
    assert "Frontier of lora_small-" in shown
    assert "least memory, cheapest, fastest" in shown
    assert "mlflow ui --backend-store-uri" in shown
    assert "resume=lora_small-" in shown
    assert run.main(["resume=latest", "budget.minutes=9"]) == 0
    shown = capsys.readouterr().out
    assert "budget.trials=1 is spent" in shown
    assert re.search(r"go on: .* resume=lora_small-\d+-1 budget\.minutes=9\.0 budget\.trials=…", shown)
    assert run.main(["resume=latest", "budget.trials=2"]) == 0
    assert len(Journal.find("latest", tmp_path / "runs").read()) == 2
    capsys.readouterr()
    assert run.main(["resume=latest"]) == 0  # nothing is left: it says so, and keeps what there is
    assert "every legal candidate was tried" in capsys.readouterr().out
    assert run.main(["resume=latest", "learning.learning_rate=0.5"]) == 2
    assert "learning.learning_rate" in capsys.readouterr().err
    assert run.main(["resume=latest", "space=full"]) == 2


def interrupt_after_first_trial(command: list[str], folder: Path, number: signal.Signals) -> tuple[int, str, str]:
    """Run a sweep in `folder`, interrupt it once a trial is in the journal; return exit status and output."""
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    deadline = time.time() + 200
    while time.time() < deadline and process.poll() is None:
        found = list(folder.glob("runs/*/trials.jsonl"))
        if found and found[0].read_text().count("\n") == 1:
            break
        time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def check_interrupted(command: list[str], folder: Path, store: str, number: signal.Signals = signal.SIGINT) -> None:
    """Interrupt in the second trial, then go on: the first is not run again, and MLflow has each once and ended."""
    status, out, err = interrupt_after_first_trial(command, folder, number)
    assert status == 130, err
    assert "interrupted" in out
    assert "resume=lora_small-" in out
    assert "Traceback" not in out + err, out + err
    journal = Journal.find("latest", folder / "runs")
    (first,) = journal.read()
    assert run.main(["resume=latest"]) == 0
    outcomes = journal.read()
    assert [o.status for o in outcomes] == ["COMPLETED", "COMPLETED"]
    assert outcomes[0] == first
    import mlflow

    client = mlflow.MlflowClient(store)
    experiment = client.get_experiment_by_name("lora_small")
    runs = client.search_runs([experiment.experiment_id], f"tags.sweep.id = '{journal.sweep_id}'")
    assert sorted(r.data.tags["sweep.role"] for r in runs) == ["sweep", "trial", "trial"]
    assert {r.info.status for r in runs} == {"FINISHED"}


def command_of(*overrides: str) -> list[str]:
    return [sys.executable, str(ROOT / "sweeps" / "run.py"), *overrides]


def test_ctrl_c_in_this_process_then_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From another directory, with a store of its own."""
    store = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.chdir(tmp_path)
    longer = [a for a in SMALL if not a.startswith(("target", "budget"))]
    check_interrupted(
        command_of(*longer, "budget.trials=2", "budget.tokens_per_trial=6000", "target_eval_loss=0.5"), tmp_path, store
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_on_a_cluster_then_resume(
    number: signal.Signals, cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.chdir(tmp_path)
    check_interrupted(command_of(*(a for a in SMALL if not a.startswith("launcher"))), tmp_path, store, number)
