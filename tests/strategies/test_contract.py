"""Every legal combination takes the same step as one process on the concatenated window, and a wrong one is noticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.rank_pool import RankPool
from tests.strategies.cells import SAMPLES, Cell, all_cells
from tests.strategies.job import prove
from tests.strategies.reference import Trace, reference
from trainers.config import LearningConfig
from trainers.strategies import proof_dtype

Ranks = Callable[[int], RankPool]

CELLS = {cell.name: cell for cell in all_cells()}
UPDATES = 2  # with AdamW; the second one uses the state that the first one made
# By dtype and optimizer, relative to the largest value of a tensor. In float64 right code is within 1e-12, and every
# bug that was ever seen above 1e-3. In float32 AdamW's noise alone is 1e-4: its step is a sign where a gradient is 0.
LIMITS = {
    ("float64", "sgd"): 1e-10,
    ("float64", "adamw"): 1e-10,
    ("float32", "sgd"): 1e-5,
    ("float32", "adamw"): 1e-3,
}


def learning_of(cell: Cell, optimizer: str) -> LearningConfig:
    rate = 0.5 if optimizer == "sgd" else 1e-3
    return LearningConfig(
        adapter=cell.adapter, lora_rank=4, learning_rate=rate, lr_schedule="constant", warmup_fraction=0.0,  # type: ignore[arg-type]
        weight_decay=0.01, max_grad_norm=0.05 if optimizer == "adamw" else 0.0, global_batch_size=SAMPLES,
    )  # fmt: skip


def whole(traces: Sequence[Trace]) -> Trace:
    """Join what the ranks hold; where several hold a parameter, they hold the same."""
    trained: dict[str, torch.Tensor] = {}
    for trace in traces:
        assert trace.losses == traces[0].losses
        assert trace.norms == traces[0].norms
        for name, value in trace.trained.items():
            assert torch.equal(trained.setdefault(name, value), value), name
    return Trace(traces[0].losses, traces[0].norms, trained)


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max().clamp(min=1e-3)) for name in a)


def far(found: Trace, right: Trace) -> float:
    """Return the largest difference between two runs, over losses, norms and parameters."""
    scalars = [abs(x - y) for x, y in zip(found.losses + found.norms, right.losses + right.norms, strict=True)]
    return max(*scalars, difference(found.trained, right.trained))


@pytest.mark.parametrize("name", CELLS)
def test_cell(name: str, models: Path, ranks: Ranks) -> None:
    cell = CELLS[name]
    learnings = {optimizer: learning_of(cell, optimizer) for optimizer in ("sgd", "adamw")}
    dtype = proof_dtype(cell.setting(learnings["sgd"]))
    right = {
        optimizer: reference(models, cell.family, learnings[optimizer], optimizer, updates, SAMPLES, "float64")
        for optimizer, updates in (("sgd", 1), ("adamw", UPDATES))
    }
    results = ranks(cell.system.num_workers).run(prove, models, cell, learnings, UPDATES, dtype)
    sgd, wrong, adamw = zip(*results, strict=True)
    assert far(whole(sgd), right["sgd"]) <= LIMITS[dtype, "sgd"]
    assert far(whole(adamw), right["adamw"]) <= LIMITS[dtype, "adamw"]
    assert abs(wrong[0][1] - right["sgd"].norms[0]) > 1e-3, "the mean of means went unnoticed"
