"""The command line: the same job alone, in a fresh process and under torchrun, and one line for each mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.tiny import records
from trainers import train, yaml_text

ROOT = Path(__file__).parents[2]


def write(folder: Path, name: str = "config.yaml", out: str = "out", **changes: Any) -> str:
    """Write a config over 10 rows, 8 of them trained on: 4 updates of 2."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in records(10)))
    tree = {
        "data": str(data),
        "eval_fraction": 0.2,
        "learning": {"global_batch_size": 2, "lora_rank": 2, "learning_rate": 1e-2, **changes.pop("learning", {})},
        "system": changes.pop("system", {}),
        "run": {"device": "cpu", "output_dir": str(folder / out), **changes.pop("run", {})},
        **changes,
    }
    path = folder / name
    path.write_text(yaml_text.dump(tree))
    return str(path)


def start(*command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, env=env, check=False)


def result(folder: Path, out: str = "out") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / out / "result.json").read_text())
    return found


def losses(found: dict[str, Any]) -> list[float]:
    return [u["loss"] for u in found["updates"]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The uninterrupted job in this process."""
    folder = tmp_path_factory.mktemp("whole")
    assert train.main([write(folder)]) == 0
    return result(folder)


@pytest.mark.slow
def test_a_fresh_process_goes_on_where_another_stopped(
    tmp_path: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([write(tmp_path, run={"max_updates": 2})]) == 0
    told = capsys.readouterr().out
    assert "update 2/4  loss " in told
    assert "stopped: budget" in told
    assert losses(result(tmp_path)) == losses(whole)[:2]
    rest = start("trainers.train", write(tmp_path))
    assert rest.returncode == 0, rest.stderr
    assert "update 3/4  loss " in rest.stdout
    assert "update 1/4" not in rest.stdout
    assert losses(result(tmp_path)) == losses(whole)  # what came before the save is in the record too
    assert result(tmp_path)["figures"]["eval_loss"] == whole["figures"]["eval_loss"]


def test_two_processes_under_torchrun_learn_the_same(tmp_path: Path, whole: dict[str, Any]) -> None:
    path = write(tmp_path, system={"num_workers": 2})
    done = start("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "trainers.train", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("update 4/4") == 1
    found = result(tmp_path)
    assert found["num_workers"] == 2
    assert losses(found) == pytest.approx(losses(whole), rel=1e-5)
    assert found["fingerprints"] == whole["fingerprints"]


def refused(path: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    assert train.main([path]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    return streams.err.splitlines()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"system": {"num_workers": 2}},
            "error: the config is for system.num_workers=2, but 1 process(es) were started; use torchrun --nproc-per",
        ),
        ({"data": "nowhere/rows.jsonl"}, "error: data not found: nowhere/rows.jsonl (there is no folder nowhere)"),
        ({"model": "./nowhere"}, "error: model=./nowhere: no such folder; give embedded, a hub id"),
        ({"model": "nobody/nothing"}, "error: model=nobody/nothing: it cannot be loaded (HF_HUB_OFFLINE is set)"),
        (
            {"system": {"micro_batch_size": 3}},
            "error: global_batch_size=2 is not divisible by micro_batch_size=3 × dp=1 (dp_replicate=1 × dp_shard=1)",
        ),
        (
            {"learning": {"lerning_rate": 1}},
            "error: unknown key learning.lerning_rate (did you mean learning.learning_rate?)",
        ),
        ({"learning": {"seq_len": 10}}, "error: "),
    ],
    ids=["ranks", "data", "model folder", "model id", "batch", "key", "no target"],
)
def test_a_mistake_is_one_line_and_status_2(
    changes: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = refused(write(tmp_path, **changes), capsys)
    assert line.startswith(told)
    assert not (tmp_path / "out").exists()


def test_a_resume_of_another_run_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([write(tmp_path, run={"max_updates": 1})]) == 0
    capsys.readouterr()
    assert train.main([write(tmp_path, learning={"learning_rate": 2e-2})]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    told = "update-000001 was saved by a run of another learning configuration (learning.learning_rate: 0.01 → 0.02)"
    assert told in line


def test_a_failure_of_the_job_says_what_is_known_and_is_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes\nmore")

    monkeypatch.setattr("trainers.token_loss.loss_sum", fail)
    assert train.main([write(tmp_path)]) == 1
    line, *more = capsys.readouterr().err.splitlines()
    assert line.startswith("failed: host_oom: rank 0, forward: RuntimeError: DefaultCPUAllocator: can't allocate")
    assert more[1] == "  what was growing: activations"
    assert "data.jsonl:2, 102 tokens" in more[2]  # of the smallest batch, with which the rehearsal begins


def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([]) == 2
    assert train.main(["-h"]) == 0
    assert capsys.readouterr().out.count("usage: python -m trainers.train CONFIG.yaml") == 2
    missing = str(tmp_path / "missing.yaml")
    assert refused(missing, capsys)[0].startswith(f"error: cannot read {missing}")
