"""The frontier: which trials no other trial beats on every objective, over moocore."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import moocore
import numpy as np

from sweeps.objectives import Objective


@dataclass(frozen=True)
class Point:
    """One place on the frontier: values in the order of the objectives, and every trial that has exactly them."""

    values: tuple[float, ...]
    trial_ids: tuple[str, ...]
    tied: tuple[str, ...] = ()
    """trials that it dominates by no more than what measuring scatters, simplest first"""


@dataclass(frozen=True)
class Frontier:
    """The non-dominated points, best first on the first objective."""

    objectives: tuple[Objective, ...]
    points: tuple[Point, ...]
    reference_point: tuple[float, ...] | None
    hypervolume: float | None

    def ranks(self) -> dict[str, int]:
        """Return the place of each trial on the frontier, from 0."""
        return {trial: i for i, point in enumerate(self.points) for trial in point.trial_ids}

    def best(self) -> dict[str, list[str]]:
        """Return what the trials of each point are best at: trial id to the objectives' words."""
        found: dict[str, list[str]] = {}
        for i, objective in enumerate(self.objectives):
            top = min((p for p in self.points), key=lambda p: objective.sign * p.values[i], default=None)
            for point in self.points:
                if top is not None and point.values[i] == top.values[i]:
                    for trial in point.trial_ids:
                        found.setdefault(trial, []).append(objective.best_word)
        return found

    def to_json(self, configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the frontier as `frontier.json` holds it; `configs`: trial id to its candidate's values."""
        return {
            "schema": 1,
            "objectives": [{"name": o.name, "direction": o.direction} for o in self.objectives],
            "reference_point": self.reference_point,
            "points": [
                {
                    "values": list(p.values),
                    "trial_ids": list(p.trial_ids),
                    "tied": list(p.tied),
                    "config": dict(configs[p.trial_ids[0]]),
                }
                for p in self.points
            ],
        }


def frontier(
    trials: Mapping[str, Mapping[str, float]],
    objectives: Sequence[Objective],
    reference_point: Sequence[float] | None = None,
) -> Frontier:
    """Return the frontier of trials (id to metrics).

    A trial without a finite value for every objective never enters. Equal points are one point with several ids.
    `reference_point` (default: the worst value of each objective among the trials, made 10 % worse) bounds the
    hypervolume, which is in the product of the objectives' units.
    """
    groups: dict[tuple[float, ...], list[str]] = {}
    for trial, metrics in trials.items():
        values = tuple(metrics.get(o.name, math.nan) for o in objectives)
        if all(math.isfinite(v) for v in values):
            groups.setdefault(values, []).append(trial)
    if not groups:
        return Frontier(tuple(objectives), (), None, None)
    distinct = list(groups)
    signs = np.array([o.sign for o in objectives])
    minimised = np.array(distinct, dtype=float) * signs
    kept = moocore.is_nondominated(minimised)
    points = [Point(v, tuple(groups[v])) for v, keep in zip(distinct, kept, strict=True) if keep]
    points.sort(key=lambda p: tuple(o.sign * v for o, v in zip(objectives, p.values, strict=True)))
    reference = np.array(reference_point, dtype=float) * signs if reference_point else default_reference(minimised)
    volume = hypervolume(minimised[kept], reference)
    return Frontier(tuple(objectives), tuple(points), tuple(float(x) for x in reference * signs), volume)


def with_ties(front: Frontier, trials: Mapping[str, Mapping[str, float]]) -> Frontier:
    """Return the frontier with the trials (id to metrics, simplest first) that are within the noise of its points.

    What follows from a step's time scatters by both trials' `step_time_precision`; memory is counted, and does not.
    """
    on_it = {trial for point in front.points for trial in point.trial_ids}
    others = {trial: metrics for trial, metrics in trials.items() if trial not in on_it}

    def tied(point: Point) -> tuple[str, ...]:
        noise = trials[point.trial_ids[0]].get("step_time_precision", 0.0)
        return tuple(t for t, m in others.items() if _within(point, m, front.objectives, noise))

    return replace(front, points=tuple(replace(p, tied=tied(p)) for p in front.points))


def _within(point: Point, metrics: Mapping[str, float], objectives: Sequence[Objective], noise: float) -> bool:
    allowed = math.hypot(noise, metrics.get("step_time_precision", 0.0))
    for objective, best in zip(objectives, point.values, strict=True):
        value = metrics.get(objective.name, math.nan)
        slack = allowed * abs(best) if objective.timed else 0.0
        if not objective.sign * value <= objective.sign * best + slack:
            return False
    return True


def hypervolume(minimised: np.ndarray, reference: np.ndarray) -> float:
    """Return the volume that points [points, objectives] dominate below a reference point; all are minimised."""
    return float(moocore.hypervolume(minimised, ref=reference)) if len(minimised) else 0.0


def default_reference(minimised: np.ndarray) -> np.ndarray:
    """Return a point a tenth of each column's size worse than its worst value."""
    worst = minimised.max(axis=0)
    reference: np.ndarray = worst + 0.1 * np.maximum(np.abs(worst), 1e-12)
    return reference
