"""What measured trials teach of predicted step times: a factor on each part of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls  # type: ignore[import-untyped]

from sweeps.candidates import Context, setting_of
from sweeps.outcome import TrialOutcome
from trainers import steptime
from trainers.ledger import MicroBatch
from trainers.result import TrialResult
from trainers.steptime import Machine, StepTime

PARTS = ("compute", "communication", "transfer", "optimizer")  # the bubble is computing that waits
# How much the factors are held to the one that they have in common: few trials must not tell parts apart that are small
# in all of them. In the same unit as a trial's squared relative error.
HELD = 0.05
LEAST = 0.1  # of the common factor


@dataclass(frozen=True)
class Correction:
    """Factors by part, and how far predictions were off before and after: medians of relative errors."""

    factors: dict[str, float]
    trials: int
    before: float
    after: float

    def apply(self, predicted: StepTime) -> StepTime:
        """Return a step time as the measured trials make it likely."""
        scaled = {part: getattr(predicted, part) * self.factors[part] for part in PARTS}
        return replace(predicted, bubble=predicted.bubble * self.factors["compute"], **scaled)

    def __str__(self) -> str:
        factors = ", ".join(f"{part} × {factor:.2f}" for part, factor in self.factors.items())
        return f"{factors}; median error {self.before:.0%} before, {self.after:.0%} after"


def learned(pairs: Sequence[tuple[StepTime, float]]) -> Correction:
    """Return the factors that bring predicted step times nearest to measured seconds, by relative least squares.

    Factors are not negative, and are held to the median ratio of measured and predicted times, all the more the fewer
    trials there are. Raises ValueError without any.
    """
    if not pairs:
        raise ValueError("no measured step times to learn from")
    common = statistics.median(seconds / predicted.total for predicted, seconds in pairs)
    rows = [[_part(predicted, part) / seconds for part in PARTS] for predicted, seconds in pairs]
    pull = HELD**0.5
    matrix = np.vstack([np.array(rows), pull * np.eye(len(PARTS)) / common])
    wanted = np.concatenate([np.ones(len(rows)), pull * np.ones(len(PARTS))])
    found, _ = nnls(matrix, wanted)
    # None is for nothing: where a part was not seen to take time, others took its share.
    factors = {part: max(float(factor), LEAST * common) for part, factor in zip(PARTS, found, strict=True)}
    correction = Correction(factors, len(pairs), _error(pairs), 0.0)
    return replace(correction, after=_error([(correction.apply(p), seconds) for p, seconds in pairs]))


def measured(outcomes: Iterable[TrialOutcome], context: Context, machine: Machine) -> list[tuple[StepTime, float]]:
    """Return the predicted and the measured step time of every trial that was timed on devices like the machine's."""
    found = []
    for outcome in outcomes:
        setting = setting_of(outcome.config, context)
        if outcome.status != "COMPLETED" or outcome.result is None or setting is None or context.shape is None:
            continue
        result = TrialResult.from_json(outcome.result)
        if result.speed is None or "step_time_s" not in outcome.metrics or not _alike(result, machine):
            continue
        rows = len(result.speed.window_seconds) * setting.learning.global_batch_size
        slots, targets = result.speed.slots / rows, result.speed.targets / rows
        batch = MicroBatch(setting.system.micro_batch_size, round(slots), round(targets))
        found.append((steptime.predict(context.shape, setting, batch, machine), outcome.metrics["step_time_s"]))
    return found


def _alike(result: TrialResult, machine: Machine) -> bool:
    """Tell whether a trial ran on devices with the machine's peak: a sweep runs on those that are there."""
    if result.speed is None or result.speed.peak_flops is None:
        return False
    of_one = result.speed.peak_flops / result.num_workers
    return any(math.isclose(of_one, peak, rel_tol=0.01) for peak in machine.peak_flops.values())


def _part(predicted: StepTime, part: str) -> float:
    return predicted.compute + predicted.bubble if part == "compute" else float(getattr(predicted, part))


def _error(pairs: Sequence[tuple[StepTime, float]]) -> float:
    return statistics.median(abs(predicted.total / seconds - 1) for predicted, seconds in pairs)
