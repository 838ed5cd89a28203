"""What the guided searcher is made of, against other libraries and values worked by hand; and searches replayed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import moocore
import numpy as np
import pytest

from benchmarks import replay, tables
from benchmarks.search import factored_grid, search, whole_grid
from sweeps.candidates import Candidate
from sweeps.compose import best_learning, composed, difference, effective
from sweeps.guide.arms import arms_of, needs_as_much
from sweeps.guide.beliefs import Systems
from sweeps.guide.boxes import Region
from sweeps.guide.surrogate import Beliefs, Surrogate
from sweeps.objectives import OBJECTIVES
from sweeps.outcome import TrialOutcome
from sweeps.search import SEARCHERS, Knowledge, Prior, Request
from tests.sweeps.factories import make_candidates, make_outcome

# -- hypervolume ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objectives", [1, 2, 3, 4])
@pytest.mark.parametrize("points", [0, 1, 6, 15])
def test_what_a_point_adds_is_the_difference_of_two_hypervolumes(objectives: int, points: int) -> None:
    rng = np.random.default_rng(objectives)
    front, new = rng.random((points, objectives)), rng.random((30, objectives))
    reference = np.full(objectives, 0.9)  # so that some lie beyond it
    before = moocore.hypervolume(front, ref=reference) if points else 0.0
    after = [moocore.hypervolume(np.vstack([front, p]), ref=reference) for p in new]
    assert Region(front, reference).improvement(new) == pytest.approx(np.array(after) - before, abs=1e-12)


def test_what_is_not_finite_adds_nothing() -> None:
    region = Region(np.array([[1.0, 1.0]]), np.array([2.0, 2.0]))
    assert region.improvement(np.array([[np.nan, 0.5], [np.inf, 0.5], [0.5, 0.5]])).tolist() == [0, 0, 1.25]


# -- the surrogate --------------------------------------------------------------------------------------------------

BELIEFS = Beliefs(common=1.0, axis=0.5, rest=0.25, noise=0.0)


def test_one_measurement_teaches_by_what_is_in_common() -> None:
    """Variance 1 + 2 · 0.25 + 0.0625 = 1.5625. One axis in common: covariance 1 + 0.25 + 0; none: 1."""
    configs = [{"a": "x", "b": "u"}, {"a": "x", "b": "v"}, {"a": "y", "b": "w"}]
    mean, sd = Surrogate(configs, BELIEFS).posterior([0], [0.8], [0.0])
    assert mean == pytest.approx([0.8, 0.8 * 1.25 / 1.5625, 0.8 * 1.0 / 1.5625])
    assert sd**2 == pytest.approx([0, 1.5625 - 1.25**2 / 1.5625, 1.5625 - 1.0 / 1.5625], abs=1e-9)


def test_nothing_measured_is_the_prior_and_noise_holds_back() -> None:
    surrogate = Surrogate([{"a": 1}, {"a": 2}], BELIEFS)
    mean, sd = surrogate.posterior([], [], [])
    assert mean.tolist() == [0, 0]
    assert sd == pytest.approx(math.sqrt(1 + 0.25 + 0.0625))
    noisy, _ = surrogate.posterior([0], [1.0], [2.0])
    assert noisy[0] == pytest.approx(1.3125 / (1.3125 + 4.0))


def test_numbers_are_near_by_doublings_and_a_stage_is_a_name() -> None:
    """micro 1 and 4 are two doublings apart, at exp(-1) of what is in common; stages 1 and 2 have nothing."""
    near, _ = Surrogate([{"micro": 1}, {"micro": 4}], BELIEFS).posterior([0], [1.0], [0.0])
    assert near[1] == pytest.approx((1 + (0.25 + 0.0625) * math.exp(-1)) / 1.3125)
    stages, _ = Surrogate([{"zero_stage": 1}, {"zero_stage": 2}], BELIEFS).posterior([0], [1.0], [0.0])
    assert stages[1] == pytest.approx(1 / 1.3125)


# -- arms -----------------------------------------------------------------------------------------------------------


def test_learning_configurations_of_one_load_share_arms() -> None:
    """2 learning rates cost nothing, 2 ranks do: 2 loads × 3 micro batches are 6 arms of 2 candidates."""
    tree = {
        "learning": {
            "adapter": "lora", "lora_rank": ["4", "8"], "learning_rate": ["1e-4", "1e-3"], "global_batch_size": 4,
        },
        "system": {"micro_batch_size": ["1", "2", "4"]},
    }  # fmt: skip
    arms = arms_of(make_candidates(tree))
    assert len(arms) == 6
    assert {len(arm.by_learning) for arm in arms} == {2}
    assert len({arm.load for arm in arms}) == 2


@pytest.mark.parametrize(
    ("change", "surely"),
    [
        ({"micro_batch_size": 8}, True),
        ({"micro_batch_size": 2}, False),
        ({"activation_checkpointing": "none"}, True),
        ({"activation_checkpointing": "full"}, False),
        ({"micro_batch_size": 8, "activation_checkpointing": "none"}, True),
        ({"micro_batch_size": 8, "activation_checkpointing": "full"}, False),
        ({"zero_stage": 1}, True),
        ({"zero_stage": 3}, False),
        ({"num_workers": 1}, False),
        ({"num_workers": 1, "micro_batch_size": 8}, False),
        ({"strategy": "ddp"}, False),
    ],
)
def test_out_of_memory_is_carried_along_what_memory_rises_with(change: dict[str, Any], surely: bool) -> None:
    known = {
        "strategy": "zero", "zero_stage": 2, "num_workers": 2, "micro_batch_size": 4,
        "activation_checkpointing": "selective",
    }  # fmt: skip
    assert needs_as_much({**known, **change}, known) is surely


def test_one_worker_divides_nothing_so_that_stages_tell_nothing() -> None:
    known = {"zero_stage": 3, "num_workers": 1}
    assert not needs_as_much({"zero_stage": 1, "num_workers": 1}, known)


# -- composed costs -------------------------------------------------------------------------------------------------

LR = {
    "learning": {"learning_rate": ["1e-4", "1e-3"], "global_batch_size": 4},
    "system": {"micro_batch_size": ["1", "2"]},
}


def test_a_cost_is_composed_of_speed_here_and_learning_there() -> None:
    """1e6 tokens at 1,000 a second, 3 evaluations of 2 s and a save of 4 s: 1,010 s; 2 workers at 1.8 USD: 1.01 USD."""
    speed = {"tokens_per_second": 1000.0, "eval_time_s": 2.0, "save_time_s": 4.0}
    learning = {
        "tokens_to_target": 1e6, "evaluations_to_target": 3.0, "saves_to_target": 1.0, "storage_usd": 0.5,
        "time_to_target_s": 9.0,
    }  # fmt: skip
    found = composed(speed, learning, 2, 1.8)
    assert found["time_to_target_s"] == pytest.approx(1010)
    assert found["cost_per_quality_usd"] == pytest.approx(1.01 + 0.5)
    assert composed({}, learning, 2, 1.8) == {}


def of(candidate: Candidate, trial: str, kind: str, **metrics: float) -> TrialOutcome:
    figures = {"tokens_per_second": 100.0, "eval_time_s": 0.0, "peak_memory_gib": 1.0, "step_time_s": 1.0}
    return make_outcome(candidate, trial, metrics={**figures, **metrics}, kind=kind)


def test_probes_take_the_best_learning_of_their_load() -> None:
    """Micro 1 with lr 1e-4 is probed; 1e-3 needs a third of the tokens, so the probe competes as 1e-3."""
    slow_1, slow_2, fast_1, fast_2 = make_candidates(LR)
    assert [c.flat["learning_rate"] for c in (slow_1, fast_1)] == [1e-4, 1e-3]
    outcomes = [
        of(slow_1, "000", "probe", tokens_per_second=50.0),
        of(slow_2, "001", "quality", tokens_to_target=9000.0, cost_per_quality_usd=0.09),
        of(fast_2, "002", "quality", tokens_to_target=3000.0, cost_per_quality_usd=0.03),
    ]
    probe, *whole = effective(outcomes, price=3600.0)
    assert (probe.config["learning_rate"], probe.config["micro_batch_size"]) == (1e-3, 1)
    assert probe.metrics["cost_per_quality_usd"] == pytest.approx(3000 / 50)
    assert probe.composed_with == "002"
    assert [o.composed_with for o in whole] == [None, None]
    assert whole == outcomes[1:]
    assert [o.trial_id for o in best_learning(outcomes).values()] == ["002"]
    # Where that very configuration has run whole, its own figures stand.
    confirmed = of(fast_1, "003", "confirmation", tokens_to_target=3000.0, cost_per_quality_usd=66.0)
    assert effective([*outcomes, confirmed], 3600.0)[0] == outcomes[0]
    assert difference(confirmed, [*outcomes, confirmed], 3600.0) == pytest.approx(66 / 60 - 1)


# -- what is believed -----------------------------------------------------------------------------------------------


def believed(outcomes: list[TrialOutcome], capacity: float | None = None) -> Any:
    candidates = make_candidates(
        {"system": {"micro_batch_size": ["1", "2", "4"]}, "learning": {"global_batch_size": 4}}
    )
    priors = {c.id: Prior(float(c.flat["micro_batch_size"]), 1.0, 100.0, 50.0) for c in candidates}
    return candidates, Systems(arms_of(candidates), Knowledge(priors, capacity)).now(outcomes, [])


def test_what_was_measured_is_believed_and_the_rest_moves_with_it() -> None:
    (one, *_), before = believed([])
    _, after = believed([of(one, "000", "probe", step_time_s=3.0, peak_memory_gib=1.2)])
    assert np.exp(before.step) == pytest.approx([1, 1, 1])
    assert np.exp(after.step[0]) == pytest.approx(3.0)
    assert after.step_sd[0] == 0
    assert all(2 < np.exp(step) < 3 for step in after.step[1:])
    assert np.exp(after.memory[1:]) / [2, 4] == pytest.approx([1.2, 1.2], rel=0.03)


def test_a_measured_oom_is_a_constraint_and_is_carried_along() -> None:
    (_, two, _), _ = believed([])
    died = make_outcome(two, "000", status="OOM", reason_kind="device_oom", kind="probe")
    _, after = believed([died], capacity=1.5)
    assert after.out == {1: "oom", 2: "inferred_oom"}
    assert after.fits()[0] > 0.5
    _, unlikely = believed([], capacity=0.2)
    assert unlikely.fits().max() < 0.01


# -- searches -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table() -> replay.Table:
    return tables.cluster_table(0)


def steps(table: replay.Table, outcomes: list[TrialOutcome]) -> Iterator[tuple[Request, TrialOutcome]]:
    """Search on, from what `outcomes` say."""
    searcher = SEARCHERS["guided"](table.candidates, table.objectives, 0, table.knowledge())
    rng = random.Random(0)
    for n, outcome in enumerate(outcomes):
        table.run(Request(table.candidates[0]), n, rng, 0.0)  # as many random numbers
        searcher.tell(outcome)
    count = len(outcomes)
    while isinstance(request := searcher.ask(), Request):
        outcome = table.run(request, count, rng, 0.0)
        searcher.tell(outcome)
        count += 1
        yield request, outcome


def test_a_search_that_was_killed_goes_on_as_if_it_had_not_been(table: replay.Table) -> None:
    whole = list(steps(table, []))
    outcomes = [outcome for _, outcome in whole]
    for killed in (1, 5, len(whole) - 2):
        resumed = next(steps(table, outcomes[:killed]))[0]
        assert (resumed.candidate.id, resumed.kind) == (whole[killed][0].candidate.id, whole[killed][0].kind)


def test_what_is_kept_of_a_budget_confirms_the_composed_frontier(table: replay.Table) -> None:
    """As soon as there is something to confirm; once as much as was asked for, the search goes on."""
    searcher = SEARCHERS["guided"](table.candidates, table.objectives, 0, table.knowledge())
    rng, kinds = random.Random(0), []
    for n in range(16):
        request = searcher.ask()
        assert isinstance(request, Request)
        kinds.append(request.kind)
        searcher.tell(table.run(request, n, rng, 0.0))
        searcher.closing = n >= 8
    assert "confirmation" not in kinds[:9]
    assert kinds[9:12] == ["confirmation"] * 3
    assert "confirmation" not in kinds[12:]


def test_no_more_is_spent_than_what_can_change_the_answer() -> None:
    """99 % of the exhaustive hypervolume for a twentieth of the grid's GPU-seconds at most, confirmations included."""
    table = tables.cluster_table(1)
    run = search("guided", 1, "cluster")
    assert run.until(0.99) < 0.05 * whole_grid(table)
    assert run.until(0.99) < factored_grid(table)
    assert run.best_cost < 1 + 3 * replay.NOISE


def of_workers(workers: int, step: float, gib: float, objectives: list[str]) -> Any:
    """Return what a probe of 2 workers is told after one of `workers` was measured, evaluating for a tenth."""
    tree = {"learning": {"global_batch_size": 4}, "system": {"num_workers": ["1", "2", "4"]}}
    candidates = make_candidates(tree)
    priors = {c.id: Prior(1.0, 1.0, 100.0, 50.0) for c in candidates}
    known = next(c for c in candidates if c.num_workers == workers)
    # 500 tokens to the target, 5 updates of 100; 2 evaluations (one before), each a quarter of an update: 0.5 of 5.
    knowledge = Knowledge(priors, tokens_per_trial=1000, eval_every_tokens=500)
    searcher = SEARCHERS["guided"](candidates, [OBJECTIVES[name] for name in objectives], 0, knowledge)
    figures = {"tokens_per_second": 100 / step, "target_tokens_per_second": 50 / step, "eval_time_s": step / 4}
    searcher.tell(of(known, "000", "probe", step_time_s=step, peak_memory_gib=gib, **figures))
    worth = searcher._worth()  # type: ignore[attr-defined]
    return worth.rivals(next(c for c in candidates if c.num_workers == 2))


def test_a_probe_is_dominated_by_more_memory_and_longer_steps() -> None:
    """One worker at 3 s: two at 3 s are no faster, and dearer even if they need not evaluate, at 3.3 s they cannot win.

    Four at 3 s cost as much as two at 6 s.
    """
    names = ["peak_memory_gib", "cost_per_quality_usd", "target_tokens_per_second"]
    assert of_workers(1, 3.0, 1.5, names) == (pytest.approx((1.5, 3.3)),)
    assert of_workers(4, 3.0, 1.5, names) == (pytest.approx((1.5, 6.6)),)
    assert of_workers(4, 3.0, 1.5, [*names, "tokens_per_second_per_device"]) == (pytest.approx((1.5, 6.6)),)
    assert of_workers(1, 3.0, 1.5, [*names, "eval_loss"]) == (pytest.approx((1.5, 3.3)),)
    assert of_workers(1, 3.0, 1.5, [*names, "host_peak_memory_gib"]) == ()


def test_a_run_that_cannot_win_is_ended(table: replay.Table) -> None:
    """The best known needs 5e6 tokens: from 5.1e6 on no other can; and none is asked to give up before a first."""
    whole = list(steps(table, []))
    qualities = [(r, o) for r, o in whole if r.kind == "quality"]
    first = next(i for i, (_, o) in enumerate(qualities) if "tokens_to_target" in o.metrics)
    assert all(r.give_up == () for r, _ in qualities[: first + 1])
    needed = qualities[first][1].metrics["tokens_to_target"]
    rank = qualities[first][0].candidate.flat["lora_rank"]
    later = [r for r, _ in qualities[first + 1 :] if r.candidate.flat["lora_rank"] == rank]
    assert later[0].give_up[-1] == (int(1.02 * needed), 0.0)
