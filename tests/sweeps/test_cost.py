"""Tokens and dollars to the target, by hand."""

from __future__ import annotations

import math

import pytest

from sweeps.cost import Prices, quality_figures, tokens_to_target
from tests.sweeps.factories import evaluations, make_result, make_spec, make_update
from trainers.result import Evaluation, Save, TrialResult

GIB = 2**30


@pytest.mark.parametrize(
    ("points", "target", "expected"),
    [
        ([(0, 4.0), (1000, 3.0), (2000, 2.0)], 2.5, 1500.0),
        ([(0, 4.0), (1000, 1.0)], 3.25, 250.0),
        ([(0, 4.0), (1000, 3.0), (2000, 2.0)], 3.0, 1000.0),  # at an evaluation, not after it
        ([(0, 4.0), (1000, 2.0), (2000, 5.0), (3000, 1.0)], 3.0, 500.0),  # the first crossing counts
        ([(500, 1.5), (1000, 1.0)], 2.0, 500.0),  # at the first evaluation: nothing to interpolate from
        ([(0, 1.5)], 2.0, 0.0),
        ([(0, 4.0), (1000, 3.0)], 2.0, None),
        ([], 2.0, None),
        # Not finite: reaches no target, and no line is drawn from it.
        ([(0, math.nan), (1000, math.nan)], 2.0, None),
        ([(0, 4.0), (1000, math.nan), (2000, 2.0)], 3.0, 1000.0),
        ([(0, math.inf), (1000, 1.0)], 3.0, 1000.0),
        ([(0, math.nan), (1000, 4.0), (2000, 2.0)], 3.0, 1500.0),
        ([(0, 4.0), (1000, -math.inf)], 3.0, None),
    ],
)
def test_tokens_to_target(points: list[tuple[int, float]], target: float, expected: float | None) -> None:
    assert tokens_to_target(evaluations(*points), target) == expected


def learning_run() -> TrialResult:
    """Crosses 2.5 at 1,500 tokens; 200 tokens/s after the warm-up update; one save before the target, one after."""
    return make_result(
        evaluations((0, 4.0, 1.0), (1000, 3.0, 2.0), (2000, 2.0, 3.0), (3000, 1.0, 5.0)),
        [make_update(10.0), make_update(0.5), make_update(0.5)],
        [Save(1000, 4.0, 1 * GIB), Save(3000, 7.0, 2 * GIB)],
        num_workers=2,
    )


def test_every_term_of_the_cost() -> None:
    prices = Prices(gpu_hour=3.6, gib_month=0.1, months=3.0, gib_io=0.01)
    figures = quality_figures(learning_run(), 2.5, prices)
    # 1500 / 200 = 7.5 s of training, 1 + 2 + 3 s of evaluations and 4 s of saves up to the target.
    assert figures["tokens_to_target"] == 1500.0
    assert figures["time_to_target_s"] == pytest.approx(7.5 + 6.0 + 4.0)
    # The last save, 2 GiB, is kept for 3 months; 1 + 2 GiB were moved.
    assert figures["storage_usd"] == pytest.approx(2 * 0.1 * 3 + 3 * 0.01)
    # 3.6 USD per GPU-hour is 0.001 per GPU-second; two are reserved.
    assert figures["cost_per_quality_usd"] == pytest.approx(2 * 0.001 * 17.5 + 0.63)


def test_storage_is_free_unless_it_has_a_price() -> None:
    figures = quality_figures(learning_run(), 2.5, Prices.of(make_spec(), gpu_hour=3.6))
    assert figures["storage_usd"] == 0.0
    assert figures["cost_per_quality_usd"] == pytest.approx(0.035)


def test_prices_come_from_the_spec() -> None:
    spec = make_spec({"price_per_gib_month": "0.1", "storage_months": "3", "price_per_gib_io": "0.01"})
    assert Prices.of(spec, 3.6) == Prices(3.6, 0.1, 3.0, 0.01)


def test_target_held_from_the_start_costs_one_evaluation() -> None:
    result = make_result(evaluations((0, 1.0, 2.0), (1000, 0.9, 2.0)), [make_update(0.5)], num_workers=3)
    assert quality_figures(result, 1.5, Prices(3600.0)) == {
        "tokens_to_target": 0.0,
        "evaluations_to_target": 1,
        "saves_to_target": 0,
        "time_to_target_s": 2.0,
        "storage_usd": 0.0,
        "cost_per_quality_usd": pytest.approx(3 * 2.0),
    }


@pytest.mark.parametrize("target", [0.5, None])
def test_a_run_that_does_not_cross_has_no_cost(target: float | None) -> None:
    assert quality_figures(learning_run(), target, Prices(3.6)) == {}


@pytest.mark.parametrize("last", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_buys_nothing(last: float) -> None:
    result = make_result([Evaluation(0, 0, 4.0, 1.0), Evaluation(1, 100, last, 1.0)], [make_update(0.5)])
    assert quality_figures(result, 2.5, Prices(3.6)) == {}


def test_a_crossing_after_a_nan_has_a_finite_cost() -> None:
    result = make_result(
        evaluations((0, 4.0, 1.0), (1000, math.nan, 2.0), (2000, 2.0, 3.0)), [make_update(0.5)], num_workers=1
    )
    figures = quality_figures(result, 3.0, Prices(3600.0))
    # On the line from 4.0 at 0 to 2.0 at 2000: 1000 tokens at 200/s, and all three evaluations were paid for.
    assert figures["tokens_to_target"] == 1000.0
    assert figures["cost_per_quality_usd"] == pytest.approx(5.0 + 6.0)
