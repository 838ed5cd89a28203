"""Cost per quality, composed: how fast a configuration trains, by one trial; how much it must train, by another.

What is learned does not depend on how the work is divided (every trial proves it), so that S ways to divide it and Q
ways to learn need S + Q trials, and not S × Q.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from sweeps.candidates import DERIVED, FREE
from sweeps.outcome import TrialOutcome
from sweeps.spec import axes
from trainers.config import LearningConfig

COST = "cost_per_quality_usd"
OFF = "cost_over_composed"
"""Figure of a confirmation: by how much its cost differs from what was composed for it, relatively."""


@cache
def learning_names() -> frozenset[str]:
    """Return the names of what changes what is learned."""
    return frozenset(axis.name for axis in axes(LearningConfig))


def learning_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the learning part of a configuration, flat."""
    return {name: value for name, value in config.items() if name in learning_names()}


def system_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rest, without what follows from it."""
    return {name: value for name, value in config.items() if name not in learning_names() | DERIVED}


def load_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of the learning configuration costs time and memory."""
    return {name: value for name, value in learning_of(config).items() if name not in FREE}


def key_of(part: Mapping[str, Any]) -> str:
    """Return a text that is the same for equal parts of configurations."""
    return json.dumps(part, sort_keys=True)


def arm_key(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return what is the same for configurations that take the same time and memory: their load, and their system."""
    return key_of(load_of(config)), key_of(system_of(config))


def best_learning(outcomes: Iterable[TrialOutcome]) -> dict[str, TrialOutcome]:
    """Return by load the trial that reached the target with the fewest tokens."""
    found: dict[str, TrialOutcome] = {}
    for outcome in outcomes:
        tokens = outcome.metrics.get("tokens_to_target")
        if outcome.kind == "probe" or not outcome.competes or tokens is None:
            continue
        load = key_of(load_of(outcome.config))
        if load not in found or tokens < found[load].metrics["tokens_to_target"]:
            found[load] = outcome
    return found


def effective(outcomes: Sequence[TrialOutcome], price: float) -> list[TrialOutcome]:
    """Return all trials, in order; probes with the cost that follows from the best learning known for their load.

    Where a trial has run that very configuration whole, its own figures stand, and the probe has no cost.
    """
    best = best_learning(outcomes)
    whole = {_identity(o.config) for o in outcomes if o.competes and o.kind != "probe"}

    def of(outcome: TrialOutcome) -> TrialOutcome:
        if outcome.kind == "confirmation" and (off := difference(outcome, outcomes, price)) is not None:
            return outcome.model_copy(update={"metrics": {**outcome.metrics, OFF: off}})
        quality = best.get(key_of(load_of(outcome.config))) if outcome.competes and outcome.kind == "probe" else None
        config = {**outcome.config, **learning_of(quality.config)} if quality is not None else {}
        if quality is None or _identity(config) in whole:
            return outcome
        cost = composed(outcome.metrics, quality.metrics, outcome.num_workers, price)
        more = {"config": config, "metrics": {**outcome.metrics, **cost}, "composed_with": quality.trial_id}
        return outcome.model_copy(update=more)

    return [of(outcome) for outcome in outcomes]


def composed(system: Mapping[str, float], quality: Mapping[str, float], workers: int, price: float) -> dict[str, float]:
    """Return what the target costs with the speed of one trial and the learning of another.

    cost = price × workers × T / 3600 + storage, T = tokens to the target / tokens per second + as many evaluations and
    saves as the other had, at the speed of these here. Nothing where a figure is missing.
    """
    rate, tokens = system.get("tokens_per_second"), quality.get("tokens_to_target")
    if not rate or tokens is None:
        return {}
    evaluating = quality.get("evaluations_to_target", 0) * system.get("eval_time_s", 0.0)
    saving = quality.get("saves_to_target", 0) * system.get("save_time_s", 0.0)
    seconds = tokens / rate + evaluating + saving
    storage = quality.get("storage_usd", 0.0)
    learned = {name: quality[name] for name in ("eval_loss",) if name in quality}
    return learned | of_target(tokens, seconds, workers, price, storage)


def of_target(tokens: float, seconds: float, workers: int, price: float, storage: float) -> dict[str, float]:
    """Return the figures of a target that was reached: `price` in USD per GPU-hour, `storage` in USD."""
    return {
        "tokens_to_target": tokens,
        "time_to_target_s": seconds,
        "storage_usd": storage,
        COST: price * workers * seconds / 3600 + storage,
    }


def difference(outcome: TrialOutcome, outcomes: Sequence[TrialOutcome], price: float) -> float | None:
    """Return by how much a whole run's cost differs from what was composed for it, relatively; None without either.

    The speed is that of a probe of the same system, the learning that of another whole run of the same learning.
    """
    direct = outcome.metrics.get(COST)
    probes = [o for o in outcomes if o.kind == "probe" and o.competes and _alike(o, outcome, system_of, load_of)]
    learned = [o for o in outcomes if o.kind != "probe" and o.trial_id != outcome.trial_id and o.competes]
    learned = [o for o in learned if _alike(o, outcome, learning_of) and "tokens_to_target" in o.metrics]
    if direct is None or not probes or not learned:
        return None
    told = composed(probes[0].metrics, learned[0].metrics, outcome.num_workers, price).get(COST)
    return direct / told - 1 if told and math.isfinite(told) else None


def _alike(one: TrialOutcome, other: TrialOutcome, *parts: Any) -> bool:
    return all(key_of(part(one.config)) == key_of(part(other.config)) for part in parts)


def _identity(config: Mapping[str, Any]) -> str:
    return key_of({name: value for name, value in config.items() if name not in DERIVED})
