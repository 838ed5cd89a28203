"""The state that each strategy keeps on a rank, against the shares that it is meant to keep: 4 bytes a number.

Sources: Rajbhandari et al. 2020, "ZeRO", figure 1: stage 1 divides the optimizer's state (with it the master copy of
the weights, which DeepSpeed keeps apart), stage 2 the gradients too, stage 3 the weights too; FSDP2 as stage 3.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from tests.rank_pool import RankPool
from tests.strategies.cells import SAMPLES, SHAPES, Cell
from tests.strategies.job import Rank
from trainers.config import LearningConfig, SystemConfig, from_tree
from trainers.ranks import current
from trainers.result import PhaseMemory

Ranks = Callable[[int], RankPool]

P = SHAPES["llama"].num_parameters
# What is not a share of the parameters: rotary frequencies, step counts, the padding of flat buffers.
SLACK = 4096
WAYS = {
    # strategy, options: which part of weights and of optimizer state a rank keeps, and 4-byte numbers of state a weight
    "ddp": ({"strategy": "ddp"}, 1, 1, 2),
    "fsdp2": ({"strategy": "fsdp2"}, 1 / 2, 1 / 2, 2),
    "torch 1": ({"strategy": "zero", "zero_stage": 1, "zero_engine": "torch"}, 1, 1 / 2, 2),
    "zero 1": ({"strategy": "zero", "zero_stage": 1}, 1, 1 / 2, 3),
    "zero 2": ({"strategy": "zero", "zero_stage": 2}, 1, 1 / 2, 3),
    "zero 3": ({"strategy": "zero", "zero_stage": 3}, 1 / 2, 1 / 2, 3),
}


def measured(folder: Path, cell: Cell, learning: LearningConfig) -> dict[str, PhaseMemory]:
    rank = Rank(folder, cell, learning, "adamw", 2, "float32")
    try:
        with rank.meter.tracing(rank.engine.owned):
            rank.trace(2)
        return rank.meter.peaks(current("cpu"))
    finally:
        rank.engine.close()


def peaks_of(way: str, models: Path, ranks: Ranks, adapter: Literal["full", "lora"] = "full") -> dict[str, PhaseMemory]:
    system = from_tree(SystemConfig, {"num_workers": 2, "micro_batch_size": SAMPLES // 4, **WAYS[way][0]})
    learning = LearningConfig(adapter=adapter, lora_rank=4, global_batch_size=SAMPLES)
    found: dict[str, PhaseMemory] = ranks(2).run(measured, models, Cell(system, adapter, "llama"), learning)[0]
    return found


@pytest.mark.parametrize(
    "way", [pytest.param(w, marks=pytest.mark.slow) if w in ("zero 1", "torch 1") else w for w in WAYS]
)
def test_each_rank_keeps_its_share(way: str, models: Path, ranks: Ranks) -> None:
    _, of_weights, of_state, numbers = WAYS[way]
    peaks = peaks_of(way, models, ranks)
    for rank in peaks["optimizer"].ranks:
        assert rank.accounts.weights == pytest.approx(4 * P * of_weights, abs=SLACK)
        # torch's own stage 1 gives whole parameters to ranks: their shares differ by up to the largest one.
        near = 4 * 2 * 128 * 64 if way == "torch 1" else 4 * SLACK
        assert rank.accounts.optimizer_state == pytest.approx(4 * P * numbers * of_state, abs=near)
    assert peaks["first_optimizer_step"].worst.accounts.optimizer_state > 0
    before = peaks["forward"].ranks[0].accounts
    assert before.activations > 0


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_gradients_are_kept_once(way: str, models: Path, ranks: Ranks) -> None:
    """Also with several micro batches an update, where the buckets of ddp are the gradients."""
    _, share, _, _ = WAYS[way]
    peaks = peaks_of(way, models, ranks)
    for rank in peaks["optimizer"].ranks:
        assert rank.accounts.gradients == pytest.approx(4 * P * share, abs=SLACK)


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "zero 3"])
def test_frozen_weights_cost_no_gradient_and_no_state(way: str, models: Path, ranks: Ranks) -> None:
    _, of_weights, of_state, numbers = WAYS[way]
    peaks = peaks_of(way, models, ranks, "lora")
    trained = SHAPES["llama"].num_lora_parameters(4)
    for rank in peaks["optimizer"].ranks:
        assert rank.accounts.weights == pytest.approx(4 * (P + trained) * of_weights, abs=SLACK)
        assert rank.accounts.optimizer_state == pytest.approx(4 * trained * numbers * of_state, abs=4 * SLACK)
        # DeepSpeed keeps the bucket that it reduces, which is as large as all of them, beside its share.
        assert rank.accounts.gradients <= 4 * trained * (1.5 if way == "zero 3" else 1) + SLACK
