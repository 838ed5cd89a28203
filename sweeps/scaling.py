"""How throughput grows with the number of workers, where a sweep holds one configuration at several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sweeps.outcome import TrialOutcome

RATE = "target_tokens_per_second"
DERIVED = ("num_workers", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Point:
    """One number of workers, against the smallest of its configuration."""

    trial_id: str
    num_workers: int
    rate: float
    """target tokens per second"""
    speedup: float
    """rate_n / rate_1"""
    efficiency: float
    """speedup / (n / n_1)"""
    gpu_time_ratio: float
    """GPU-seconds of the same work, against the smallest: 1 / efficiency"""


@dataclass(frozen=True)
class Scaling:
    """A configuration at several numbers of workers, ascending."""

    config: dict[str, object]
    points: tuple[Point, ...]


def scaling(outcomes: Sequence[TrialOutcome]) -> list[Scaling]:
    """Return every configuration that has completed with more than one number of workers."""
    groups: dict[str, list[TrialOutcome]] = {}
    for outcome in outcomes:
        if outcome.competes and outcome.metrics.get(RATE):
            same = {k: v for k, v in outcome.config.items() if k not in DERIVED}
            groups.setdefault(json.dumps(same, sort_keys=True), []).append(outcome)
    found = []
    for key, group in groups.items():
        sizes = {o.num_workers: o for o in reversed(group)}  # of equal ones the first
        if len(sizes) > 1:
            found.append(Scaling(json.loads(key), _points([sizes[n] for n in sorted(sizes)])))
    return found


def _points(outcomes: Sequence[TrialOutcome]) -> tuple[Point, ...]:
    first = outcomes[0]
    points = []
    for outcome in outcomes:
        rate, times = outcome.metrics[RATE], outcome.num_workers / first.num_workers
        speedup = rate / first.metrics[RATE]
        points.append(Point(outcome.trial_id, outcome.num_workers, rate, speedup, speedup / times, times / speedup))
    return tuple(points)


def draw(groups: Sequence[Scaling], labels: Sequence[str], path: Path) -> None:
    """Draw speed-up over the number of workers, beside the line on which nothing is lost."""
    from matplotlib.figure import Figure  # not pyplot: no window, no state

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    most = max(p.num_workers for g in groups for p in g.points)
    axes.plot([1, most], [1, most], color="0.7", linestyle="--", label="nothing lost")
    for group, label in zip(groups, labels, strict=True):
        least = group.points[0].num_workers
        axes.plot(
            [p.num_workers for p in group.points], [p.speedup * least for p in group.points], marker="o", label=label
        )
    axes.set_xlabel("workers")
    axes.set_ylabel("speed-up")
    axes.set_xticks(sorted({p.num_workers for g in groups for p in g.points}))
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
