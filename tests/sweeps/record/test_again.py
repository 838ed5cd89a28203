"""Recorded again: nothing doubled, nothing overwritten."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from sweeps import mlflow_view as view
from sweeps.record import Recorder
from tests.sweeps.record.trials import SPEC, SWEEP, Store, failed, front, outcome


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
