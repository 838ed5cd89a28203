"""What is frozen costs neither gradients nor optimizer state, and 4-bit weights cost 4 bits, in every strategy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rank_pool import RankPool
from tests.strategies.cells import Cell
from tests.strategies.job import Rank
from tests.strategies.test_contract import learning_of
from trainers.adapter import is_adapter
from trainers.config import SystemConfig, from_tree
from trainers.gradients import local

Ranks = Callable[[int], RankPool]

# The llama of the suite, by hand: 4 blocks of hidden 64, 8 heads of 8 (4 for keys and values), 96 in the MLP.
MATRICES = 4 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96)
# LoRA of rank 4: rank × (in + out) of each.
ADAPTER = 4 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 96))


def held(folder: Path, cell: Cell, dtype: str) -> dict[str, int]:
    """Return what this rank holds after an update: gradients of what is frozen, moments, packed bytes."""
    rank = Rank(folder, cell, learning_of(cell, "adamw"), "adamw", 2, dtype)
    engine: Any = rank.engine
    right = engine.optimizer.zero_grad if hasattr(engine, "optimizer") else None
    if right is not None:
        engine.optimizer.zero_grad = lambda **_: None  # gradients stay, to be counted
    try:
        rank.update(0)
        named = dict(engine.module.named_parameters())
        frozen = [name for name in named if not is_adapter(name)]
        assert not any(named[name].requires_grad for name in frozen)
        gradients = sum(p.grad is not None for name, p in named.items() if not is_adapter(name))
        optimizer = getattr(engine, "optimizer", None) or engine._engine.optimizer
        inner: Any = getattr(optimizer, "optimizer", getattr(optimizer, "optim", optimizer))
        moments = [local(s[k]).numel() for s in inner.state.values() for k in ("exp_avg", "exp_avg_sq") if k in s]
        packed = sum(
            local(getattr(p, "ds_tensor", p)).numel() for p in named.values() if p.dtype == torch.uint8
        )  # a byte each
        return {"frozen gradients": gradients, "moments": sum(moments), "packed": packed}
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("tree", "copies", "weights"),  # on two ranks: how many hold a moment, how many a weight
    [
        ({"strategy": "ddp"}, 2, 2),
        ({"strategy": "fsdp2"}, 1, 1),
        ({"strategy": "zero", "zero_stage": "1"}, 1, 2),
        ({"strategy": "zero", "zero_stage": "3"}, 1, 1),
        ({"strategy": "zero", "zero_engine": "torch"}, 1, 2),
    ],
)
def test_frozen_weights(tree: dict[str, str], copies: int, weights: int, models: Path, ranks: Ranks) -> None:
    system = from_tree(SystemConfig, {"num_workers": "2", "micro_batch_size": "2", **tree})
    found = ranks(2).run(held, models, Cell(system, "qlora", "llama"), "float32")
    assert [f["frozen gradients"] for f in found] == [0, 0]
    moments = sum(f["moments"] for f in found)
    assert moments == pytest.approx(copies * 2 * ADAPTER, rel=0.02)  # DeepSpeed pads its flat buffers
    packed = sum(f["packed"] for f in found)
    assert packed == pytest.approx(weights * MATRICES / 2, rel=0.02)
