"""Dominance against the definition, volumes against counted cells."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence

import pytest

from sweeps.objectives import OBJECTIVES, Objective
from sweeps.pareto import Frontier, frontier, with_ties

MEMORY, COST = OBJECTIVES["peak_memory_gib"], OBJECTIVES["cost_per_quality_usd"]
SPEED, DEVICE_SPEED = OBJECTIVES["target_tokens_per_second"], OBJECTIVES["tokens_per_second_per_device"]
SIZE = 5  # random values are 0 … 4


def trials(objectives: Sequence[Objective], *rows: Sequence[float]) -> dict[str, dict[str, float]]:
    """Return metrics by trial id; a row is the values in the order of the objectives."""
    return {f"{n:03d}": {o.name: v for o, v in zip(objectives, row, strict=True)} for n, row in enumerate(rows)}


def test_the_directions_are_as_people_mean_them() -> None:
    assert {name: OBJECTIVES[name].direction for name in OBJECTIVES} == {
        "peak_memory_gib": "minimize",
        "host_peak_memory_gib": "minimize",
        "cost_per_quality_usd": "minimize",
        "time_to_target_s": "minimize",
        "eval_loss": "minimize",
        "step_time_s": "minimize",
        "target_tokens_per_second": "maximize",
        "tokens_per_second": "maximize",
        "tokens_per_second_per_device": "maximize",
    }


def test_worked_case() -> None:
    rows = [(10, 100), (10, 100), (10, 90), (11, 100), (math.inf, 1e9), (math.nan, 5)]
    front = frontier(trials([MEMORY, SPEED], *rows), [MEMORY, SPEED])
    assert [(p.values, p.trial_ids) for p in front.points] == [((10, 100), ("000", "001"))]
    assert front.ranks() == {"000": 0, "001": 0}


def test_order_ranks_and_what_each_is_best_at() -> None:
    front = frontier(
        trials([MEMORY, SPEED, COST], (30, 500, 9), (10, 100, 9), (20, 500, 3), (10, 50, 1)), [MEMORY, SPEED, COST]
    )
    # By hand: 000 loses to 002 on memory and cost at equal speed; the others each win somewhere.
    assert front.ranks() == {"001": 0, "003": 1, "002": 2}
    assert front.best() == {"001": ["least memory"], "003": ["least memory", "cheapest"], "002": ["fastest"]}


def dominates(a: Sequence[float], b: Sequence[float], objectives: Sequence[Objective]) -> bool:
    """The definition: nowhere worse and somewhere better."""
    better = [x < y if o.direction == "minimize" else x > y for x, y, o in zip(a, b, objectives, strict=True)]
    worse = [x > y if o.direction == "minimize" else x < y for x, y, o in zip(a, b, objectives, strict=True)]
    return any(better) and not any(worse)


def naive(
    metrics: Mapping[str, Mapping[str, float]], objectives: Sequence[Objective]
) -> dict[tuple[float, ...], set[str]]:
    """Compare every trial with every other."""
    values = {
        t: tuple(m[o.name] for o in objectives) for t, m in metrics.items() if all(o.name in m for o in objectives)
    }
    values = {t: v for t, v in values.items() if all(math.isfinite(x) for x in v)}
    found: dict[tuple[float, ...], set[str]] = {}
    for trial, mine in values.items():
        if not any(dominates(other, mine, objectives) for other in values.values()):
            found.setdefault(mine, set()).add(trial)
    return found


def cells(points: Sequence[Sequence[float]], objectives: Sequence[Objective]) -> int:
    """Count the unit cells of the SIZE^n box that some point is at least as good as."""
    costs = [
        [v if o.direction == "minimize" else SIZE - 1 - v for v, o in zip(p, objectives, strict=True)] for p in points
    ]
    grid = itertools.product(range(SIZE), repeat=len(objectives))
    return sum(any(all(c <= x for c, x in zip(cost, cell, strict=True)) for cost in costs) for cell in grid)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_against_the_definition(count: int) -> None:
    objectives = [MEMORY, SPEED, COST, DEVICE_SPEED][:count]
    box = [float(SIZE) if o.direction == "minimize" else -1.0 for o in objectives]
    draw = random.Random(count)
    for _ in range(75):
        metrics: dict[str, dict[str, float]] = {}
        for n in range(draw.randint(0, 14)):
            row = {o.name: float(draw.randrange(SIZE)) for o in objectives}
            if draw.random() < 0.15:
                row[draw.choice(objectives).name] = draw.choice([math.nan, math.inf, -math.inf])
            if draw.random() < 0.1:
                del row[draw.choice(objectives).name]
            metrics[f"{n:03d}"] = row
        front, expected = frontier(metrics, objectives, box), naive(metrics, objectives)
        assert {p.values: set(p.trial_ids) for p in front.points} == expected
        assert len(front.points) == len(expected)
        if expected:
            assert front.hypervolume == pytest.approx(cells(list(expected), objectives))


def test_hypervolume_by_hand() -> None:
    # Memory under 10 and speed over 0: 100 × 8, then 50 more × 6, then 50 more × 3.
    rows = [(2, 100), (4, 150), (7, 200), (8, 120)]
    front = frontier(trials([MEMORY, SPEED], *rows), [MEMORY, SPEED], reference_point=(10, 0))
    assert front.reference_point == (10, 0)
    assert front.hypervolume == pytest.approx(800 + 300 + 150)


def test_a_point_beyond_the_reference_adds_nothing() -> None:
    front = frontier(trials([MEMORY, SPEED], (2, 100), (12, 900)), [MEMORY, SPEED], reference_point=(10, 0))
    assert len(front.points) == 2
    assert front.hypervolume == pytest.approx(800)


def test_default_reference_is_a_tenth_worse_than_the_worst() -> None:
    front = frontier(trials([MEMORY, SPEED], (10, 100), (20, 200), (20, 50)), [MEMORY, SPEED])
    assert front.reference_point == pytest.approx((22, 45))
    # (22 - 10) × (100 - 45), and 100 more of speed × (22 - 20).
    assert front.hypervolume == pytest.approx(12 * 55 + 2 * 100)


def test_a_missing_metric_never_enters() -> None:
    front = frontier({"000": {"peak_memory_gib": 1.0}, "001": {}}, [MEMORY, SPEED])
    assert front == Frontier((MEMORY, SPEED), (), None, None)


def test_no_trials() -> None:
    front = frontier({}, [MEMORY, SPEED])
    assert (front.points, front.ranks(), front.best()) == ((), {}, {})
    assert json.loads(json.dumps(front.to_json({}), allow_nan=False))["points"] == []


def test_json_form() -> None:
    front = frontier(trials([MEMORY, SPEED], (10, 100), (10, 100), (20, 50)), [MEMORY, SPEED], reference_point=(30, 0))
    written = json.loads(json.dumps(front.to_json({"000": {"micro_batch_size": 2}, "001": {}}), allow_nan=False))
    assert written == {
        "schema": 1,
        "objectives": [
            {"name": "peak_memory_gib", "direction": "minimize"},
            {"name": "target_tokens_per_second", "direction": "maximize"},
        ],
        "reference_point": [30, 0],
        "points": [{"values": [10, 100], "trial_ids": ["000", "001"], "tied": [], "config": {"micro_batch_size": 2}}],
    }


def test_what_is_dominated_within_the_noise_is_tied() -> None:
    """A step known to 3 % and one to 4 %: 5 % together. Memory does not scatter."""
    objectives = [OBJECTIVES["peak_memory_gib"], OBJECTIVES["target_tokens_per_second"]]
    figures = {
        "000": {"peak_memory_gib": 10.0, "target_tokens_per_second": 100.0, "step_time_precision": 0.03},
        "001": {"peak_memory_gib": 10.0, "target_tokens_per_second": 95.1, "step_time_precision": 0.04},
        "002": {"peak_memory_gib": 10.0, "target_tokens_per_second": 94.9, "step_time_precision": 0.04},
        "003": {"peak_memory_gib": 10.1, "target_tokens_per_second": 100.0, "step_time_precision": 0.04},
        "004": {"peak_memory_gib": 10.0},
    }
    found = with_ties(frontier(figures, objectives), figures)
    assert [(p.trial_ids, p.tied) for p in found.points] == [(("000",), ("001",))]
    assert found.to_json({"000": {}})["points"][0]["tied"] == ["001"]
    assert [o.name for o in (OBJECTIVES[name] for name in OBJECTIVES) if not o.timed] == [
        "eval_loss", "host_peak_memory_gib", "peak_memory_gib",
    ]  # fmt: skip
