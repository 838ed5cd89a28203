"""The desk: ids that are never given twice, and what ends a sweep."""

from __future__ import annotations

from pathlib import Path

from sweeps import cost, space
from sweeps.candidates import Candidate, Cluster
from sweeps.desk import SweepDesk
from sweeps.journal import Journal
from sweeps.objectives import OBJECTIVES
from sweeps.outcome import TrialOutcome
from sweeps.search import SEARCHERS
from sweeps.trial import Job
from tests.sweeps.silent import SilentScreen


class NoRecorder:
    """Takes outcomes and forgets them."""

    def record(self, outcome: TrialOutcome) -> None: ...


def failed(trial_id: str, candidate_id: str) -> TrialOutcome:
    return TrialOutcome(
        sweep_id="s", trial_id=trial_id, candidate_id=candidate_id, status="FAILED", reason_kind="crash",
        reason="no such layer", phase="load", started_at=0.0, ended_at=1.0, num_workers=1, config={},
    )  # fmt: skip


def desk_after(outcomes: list[TrialOutcome], folder: Path) -> SweepDesk:
    """A resumed sweep of six candidates, c0 to c5, with these outcomes in its journal."""
    spec = space.load("lora_small", {"target_eval_loss": "3.0", "budget.trials": None})
    learning = {"seq_len": 64, "learning_rate": 1e-3}
    candidates = [Candidate(f"c{i}", learning, {"num_workers": 1, "micro_batch_size": 1 + i}, 1) for i in range(6)]
    journal = Journal(folder)
    journal.outcomes = list(outcomes)
    searcher = SEARCHERS["grid"](candidates, [OBJECTIVES["peak_memory_gib"]], 0)
    for outcome in outcomes:
        if not outcome.cut_short:
            searcher.tell(outcome)
    cluster = Cluster("cpu", 4, "")
    return SweepDesk(spec, searcher, journal, NoRecorder(), SilentScreen(), cluster, cost.Prices(1.0))  # type: ignore[arg-type]


def test_an_id_is_never_given_twice(tmp_path: Path) -> None:
    """000 was running when the sweep was interrupted and 001 had ended: the next ids are 002 and 003."""
    desk = desk_after([failed("001", "c1")], tmp_path)
    jobs = [desk.next(4), desk.next(4)]
    assert [job.trial_id for job in jobs if isinstance(job, Job)] == ["002", "003"]


def cut_short(trial_id: str, candidate_id: str) -> TrialOutcome:
    more = {"status": "STOPPED", "reason_kind": "budget", "reason": "the sweep's time was over"}
    return failed(trial_id, candidate_id).model_copy(update=more)


def test_a_trial_that_the_sweeps_time_cut_short_runs_again(tmp_path: Path) -> None:
    """In its place of the order and under its id, as the next attempt; then the order goes on."""
    desk = desk_after([failed("000", "c0"), cut_short("001", "c1"), cut_short("001", "c1")], tmp_path)
    assert desk.trials_left() == 5
    jobs = [job for job in (desk.next(4), desk.next(4)) if isinstance(job, Job)]
    assert [(job.trial_id, job.attempt, job.candidate_id) for job in jobs] == [("001", 2, "c1"), ("002", 1, "c2")]


def test_what_failed_before_a_resume_does_not_end_it(tmp_path: Path) -> None:
    """Three trials failed alike and ended the sweep; the cause was mended, so a resume tries the others."""
    desk = desk_after([failed(f"00{i}", f"c{i}") for i in range(3)], tmp_path)
    assert not desk.failing
    job = desk.next(4)
    assert isinstance(job, Job)
    assert job.candidate_id == "c3"
