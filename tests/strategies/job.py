"""What one rank of a cell does: build, train, and give back what the parent compares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.strategies.cells import SAMPLES, Cell
from tests.strategies.reference import Trace, collated, exact_norms, targets_of, window
from trainers import batch as batching
from trainers import token_loss
from trainers.adapter import saved_name
from trainers.config import LearningConfig
from trainers.engine import Engine
from trainers.layout import Layout
from trainers.memory import MemoryMeter
from trainers.ranks import current
from trainers.strategies import STRATEGIES

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


class Rank:
    """This rank of a cell: an engine, and the windows that it is given."""

    def __init__(
        self, folder: Path, cell: Cell, learning: LearningConfig, optimizer: str, updates: int, dtype: str | None
    ) -> None:
        self.cell, self.setting = cell, cell.setting(learning, dtype)
        self.layout = Layout(self.setting.plan, current("cpu"))
        self.meter = MemoryMeter(self.layout.device)
        self.engine: Engine = STRATEGIES[cell.system.strategy].make_engine(
            str(folder / cell.family),
            None,
            self.setting,
            self.layout,
            updates,
            optimizer=OPTIMIZERS[optimizer],
            prepare=exact_norms if dtype == "float64" else None,
        )

    def update(self, update: int) -> tuple[float, float]:
        """Do one update; return the mean loss of its targets and the gradient norm."""
        samples = window(update, SAMPLES)
        split = batching.split(
            batching.Window(update, 0, tuple(range(SAMPLES))), self.setting.plan.dp, self.cell.system.micro_batch_size
        )
        mine = [collated([samples[i] for i in ids]) for ids in split[self.layout.dp_rank]]
        step = self.engine.step(mine, targets_of(samples), self.meter)
        return step.loss_sum / targets_of(samples), step.grad_norm

    def trained(self) -> dict[str, torch.Tensor]:
        """Return this rank's trained parameters, whole, under the checkpoint's names. Every rank must call it."""
        return {saved_name(name): value for name, value in self.engine.trained()}

    def trace(self, updates: int) -> Trace:
        """Train from the first update on."""
        steps = [self.update(update) for update in range(updates)]
        return Trace([loss for loss, _ in steps], [norm for _, norm in steps], self.trained())


def train(folder: Path, cell: Cell, learning: LearningConfig, optimizer: str, updates: int, dtype: str | None) -> Trace:
    """Train on this rank."""
    rank = Rank(folder, cell, learning, optimizer, updates, dtype)
    try:
        return rank.trace(updates)
    finally:
        rank.engine.close()


def prove(
    folder: Path, cell: Cell, learnings: dict[str, LearningConfig], updates: int, dtype: str
) -> tuple[Trace, tuple[float, float], Trace]:
    """Do an update with SGD, then another one wrong, then some with AdamW, each from the same start.

    Returns what came of them; of the wrong one the loss and the gradient norm.
    """
    rank = Rank(folder, cell, learnings["sgd"], "sgd", updates, dtype)
    engine: Any = rank.engine
    try:
        start = engine.snapshot()
        sgd = rank.trace(1)
        engine.restore(start)
        with mean_of_means(rank):
            wrong = rank.update(0)
        # One build serves both optimizers: most of a cell's time is building.
        engine._setting, engine._optimizer_class = cell.setting(learnings["adamw"], dtype), OPTIMIZERS["adamw"]
        engine.restore(start)
        return sgd, wrong, rank.trace(updates)
    finally:
        engine.close()


@contextmanager
def mean_of_means(rank: Rank) -> Iterator[None]:
    """Make the usual mistake: each micro batch's mean, averaged over the micro batches of all ranks."""
    right, targets = token_loss.loss_sum, targets_of(window(0, SAMPLES))
    micro_batches = SAMPLES // rank.cell.system.micro_batch_size

    def wrong(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        count = max(int((labels != -100).sum()), 1)
        return right(logits, labels) * (targets / (count * micro_batches))

    token_loss.loss_sum = wrong
    try:
        yield
    finally:
        token_loss.loss_sum = right
