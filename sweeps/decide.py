"""Which configuration to run in production: by a priority, under constraints, from what a sweep has measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from sweeps.compose import COST, OFF, effective, of_target
from sweeps.objectives import OBJECTIVES
from sweeps.outcome import TrialOutcome
from sweeps.spec import Frozen
from trainers.errors import UserError, did_you_mean

TIME, MEMORY, RATE = "time_to_target_s", "peak_memory_gib", "target_tokens_per_second"
TOKEN_COST = "usd_per_million_target_tokens"
WORKERS = "num_workers"
COMPOSED = 0.05  # relative: how far a composed cost may be off, two standard deviations, where no whole run tells
Z95 = 1.96


class Wish(Frozen):
    """What a person wants of a production run."""

    priority: Literal["cheapest", "fastest", "smallest", "safest"] = "cheapest"
    """cheapest: the least cost to the target, storage included; fastest: the least time to it; smallest: the fewest
    GPUs, then the least memory; safest: the most memory left on a device, over all phases"""
    weights: dict[str, float] | None = None
    """instead of a priority: figures and what each is worth, as weights={cost_per_quality_usd: 2, peak_memory_gib: 1};
    what counts is by how many times a figure is worse than the best one"""
    max_memory_gib: float | None = Field(default=None, gt=0)
    """of a device, at the peak"""
    max_gpus: int | None = Field(default=None, ge=1)
    """workers; on a CPU, processes"""
    deadline_hours: float | None = Field(default=None, gt=0)
    """to the target"""
    max_cost_usd: float | None = Field(default=None, gt=0)
    """to the target"""
    price_per_gpu_hour: float | None = Field(default=None, ge=0)
    """another price than the sweep's; costs follow without a new run"""


@dataclass(frozen=True)
class Limit:
    """A constraint on one figure."""

    key: str
    figure: str
    at_most: float
    scale: float = 1.0
    """the figure's unit in the key's"""

    def value(self, of: TrialOutcome) -> float:
        """Return the figure in the key's unit; infinite where the trial has none."""
        return figure_of(of, self.figure) * self.scale

    def holds(self, of: TrialOutcome) -> bool:
        return self.value(of) <= self.at_most


@dataclass(frozen=True)
class Relaxation:
    """A trial that would do if constraints were relaxed: what each must be at least."""

    trial: TrialOutcome
    needed: Mapping[str, float]


@dataclass(frozen=True)
class Decision:
    """The choice and what it rests on; without a choice, what would have to give."""

    wish: Wish
    order: tuple[str, ...]
    """the figures that are compared, most important first; with weights those that are weighed"""
    choice: TrialOutcome | None
    next_best: TrialOutcome | None
    considered: tuple[TrialOutcome, ...]
    """trials that meet the constraints, best first"""
    tied: tuple[TrialOutcome, ...]
    """those that are as good as the best, within what measuring scatters; the choice is the simplest of them"""
    confidence: float | None
    """probability that the choice is not worse than the next best in what is compared; None: there is no other"""
    relax: tuple[Relaxation, ...] = ()


def figure_of(outcome: TrialOutcome, name: str) -> float:
    """Return a figure, infinite where there is none: nothing is better than that."""
    if name == WORKERS:
        return float(outcome.num_workers)
    if name == TOKEN_COST:
        rate, price = outcome.metrics.get(RATE), outcome.metrics.get("price_per_gpu_hour")
        return price * outcome.num_workers / 3600 / rate * 1e6 if rate and price is not None else math.inf
    return outcome.metrics.get(name, math.inf)


def priced(outcomes: Sequence[TrialOutcome], price: float) -> list[TrialOutcome]:
    """Return the trials of a sweep at a price in USD per GPU-hour, of each the last attempt, costs composed."""

    def at_price(outcome: TrialOutcome) -> TrialOutcome:
        known = outcome.metrics
        told = {**known, "price_per_gpu_hour": price}
        if TIME in known and "tokens_to_target" in known:
            storage = known.get("storage_usd", 0.0)
            told |= of_target(known["tokens_to_target"], known[TIME], outcome.num_workers, price, storage)
        return outcome.model_copy(update={"metrics": told})

    last = {o.trial_id: at_price(o) for o in outcomes}
    return effective(list(last.values()), price)


def decide(trials: Sequence[TrialOutcome], wish: Wish) -> Decision:
    """Choose among trials (see `priced`). Raises UserError where no trial can be run in production, or weights err."""
    able = [t for t in trials if t.competes and MEMORY in t.metrics and t.metrics.get(RATE)]
    if not able:
        raise UserError("no trial of this sweep completed: there is nothing to choose from")
    to_target = [t for t in able if COST in t.metrics]
    limits = _limits(wish)
    if not to_target and (unknown := [limit.key for limit in limits if limit.figure in (COST, TIME)]):
        raise UserError(
            f"{', '.join(unknown)}: no trial of this sweep reached a target, so none has a cost or time to it"
        )
    contenders = to_target or able
    worth, order = _worth(wish, contenders, bool(to_target))
    feasible = [t for t in contenders if all(limit.holds(t) for limit in limits)]
    if not feasible:
        return Decision(wish, order, None, None, (), (), None, _relaxations(contenders, limits, worth))
    ranked = sorted(feasible, key=lambda t: (*worth(t), simplicity(t)))
    spread, compared = _composed_spread(trials), order if wish.weights is not None else order[:1]
    tied = [t for t in ranked if _as_good(t, ranked[0], worth, _scatter(ranked[0], t, compared, spread))]
    choice = min(tied, key=lambda t: simplicity(t)[:2])  # of those as simple the best
    rest = [t for t in ranked if t is not choice]
    following = rest[0] if rest else None
    confidence = (
        _confidence(choice, following, worth, _scatter(choice, following, compared, spread)) if following else None
    )
    return Decision(wish, order, choice, following, (choice, *rest), tuple(tied), confidence)


def simplicity(outcome: TrialOutcome) -> tuple[int, int, str]:
    """Sort key of configurations with equal figures: fewer dimensions of parallelism first, then fewer workers."""
    dimensions = sum(int(outcome.config.get(degree) or 1) > 1 for degree in ("tp", "pp", "cp"))
    return dimensions, outcome.num_workers, outcome.trial_id


Worth = Callable[[TrialOutcome], tuple[float, ...]]
"""What is minimised, most important first"""


def _worth(wish: Wish, contenders: Sequence[TrialOutcome], to_target: bool) -> tuple[Worth, tuple[str, ...]]:
    """Return how trials are compared, and by which figures."""
    cost = COST if to_target else TOKEN_COST
    if wish.weights is not None:
        return _weighted(wish.weights, contenders), tuple(wish.weights)
    orders: dict[str, tuple[str, ...]] = {
        "cheapest": (cost, MEMORY),
        "fastest": (TIME if to_target else RATE, cost),
        "smallest": (WORKERS, MEMORY, cost),
        "safest": (MEMORY, cost),
    }
    order = orders[wish.priority]
    return (lambda t: tuple(_sign(name) * figure_of(t, name) for name in order)), order


def _sign(name: str) -> float:
    return OBJECTIVES[name].sign if name in OBJECTIVES else 1.0


def _weighted(weights: Mapping[str, float], contenders: Sequence[TrialOutcome]) -> Worth:
    """Return the sum of log(times worse than the best) × weight."""
    allowed = [*(n for n in OBJECTIVES if any(n in t.metrics for t in contenders)), WORKERS]
    faults = [f"weights: unknown figure {n!r}{did_you_mean(n, allowed)}; allowed: {', '.join(allowed)}"
              for n in weights if n not in allowed]  # fmt: skip
    faults += [f"weights: {name}={weight:g}: must be above 0" for name, weight in weights.items() if not weight > 0]
    if not weights:
        faults.append(f"weights= has no figure; allowed: {', '.join(allowed)}")
    if faults:
        raise UserError(faults)

    def log(trial: TrialOutcome, name: str) -> float:
        value = figure_of(trial, name)
        return _sign(name) * math.log(value) if 0 < value < math.inf else math.inf

    best = {name: min(log(t, name) for t in contenders) for name in weights}
    total = sum(weights.values())
    return lambda t: (sum(w / total * (log(t, n) - best[n]) for n, w in weights.items()),)


def _limits(wish: Wish) -> list[Limit]:
    given = (
        ("max_memory_gib", MEMORY, wish.max_memory_gib, 1.0),
        ("max_gpus", WORKERS, wish.max_gpus, 1.0),
        ("deadline_hours", TIME, wish.deadline_hours, 1 / 3600),
        ("max_cost_usd", COST, wish.max_cost_usd, 1.0),
    )
    return [Limit(key, figure, float(most), scale) for key, figure, most, scale in given if most is not None]


def _relaxations(trials: Sequence[TrialOutcome], limits: Sequence[Limit], worth: Worth) -> tuple[Relaxation, ...]:
    """Return the least that must give: for each constraint alone, where that is enough; else several together."""

    def needed(trial: TrialOutcome) -> dict[str, float]:
        return {limit.key: limit.value(trial) for limit in limits if not limit.holds(trial)}

    most = {limit.key: limit.at_most for limit in limits}
    options = [Relaxation(t, needed(t)) for t in trials if all(math.isfinite(v) for v in needed(t).values())]
    fewest = min((len(o.needed) for o in options), default=0)
    found: dict[tuple[str, ...], Relaxation] = {}
    options = [o for o in options if len(o.needed) == fewest]
    for o in sorted(options, key=lambda o: (sum(math.log(v / most[k]) for k, v in o.needed.items()), worth(o.trial))):
        found.setdefault(tuple(o.needed), o)
    return tuple(found.values())


# -- how sure -----------------------------------------------------------------------------------------------------


def _composed_spread(trials: Sequence[TrialOutcome]) -> float:
    """Return a standard deviation of composed costs, relatively: by how much confirmations were off."""
    seen = [abs(t.metrics[OFF]) for t in trials if OFF in t.metrics]
    return (max(seen) if seen else COMPOSED) / Z95


def _scatter(one: TrialOutcome, other: TrialOutcome, compared: Sequence[str], composed: float) -> float:
    """Return a standard deviation of the logarithm of a figure's ratio between two trials; memory does not scatter."""
    if set(compared) <= {MEMORY, WORKERS}:
        return 0.0
    parts = [t.metrics.get("step_time_precision", 0.0) / Z95 for t in (one, other)]
    parts += [composed for t in (one, other) if t.composed_with is not None and {COST, TIME} & set(compared)]
    return math.hypot(*parts)


def _as_good(trial: TrialOutcome, best: TrialOutcome, worth: Worth, scatter: float) -> bool:
    """Tell whether a trial is as good as the best; where nothing scatters, in all that is compared."""
    return _margin(best, trial, worth) <= Z95 * scatter if scatter else worth(trial) == worth(best)


def _margin(better: TrialOutcome, other: TrialOutcome, worth: Worth) -> float:
    """Return by how much, relatively, another trial is worse in what is compared first."""
    a, b = worth(better)[0], worth(other)[0]
    if a == b:
        return 0.0
    return math.log(b / a) if a > 0 and b > 0 else math.log(a / b) if a < 0 and b < 0 else b - a


def _confidence(choice: TrialOutcome, other: TrialOutcome, worth: Worth, scatter: float) -> float:
    margin = _margin(choice, other, worth)
    if scatter == 0:
        return 1.0 if margin >= 0 else 0.0
    return 0.5 * (1 + math.erf(margin / scatter / math.sqrt(2)))
