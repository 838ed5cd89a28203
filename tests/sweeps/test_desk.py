"""The desk: ids that are never given twice, and what ends a sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweeps import cost, space
from sweeps.candidates import Candidate, Cluster, Context
from sweeps.desk import SweepDesk
from sweeps.journal import Journal
from sweeps.objectives import OBJECTIVES
from sweeps.outcome import TrialOutcome
from sweeps.search import SEARCHERS
from sweeps.sweep import drifts
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


def desk_after(outcomes: list[TrialOutcome], folder: Path, more: dict[str, object] | None = None) -> SweepDesk:
    """A resumed sweep of six candidates, c0 to c5, with these outcomes in its journal."""
    spec = space.load("lora_small", {"target_eval_loss": "3.0", "budget.trials": None, **(more or {})})
    learning = {"seq_len": 64, "learning_rate": 1e-3}
    candidates = [Candidate(f"c{i}", learning, {"num_workers": 1, "micro_batch_size": 1 + i}, 1) for i in range(6)]
    journal = Journal(folder)
    journal.outcomes = list(outcomes)
    searcher = SEARCHERS["grid"](candidates, [OBJECTIVES["peak_memory_gib"]], 0)
    for outcome in outcomes:
        if not outcome.cut_short:
            searcher.tell(outcome)
    context = Context(Cluster("cpu", 4, ""), None, None, "inline")
    return SweepDesk(spec, searcher, journal, NoRecorder(), SilentScreen(), context, cost.Prices(1.0))  # type: ignore[arg-type]


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


def timed(trial_id: str, candidate_id: str, rate: float, **more: object) -> TrialOutcome:
    """A trial that completed at `rate` target tokens a second, known to 2 %."""
    changes = {
        "status": "COMPLETED", "reason_kind": None, "reason": "", "phase": None,
        "trial_config": {"run": {"proof": "steps"}},
        "metrics": {"target_tokens_per_second": rate, "step_time_precision": 0.02}, **more,
    }  # fmt: skip
    return failed(trial_id, candidate_id).model_copy(update=changes)


def test_the_fastest_is_timed_again_after_so_many_trials(tmp_path: Path) -> None:
    three = [timed("000", "c0", 100.0), timed("001", "c1", 300.0), timed("002", "c2", 200.0)]
    desk = desk_after(three, tmp_path, {"remeasure_every": 3})
    again = desk.next(4)
    assert isinstance(again, Job)
    assert (again.trial_id, again.candidate_id, again.repeats) == ("003", "c1", "001")
    assert again.config["run"] == {"proof": "none", "target_eval_loss": None, "max_updates": 1}
    following = desk.next(4)
    assert isinstance(following, Job)
    assert (following.trial_id, following.candidate_id, following.repeats) == ("004", "c3", None)


def test_a_repeat_is_no_trial_of_the_search(tmp_path: Path) -> None:
    repeat = timed("001", "c0", 100.0, repeats="000", kind="probe")
    desk = desk_after([timed("000", "c0", 100.0), repeat], tmp_path, {"remeasure_every": 1})
    assert not repeat.competes
    assert desk.trials_left() == 5
    following = desk.next(4)
    assert isinstance(following, Job)
    assert following.candidate_id == "c1"  # the last one was a repeat: none is due


def test_drift_is_told_where_it_is_more_than_both_intervals() -> None:
    first = timed("000", "c0", 100.0)
    assert drifts([first, timed("001", "c0", 97.0, repeats="000")]) == []
    (told,) = drifts([first, timed("001", "c0", 90.0, repeats="000")])
    assert told.startswith("trial 000 was timed again as trial 001, and was 10% slower")


@pytest.mark.parametrize(
    ("trials", "confirm", "ran", "closing"),
    [(24, 3, 20, False), (24, 3, 21, True), (24, 0, 23, False), (4, 3, 2, False), (4, 3, 3, True)],
)
def test_the_last_trials_of_a_budget_are_kept_for_confirmations(
    tmp_path: Path, trials: int, confirm: int, ran: int, closing: bool
) -> None:
    """Three of 24; of four one, a quarter."""
    outcomes = [timed(f"{n:03d}", "c0", 100.0) for n in range(ran)]
    desk = desk_after(outcomes, tmp_path, {"budget.trials": trials, "confirm": confirm, "remeasure_every": 0})
    desk.next(4)
    assert desk.searcher.closing is closing


def test_the_last_quarter_of_gpu_hours_is_kept_for_confirmations(tmp_path: Path) -> None:
    """Each took a second: 3 of 4 s."""
    outcomes = [timed(f"{n:03d}", "c0", 100.0) for n in range(3)]
    for hours, closing in ((4.1 / 3600, False), (3.9 / 3600, True)):
        desk = desk_after(outcomes, tmp_path, {"budget.gpu_hours": hours, "remeasure_every": 0})
        desk.next(4)
        assert desk.searcher.closing is closing
