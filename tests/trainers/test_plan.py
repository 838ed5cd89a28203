"""World arithmetic, worked by hand."""

from __future__ import annotations

import itertools

import pytest

from trainers.plan import Plan


def test_tensor_parallel_ranks_share_samples() -> None:
    """8 GPUs with tp=2, dp=4, micro batch 2, accumulation 8: 64 samples an update, not 128."""
    plan = Plan(dp_shard=4, tp=2)
    assert (plan.world, plan.dp) == (8, 4)
    assert plan.accumulation(64, 2) == 8
    assert plan.accumulation(128, 2) == 16


def test_every_degree_counts_towards_the_world_and_two_towards_dp() -> None:
    plan = Plan(dp_replicate=2, dp_shard=3, tp=5, pp=7, cp=11)
    assert plan.world == 2310
    assert plan.dp == 6


def test_a_batch_is_never_rounded_and_the_message_names_every_factor() -> None:
    plan = Plan(dp_replicate=2, dp_shard=3, tp=2)
    with pytest.raises(ValueError, match="not divisible") as caught:
        plan.accumulation(64, 4)
    for factor in ("global_batch_size=64", "micro_batch_size=4", "dp=6", "dp_replicate=2", "dp_shard=3", "= 24"):
        assert factor in str(caught.value)


def test_coordinates_of_hand_laid_ranks() -> None:
    """tp is fastest, pp slowest: rank = ((pp · 2 + dp_replicate) · 1 + dp_shard) … · 2 + tp."""
    plan = Plan(dp_replicate=2, tp=2, pp=2)
    index = {rank: plan.coordinates(rank) for rank in range(8)}
    assert [index[r]["tp"] for r in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [index[r]["dp_replicate"] for r in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [index[r]["pp"] for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [plan.dp_rank(r) for r in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert all(index[r]["dp_shard"] == index[r]["cp"] == 0 for r in range(8))


def test_coordinates_are_a_bijection_and_dp_ranks_are_even() -> None:
    for degrees in itertools.product((1, 2, 3), repeat=5):
        plan = Plan(*degrees)
        seen = {tuple(plan.coordinates(rank).items()) for rank in range(plan.world)}
        assert len(seen) == plan.world
        shares = [plan.dp_rank(rank) for rank in range(plan.world)]
        assert sorted(shares) == sorted(list(range(plan.dp)) * (plan.world // plan.dp))


def test_impossible_degrees_and_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="tp=0"):
        Plan(tp=0)
    with pytest.raises(ValueError, match=r"rank 2 is outside a world of 2 = .*dp_replicate=2"):
        Plan(dp_replicate=2).coordinates(2)
