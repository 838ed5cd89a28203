"""Where a sweep stands after a trial: what is spent of its budget, and what its frontier has come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sweeps.compose import effective
from sweeps.objectives import Objective
from sweeps.outcome import TrialOutcome
from sweeps.pareto import frontier
from sweeps.spec import Budget
from sweeps.wording import counted


@dataclass(frozen=True)
class Standing:
    """A moment of a sweep."""

    trials: int
    gpu_hours: float
    points: int
    """on the frontier"""
    gain: float | None
    """of hypervolume by the last trial, relative; None: there was nothing before"""

    def text(self, budget: Budget) -> str:
        """Return it in a line, with what the budget allows."""
        trials = f"{self.trials}{f' of {budget.trials}' if budget.trials else ''} trials"
        hours = f"{self.gpu_hours:.3g}{f' of {budget.gpu_hours:g}' if budget.gpu_hours else ''} GPU-hours"
        if not self.points:
            return f"{trials}, {hours}; no frontier yet"
        gained = f", hypervolume {self.gain:+.1%} by this trial" if self.gain is not None else ""
        return f"{trials}, {hours}; {counted(self.points, 'configuration')} on the frontier{gained}"


def standing(outcomes: Sequence[TrialOutcome], objectives: Sequence[Objective], price: float) -> Standing:
    """Return where a sweep stands; both hypervolumes against the reference point of all trials so far."""
    trials = [o for o in outcomes if o.repeats is None and not o.cut_short]
    hours = sum(o.gpu_hours for o in outcomes)
    now = frontier(_figures(trials, price), objectives)
    if now.hypervolume is None:
        return Standing(len(trials), hours, 0, None)
    before = frontier(_figures(trials[:-1], price), objectives, now.reference_point).hypervolume
    gain = now.hypervolume / before - 1 if before else None
    return Standing(len(trials), hours, len(now.points), gain)


def _figures(outcomes: Sequence[TrialOutcome], price: float) -> dict[str, dict[str, float]]:
    return {o.trial_id: o.metrics for o in effective(outcomes, price) if o.competes}
