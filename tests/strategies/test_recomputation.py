"""Recomputation draws the same dropout masks again, and longer runs stay together in every strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.rank_pool import RankPool
from tests.strategies.cells import SAMPLES, Cell, each_once
from tests.strategies.job import train
from tests.strategies.reference import Trace, reference
from tests.strategies.test_contract import LIMITS, far, learning_of, whole
from trainers.config import SystemConfig
from trainers.strategies import proof_dtype

Ranks = Callable[[int], RankPool]

# Every value of strategy, option, degree, adapter and recomputation at least once.
LONG = each_once()
UPDATES = 10


def with_dropout(folder: Path, mode: str, preserved: bool) -> Trace:
    """Train with dropout on, from the same random state."""
    from trainers import activation_checkpointing

    torch.manual_seed(5)
    cell = Cell(SystemConfig(micro_batch_size=4, activation_checkpointing=mode), "lora", "llama")  # type: ignore[arg-type]
    learning = replace(learning_of(cell, "sgd"), lora_dropout=0.3)
    right = activation_checkpointing.OPTIONS
    activation_checkpointing.OPTIONS = {**right, "preserve_rng_state": preserved}
    try:
        return train(folder, cell, learning, "sgd", 2, "float64")
    finally:
        activation_checkpointing.OPTIONS = right


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_dropout_is_recomputed_with_the_same_mask(mode: str, models: Path) -> None:
    right = with_dropout(models, "none", preserved=True)
    assert far(with_dropout(models, mode, preserved=True), right) == 0
    assert far(with_dropout(models, mode, preserved=False), right) > 1e-3, "the test cannot tell"


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_ten_updates_stay_with_one_process(name: str, models: Path, ranks: Ranks) -> None:
    """AdamW divides by the root of a mean of squares: a wrong factor on gradients shows in norms, not weights."""
    cell = LONG[name]
    learning = learning_of(cell, "adamw")
    dtype = proof_dtype(cell.setting(learning))
    right = reference(models, cell.family, learning, "adamw", UPDATES, SAMPLES, "float64")
    found = whole(ranks(cell.system.num_workers).run(train, models, cell, learning, "adamw", UPDATES, dtype))
    assert len(found.losses) == UPDATES
    limit = LIMITS[dtype, "adamw"]
    assert far(found, right) <= (limit if dtype == "float64" else 10 * limit)
