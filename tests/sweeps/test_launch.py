"""Trials on a real Ray cluster of two nodes: placement, mixed worlds, failures as results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from sweeps import space
from sweeps.jobs import fault_of_job, proved
from sweeps.launch import _tune_searcher
from sweeps.predict import SUM
from sweeps.search import Ask
from sweeps.spec import SweepSpec
from sweeps.sweep import run_sweep
from sweeps.trial import Ending, Job
from tests.sweeps.factories import ONE_WAY
from tests.sweeps.silent import SilentScreen
from trainers.diagnose import Fault, WorkerFault
from trainers.errors import UserError

TINY = {
    **ONE_WAY,
    "budget.tokens_per_trial": "1500",
    "eval_every_tokens": "1000",
    "target_eval_loss": "6.0",
    "eval_fraction": "0.02",
}


def spec_for(folder: Path, **overrides: object) -> SweepSpec:
    given = {**TINY, "runs_dir": str(folder / "runs"), **{k.replace("__", "."): v for k, v in overrides.items()}}
    return space.load("lora_small", given)


@pytest.mark.slow
def test_mixed_worlds_side_by_side_on_two_nodes(cluster: str, store: str, tmp_path: Path) -> None:
    """Worlds of 1, 2 and 4 share 4 slots on two nodes: all finish, and learn from the same samples.

    Each width has processes of its own, which a trial of another width waits for: they end when nobody uses them.
    """
    spec = spec_for(
        tmp_path,
        system__num_workers=["4", "1", "2"],
        system__micro_batch_size="2",
        learning__learning_rate="3e-3",
        ray__cpus_per_worker="0.5",
        ray__max_concurrent_trials="4",
    )
    report = run_sweep(spec, SilentScreen())
    assert [o.status for o in report.outcomes] == ["COMPLETED"] * 3
    assert sorted(o.num_workers for o in report.outcomes) == [1, 2, 4]
    measured = [m for o in report.outcomes if (m := o.measured) is not None]
    assert len({m.fingerprints for m in measured}) == 1
    losses = [m.updates[-1].loss for m in measured]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    for outcome, result in zip(report.outcomes, measured, strict=True):
        assert result.effective_config["system"]["num_workers"] == outcome.config["num_workers"]


class Killer(SilentScreen):
    """Kills a worker of the first trial once it trains."""

    killed = False

    def progress(self, trial_id: str, facts: Mapping[str, Any]) -> None:
        if trial_id == "000" and not self.killed:
            workers = [p for p in psutil.process_iter(["name"]) if "RayTrainWorker" in (p.info["name"] or "")]
            if workers:
                self.killed = True
                workers[0].kill()


def test_two_nodes_a_killed_worker_and_the_next_trial(cluster: str, store: str, tmp_path: Path) -> None:
    """Each node has one CPU and each worker takes one, spread strictly: code, data and results travel.

    The first trial's worker is killed: that is a result, its node's worker goes too, and the next trial finds room.
    """
    spec = spec_for(
        tmp_path,
        system__num_workers="2",
        system__micro_batch_size="2",
        learning__learning_rate=["3e-3", "1e-3"],
        budget__tokens_per_trial="20000",
        eval_every_tokens="5000",
        ray__placement="STRICT_SPREAD",
    )
    report = run_sweep(spec, Killer())
    first, second = report.outcomes
    assert (first.status, first.reason_kind) == ("FAILED", "killed_unproved")
    assert "process died" in first.reason
    assert "target_tokens_per_second" not in first.metrics
    assert second.status == "COMPLETED"
    assert second.measured is not None
    assert second.measured.num_workers == 2
    line = json.loads((report.folder / "trials.jsonl").read_text().splitlines()[1])
    assert line["metrics"]["tokens_per_second"] > 0


def test_more_workers_than_the_cluster_has_is_refused(cluster: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"num_workers=3 needs 3 CPUs.*room for 2.*system\.num_workers=2"):
        run_sweep(spec_for(tmp_path, system__num_workers="3"), SilentScreen())
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_an_oom_of_one_rank_is_a_result_with_its_cause(cluster: str, store: str, tmp_path: Path) -> None:
    """Rank 1 has room for the weights and gradients, and not for the optimizer's state; rank 0 loses its peer."""
    spec = spec_for(
        tmp_path,
        system__num_workers="2",
        system__micro_batch_size="8",
        learning__learning_rate="3e-3",
        memory_limit_gib="0.0036",
        env={"MEMORY_LIMIT_RANK": "1", "MEMORY_LIMIT_PHASE": "first_optimizer_step"},
    )
    (outcome,) = run_sweep(spec, SilentScreen()).outcomes
    assert (outcome.status, outcome.reason_kind) == ("OOM", "host_oom")
    assert (outcome.phase, outcome.rank) == ("first_optimizer_step", 1)
    # 0.0036 GiB are 3.7 MiB.
    assert outcome.metrics[SUM] > 0.0036  # it was foreseen
    assert re.fullmatch(r"memory_limit_gib=0\.0036 is reached: .* beside the 3\.\d MiB in use", outcome.reason)
    assert "what was growing: optimizer state" in outcome.details
    assert "peak_memory_gib" not in outcome.metrics


def test_a_killed_process_is_one_of_memory_only_where_the_kernel_counts_it() -> None:
    killed = Fault("killed_unproved", "unknown", 1, "the worker process died")
    assert proved(killed, 0, "host memory peak 1.00 of 2.00 GiB") is killed
    found = proved(killed, 1, "host memory peak 1.99 of 2.00 GiB")
    assert (found.kind, found.status) == ("host_oom", "OOM")
    assert "oom_kill +1" in found.lines[0]
    assert found.lines[1] == "host memory peak 1.99 of 2.00 GiB"
    crash = Fault("crash", "forward", 0, "ValueError: bad")
    assert proved(crash, 3, "") is crash


class FakeDesk:
    """Hands out jobs of given widths in order, each when it fits."""

    def __init__(self, widths: list[int]) -> None:
        self.widths = widths
        self.endings: list[Ending] = []

    def next(self, free_workers: int | None) -> Job | Ask:
        if not self.widths:
            return Ask.FINISHED
        if free_workers is not None and self.widths[0] > free_workers:
            return Ask.WAIT
        return Job(f"{len(self.widths)}", 1, "c", self.widths.pop(0), 8, {}, 0.0)

    def finish(self, job: Job, ending: Ending) -> None:
        self.endings.append(ending)


def test_tune_is_handed_a_trial_only_when_its_workers_fit() -> None:
    desk = FakeDesk([2, 4, 1])
    search = _tune_searcher()(desk, 4, {})
    assert search.suggest("a")["job"]["num_workers"] == 2
    assert search.suggest("b") is None  # 4 do not fit beside 2, and 1 does not overtake
    search.on_trial_complete("a", result={"ending": json.dumps(Ending(fault=Fault("crash", "load", 0, "x")).to_json())})
    assert search.suggest("b")["job"]["num_workers"] == 4
    assert search.suggest("c") is None
    search.on_trial_complete("b", error=True)
    assert search.suggest("c")["job"]["num_workers"] == 1
    assert search.suggest("d") is None  # one is still running: its ending may bring more
    search.on_trial_complete("c", error=True)
    assert search.suggest("d") == "FINISHED"
    assert desk.endings[0].fault == Fault("crash", "load", 0, "x")
    assert desk.endings[1].fault is not None
    assert "driver process died" in desk.endings[1].fault.message


class WorkerGroupFailure(Exception):
    """Has what Ray Train's error has."""

    def __init__(self, failures: dict[int, BaseException]) -> None:
        super().__init__("worker group failed")
        self.worker_failures = failures


def test_the_rank_that_failed_first_is_the_cause() -> None:
    oom = WorkerFault(Fault("host_oom", "backward", 1, "DefaultCPUAllocator: can't allocate memory"))
    peer = WorkerFault(Fault("crash", "backward", 0, "RuntimeError: Connection closed by peer"))
    fault = fault_of_job(WorkerGroupFailure({0: peer, 1: oom}), 1.0, 60.0)
    assert (fault.kind, fault.rank, fault.phase, fault.status) == ("host_oom", 1, "backward", "OOM")


@pytest.mark.slow
def test_a_trial_in_a_lane_is_what_it_is_in_a_job_of_its_own(cluster: str, store: str, tmp_path: Path) -> None:
    """In the same processes after others, of one worker and of two: losses bit for bit, and the same memory."""
    space_of: dict[str, Any] = {
        "system__strategy": ["ddp", "zero"], "system__zero_stage": [3], "system__micro_batch_size": "4",
        "learning__learning_rate": "3e-3", "budget__trials": None,
    }  # fmt: skip
    found = []
    for reuse, workers in ((True, ["1", "2"]), (False, ["2"])):
        more = {**space_of, "system__num_workers": workers, "ray__reuse_processes": reuse}
        outcomes = run_sweep(spec_for(tmp_path / str(reuse), **more), SilentScreen()).outcomes
        assert [o.status for o in outcomes] == ["COMPLETED"] * 2 * len(workers)
        found.append({o.candidate_id: o.measured for o in outcomes})
    lane, alone = found
    for candidate, result in alone.items():
        other = lane[candidate]
        assert result is not None
        assert other is not None
        assert [u.loss for u in other.updates] == [u.loss for u in result.updates]
        assert [e.loss for e in other.evaluations] == [e.loss for e in result.evaluations]
        for phase, memory in result.memory.items():
            for one, two in zip(memory.ranks, other.memory[phase].ranks, strict=True):
                # Numbers that a library makes anew or finds from before: some hundred bytes.
                assert vars(two.accounts) == pytest.approx(vars(one.accounts), abs=4096), phase
