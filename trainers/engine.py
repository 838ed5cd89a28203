"""The native engine: one optimizer update over the micro batches of a window, whatever axes were applied."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from trainers.config import LearningConfig
from trainers.data import IGNORED
from trainers.memory import MemoryMeter
from trainers.plan import Plan
from trainers.ranks import World
from trainers.strategies import Strategy

Batch = dict[str, torch.Tensor]  # input_ids, labels: int64 [rows, tokens]


@dataclass(frozen=True)
class Step:
    """One update as this rank saw it: its share of the loss sum, and the global gradient norm before clipping."""

    loss_sum: float
    grad_norm: float
    learning_rate: float


class Engine:
    """Owns accumulation, loss scaling, clipping, optimizer and schedule over a wrapped model.

    The loss of a window is the mean over all its target tokens, over ranks and micro batches. Each micro step
    backpropagates `divisor · S / N`: S the sum over its targets, N the targets of the whole window, divisor what the
    strategy's reduction divides by.
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy,
        plan: Plan,
        world: World,
        learning: LearningConfig,
        total_updates: int,
        dtype: torch.dtype,
    ) -> None:
        self.module = model
        self.model = strategy.apply(model, world)
        self._strategy, self._divisor = strategy, strategy.gradient_divisor(plan)
        self._world, self._learning, self._total_updates, self._dtype = world, learning, total_updates, dtype
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Start optimizer and schedule anew."""
        c = self._learning
        fused = self._world.device.type == "cuda"  # one kernel, and no second copy of the parameters as foreach needs
        self.optimizer = torch.optim.AdamW(
            self._trained,
            lr=c.learning_rate,
            betas=(c.adam_beta1, c.adam_beta2),
            eps=c.adam_epsilon,
            weight_decay=c.weight_decay,
            fused=fused or None,
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)

    def _rate(self, update: int) -> float:
        return schedule(self._learning, update, self._total_updates)

    def step(self, micro_batches: Sequence[Batch], window_targets: int, meter: MemoryMeter) -> Step:
        """Do one optimizer update. Every rank brings the same number of micro batches."""
        self.model.train()
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for i, batch in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            with nullcontext() if last else self._strategy.accumulating(self.model):
                with meter.phase("forward"):
                    loss = self._loss_sum(batch)
                with meter.phase("backward"):
                    (loss * (self._divisor / max(window_targets, 1))).backward()
            total += loss.detach()
        rate = float(self.scheduler.get_last_lr()[0])
        with meter.phase("optimizer"):
            limit = self._learning.max_grad_norm or float("inf")
            norm = float(nn.utils.clip_grad_norm_(self._trained, limit))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad(set_to_none=True)
        return Step(float(total), norm, rate)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the sum of the losses of these batches' targets, on this rank."""
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for batch in batches:
            total += self._loss_sum(batch)
        return float(total)

    def _loss_sum(self, batch: Batch) -> torch.Tensor:
        """Return the summed cross entropy of a micro batch's targets, in float32 at least; 0 where there are none.

        No attention mask is passed: rows are padded on the right, and under causal attention no token sees what is
        to its right, so padding changes nothing but keeps the kernels' fast paths open.
        """
        device = self._world.device
        mixed = torch.autocast(device.type, self._dtype) if self._dtype != torch.float32 else nullcontext()
        with mixed:
            logits = self.model(input_ids=batch["input_ids"], use_cache=False).logits
        predicted = logits[:, :-1]
        if predicted.dtype.itemsize < 4:  # half precision; float64 stays as it is
            predicted = predicted.float()
        predicted = predicted.flatten(0, 1)  # [rows · (tokens − 1), vocabulary]
        labels = batch["labels"][:, 1:].flatten()
        return cross_entropy(predicted, labels, ignore_index=IGNORED, reduction="sum")

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor that lives between steps: weights, gradients, optimizer state."""
        for p in (*self.module.parameters(), *self.module.buffers()):
            yield p.data
            if p.grad is not None:
                yield p.grad
        for state in self.optimizer.state.values():
            yield from (v for v in state.values() if isinstance(v, torch.Tensor))

    def snapshot(self) -> list[torch.Tensor]:
        """Return copies of the trained weights on the host."""
        return [p.detach().to("cpu", copy=True) for p in self._trained]

    @torch.no_grad()
    def restore(self, snapshot: Sequence[torch.Tensor]) -> None:
        """Put a snapshot's weights back and start the optimizer anew."""
        for p, saved in zip(self._trained, snapshot, strict=True):
            p.copy_(saved)
        self.reset_optimizer()

    def close(self) -> None:
        """Drop the model. It must be gone before the process group is: gloo deadlocks otherwise (torch 2.13)."""
        self.__dict__.clear()


def schedule(learning: LearningConfig, update: int, total_updates: int) -> float:
    """Return the factor on the peak learning rate for update number `update` of `total_updates`."""
    warmup = round(learning.warmup_fraction * total_updates)
    if update < warmup:
        return (update + 1) / (warmup + 1)
    progress = (update - warmup) / max(total_updates - warmup, 1)
    decay: dict[str, Any] = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }
    return float(max(decay[learning.lr_schedule], 0.0))
