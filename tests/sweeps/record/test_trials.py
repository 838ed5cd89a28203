"""What a trial and a sweep become in MLflow, and no value that misleads."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from sweeps import mlflow_view as view
from sweeps.objectives import OBJECTIVES
from sweeps.outcome import TrialOutcome
from sweeps.record import LEFT_FRONTIER
from tests.sweeps.record.trials import SPEC, SWEEP, T0, Store, failed, front, measured, outcome
from trainers.result import TrialResult, Update


def test_import_is_light() -> None:
    code = "import sys, sweeps.record; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3]).returncode == 0


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
