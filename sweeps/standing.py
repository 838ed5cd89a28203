"""Where a sweep stands after a trial: what is spent of its budget, and what its frontier has come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sweeps.compose import effective
from sweeps.objectives import Objective
from sweeps.outcome import TrialOutcome
from sweeps.pareto import frontier
from sweeps.spec import Budget


@dataclass(frozen=True)
class Standing:
    """A moment of a sweep."""

    trials: int
    gpu_hours: float
    hypervolume: float | None
    """in the product of the objectives' units; None: nothing has a value for every objective yet"""
    gain: float | None
    """of the last trial, relative; None: there was nothing before"""

    def text(self, budget: Budget) -> str:
        """Return it in a line, with what the budget allows."""
        trials = f"{self.trials}{f' of {budget.trials}' if budget.trials else ''} trials"
        hours = f"{self.gpu_hours:.3g}{f' of {budget.gpu_hours:g}' if budget.gpu_hours else ''} GPU-hours"
        if self.hypervolume is None:
            return f"{trials}, {hours}; no frontier yet"
        gained = f" ({self.gain:+.1%})" if self.gain is not None else ""
        return f"{trials}, {hours}; hypervolume {self.hypervolume:.4g}{gained}"


def standing(outcomes: Sequence[TrialOutcome], objectives: Sequence[Objective], price: float) -> Standing:
    """Return where a sweep stands; both hypervolumes against the reference point of all trials so far."""
    counted = [o for o in outcomes if o.repeats is None and not o.cut_short]
    hours = sum(o.gpu_hours for o in outcomes)
    now = frontier(_figures(counted, price), objectives)
    if now.hypervolume is None:
        return Standing(len(counted), hours, None, None)
    before = frontier(_figures(counted[:-1], price), objectives, now.reference_point).hypervolume
    gain = now.hypervolume / before - 1 if before else None
    return Standing(len(counted), hours, now.hypervolume, gain)


def _figures(outcomes: Sequence[TrialOutcome], price: float) -> dict[str, dict[str, float]]:
    return {o.trial_id: o.metrics for o in effective(outcomes, price) if o.competes}
