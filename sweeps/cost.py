"""Cost per quality: GPU-hours to the target eval loss, times the price, plus storage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sweeps import compose
from sweeps.curve import tokens_at
from sweeps.spec import SweepSpec
from trainers.result import GIB, Evaluation, TrialResult
from trainers.timing import summarize


@dataclass(frozen=True)
class Prices:
    """What things cost, in USD."""

    gpu_hour: float
    gib_month: float = 0.0
    months: float = 1.0
    gib_io: float = 0.0

    @staticmethod
    def of(spec: SweepSpec, gpu_hour: float) -> Prices:
        return Prices(gpu_hour, spec.price_per_gib_month, spec.storage_months, spec.price_per_gib_io)


def tokens_to_target(evaluations: Sequence[Evaluation], target: float) -> float | None:
    """Return the non-pad training tokens at the first crossing of `target`, interpolated between two evaluations.

    An evaluation whose loss is not finite is no point to interpolate from, and reaches no target.
    """
    return tokens_at([(e.consumed_tokens, e.loss) for e in evaluations], target)


def quality_figures(result: TrialResult, target: float | None, prices: Prices) -> dict[str, float]:
    """Return what the target cost this job; empty where it was not reached.

    cost_per_quality_usd = gpu_hour × num_workers × T / 3600 + storage, with T in seconds = tokens_to_target /
    tokens_per_second + the evaluations and saves up to the target.
    """
    crossed = tokens_to_target(result.evaluations, target) if target is not None else None
    rate = summarize(result).get("tokens_per_second")
    if crossed is None or (crossed > 0 and not rate):
        return {}
    last = next(e for e in result.evaluations if target is not None and math.isfinite(e.loss) and e.loss <= target)
    training_s = crossed / rate if rate and crossed > 0 else 0.0
    evaluated = [e for e in result.evaluations if e.consumed_tokens <= last.consumed_tokens]
    evaluation_s = sum(e.seconds for e in evaluated)
    saves = [s for s in result.saves if s.consumed_tokens < last.consumed_tokens]
    seconds = training_s + evaluation_s + sum(s.seconds for s in saves)
    kept_gib = result.saves[-1].bytes / GIB if result.saves else 0.0
    moved_gib = sum(s.bytes for s in result.saves) / GIB
    storage = kept_gib * prices.gib_month * prices.months + moved_gib * prices.gib_io
    met = {"evaluations_to_target": len(evaluated), "saves_to_target": len(saves)}
    return met | compose.of_target(crossed, seconds, result.num_workers, prices.gpu_hour, storage)
