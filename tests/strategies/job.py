"""What one rank of a cell does: build, train, and give back what the parent compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.strategies.cells import SAMPLES, Cell
from tests.strategies.reference import Trace, collated, exact_norms, targets_of, window
from trainers import batch as batching
from trainers import engine as engines
from trainers.adapter import base_name, is_adapter
from trainers.config import LearningConfig
from trainers.engine import Engine
from trainers.layout import Layout
from trainers.memory import MemoryMeter
from trainers.ranks import current
from trainers.strategies import STRATEGIES

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def train(
    folder: Path, cell: Cell, learning: LearningConfig, optimizer: str, updates: int, mutated: bool, dtype: str
) -> Trace:
    """Train on this rank; with `mutated`, on the mean of the micro batches' means."""
    world = current("cpu")
    setting = cell.setting(learning, dtype)
    layout = Layout(setting.plan, world)
    strategy = STRATEGIES[cell.system.strategy]
    prepare = exact_norms if dtype == "float64" else None
    model = str(folder / cell.family)
    engine = strategy.make_engine(
        model, None, setting, layout, updates, optimizer=OPTIMIZERS[optimizer], prepare=prepare
    )
    meter = MemoryMeter(world.device)
    right = engines.loss_sum
    if mutated:
        engines.loss_sum = mean_of_means(
            right, SAMPLES // (cell.system.micro_batch_size * setting.plan.dp) * setting.plan.dp
        )
    losses, norms, states = [], [], []
    try:
        for update in range(updates):
            samples = window(update, SAMPLES)
            mine = batching.split(
                batching.Window(update, 0, tuple(range(SAMPLES))), setting.plan.dp, cell.system.micro_batch_size
            )[layout.dp_rank]
            targets = targets_of(samples)
            global WINDOW_TARGETS
            WINDOW_TARGETS = targets
            step = engine.step([collated([samples[i] for i in ids]) for ids in mine], targets, meter)
            losses.append(step.loss_sum / targets)
            norms.append(step.grad_norm)
            states.append(trained(engine))
    finally:
        engines.loss_sum = right
        engine.close()
    return Trace(losses, norms, states[0], states[-1])


WINDOW_TARGETS = 0


def mean_of_means(right: Any, micro_batches: int) -> Any:
    """Return the usual mistake: each micro batch's mean, averaged over the micro batches of all ranks."""

    def wrong(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        count = max(int((targets != -100).sum()), 1)
        loss: torch.Tensor = right(logits, targets)
        return loss * (WINDOW_TARGETS / (count * micro_batches))

    return wrong


def trained(engine: Engine) -> dict[str, torch.Tensor]:
    """Return this rank's trained parameters, whole, under the checkpoint's names. Every rank must call it."""
    return {name if is_adapter(name) else base_name(name): value for name, value in engine.trained()}
