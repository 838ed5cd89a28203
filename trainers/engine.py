"""One optimizer update over the micro batches of a window: what an engine is, and the native one."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainers import activation_checkpointing, token_loss
from trainers.build import Built
from trainers.config import LearningConfig
from trainers.gradients import clip, global_norm, local
from trainers.layout import Layout
from trainers.memory import MemoryMeter
from trainers.quantization import scales
from trainers.result import Account
from trainers.strategies import STRATEGIES, Setting, dimensions
from trainers.token_loss import Batch, keeps_heads, loss_context, prepared, whole_value


@dataclass(frozen=True)
class Step:
    """One update: the loss sum of the window's targets over all ranks, and the global gradient norm before clipping."""

    loss_sum: float
    grad_norm: float
    learning_rate: float


class Engine(ABC):
    """The contract of an engine: it owns accumulation, loss scaling, clipping, optimizer, schedule and their state.

    The loss of a window is the mean over all its target tokens, over ranks and micro batches. Each micro step
    backpropagates `divisor · S / N`: S the sum over its targets, N the targets of the whole window, divisor what the
    strategy's reduction divides by. Every rank calls every method alike.
    """

    def __init__(
        self,
        built: Built,
        setting: Setting,
        layout: Layout,
        total_updates: int,
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    ) -> None:
        self.module = built.model
        self._setting, self._layout, self._total_updates = setting, layout, total_updates
        self._optimizer_class = optimizer
        # As they are now: while FSDP2 has gathered weights, the module shows those.
        self._weights = [*self.module.parameters(), *self.module.buffers(), *scales(self.module)]
        self._trained = [p for p in self.module.parameters() if p.requires_grad]
        self._has_state = False  # the optimizer's: its first step makes it
        self._start(built.parts)

    @abstractmethod
    def _start(self, parts: tuple[nn.Module, ...]) -> None:
        """Make what this engine needs beside the model, whose `parts` are what runs; called once."""

    @classmethod
    @abstractmethod
    def saved_as(cls, setting: Setting, world_size: int) -> str:
        """Return what a save is, for a person: it loads where this is the same."""

    @property
    def format(self) -> str:
        """What this engine's saves are."""
        return self.saved_as(self._setting, self._layout.world.size)

    @property
    def _update_phase(self) -> str:
        """The name of the phase of the optimizer's next step."""
        return "optimizer" if self._has_state else "first_optimizer_step"

    def _optimizer_options(self) -> dict[str, Any]:
        """Return the optimizer's arguments: AdamW's, or the learning rate alone."""
        learning = self._setting.learning
        if self._optimizer_class is not torch.optim.AdamW:
            return {"lr": learning.learning_rate}
        return {
            "lr": learning.learning_rate,
            "betas": (learning.adam_beta1, learning.adam_beta2),
            "eps": learning.adam_epsilon,
            "weight_decay": learning.weight_decay,
            # one kernel, and no second copy of the parameters as foreach needs
            "fused": True if self._setting.device == "cuda" else None,
        }

    def _rate_factor(self, update: int) -> float:
        """Return the factor on the peak learning rate for an update."""
        return schedule(self._setting.learning, update, self._total_updates)

    @abstractmethod
    def step(self, micro_batches: Sequence[Batch], window_targets: int, meter: MemoryMeter) -> Step:
        """Do one optimizer update. Every rank brings the same number of micro batches."""

    @abstractmethod
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the sum of the losses of all ranks' targets."""

    @abstractmethod
    def owned(self) -> Iterator[tuple[Account, torch.Tensor]]:
        """Yield every tensor of this rank that lives between steps, with its account."""

    @abstractmethod
    def trained(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and whole value of each trained parameter of this rank's part of the model."""

    @abstractmethod
    def snapshot(self) -> Any:
        """Return a copy, on the host, of what training changes."""

    @abstractmethod
    def restore(self, snapshot: Any) -> None:
        """Put a snapshot back, and start optimizer and schedule anew."""

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo what training inside changes, random state too; optimizer and schedule start anew."""
        before, device = self.snapshot(), self._layout.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
        self.restore(before)

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write trained weights and the optimizer's and schedule's state into a folder."""

    @abstractmethod
    def load(self, folder: Path, updates: int) -> None:
        """Read what `save` wrote after `updates` updates."""

    def close(self) -> None:
        """Drop the model. It must be gone before the process group is: gloo deadlocks otherwise (torch 2.13)."""
        self.__dict__.clear()


# Frozen weights are not saved: they are the base model's. Flat optimizer keys survive another split of the model.
SAVED = StateDictOptions(flatten_optimizer_state_dict=True, ignore_frozen_params=True, strict=False)


class NativeEngine(Engine):
    """torch alone, over whatever strategy and dimensions were applied."""

    def _start(self, parts: tuple[nn.Module, ...]) -> None:
        setting = self._setting
        self.parts = parts
        self._dimensions = dimensions(setting.system)
        self._divisor = STRATEGIES[setting.system.strategy].gradient_divisor(setting)
        self._keeps_gradients = STRATEGIES[setting.system.strategy].keeps_gradients(setting)
        self._runner = make_runner(Built(self.module, parts), setting, self._layout)
        self.reset_optimizer()

    @classmethod
    def saved_as(cls, setting: Setting, world_size: int) -> str:
        # Sharded tensors under the checkpoint's names: they load under any strategy of this engine and number of ranks.
        return "ddp or fsdp2"

    def reset_optimizer(self) -> None:
        """Start optimizer and schedule anew."""
        strategy = STRATEGIES[self._setting.system.strategy]
        groups = [{"params": group} for group in by_mesh(self._trained)]
        self.optimizer = strategy.optimizer(groups, self._layout, self._optimizer_class, **self._optimizer_options())
        self._has_state = False
        self._schedule_after(0)

    def _schedule_after(self, updates: int) -> None:
        """Set the learning rate to that of the update which follows `updates` others."""
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate_factor, last_epoch=updates - 1)

    def step(self, micro_batches: Sequence[Batch], window_targets: int, meter: MemoryMeter) -> Step:
        for part in self.parts:
            part.train()
        window = self._runner.window(micro_batches)
        scale = self._divisor / max(window_targets, 1)
        total = self._runner.train(map(self._prepare, window), len(window), scale, meter)
        rate = float(self.scheduler.get_last_lr()[0])
        with meter.phase(self._update_phase):
            norm = global_norm(self._trained, self._layout, self._runner.counted_elsewhere())
            clip(self._trained, norm, self._setting.learning.max_grad_norm)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad(set_to_none=not self._keeps_gradients)
        self._has_state = True
        return Step(self._layout.sum([float(total)])[0], norm, rate)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        for part in self.parts:
            part.eval()
        total = torch.zeros((), dtype=torch.float64, device=self._layout.device)
        for batch in batches:
            total += self._runner.evaluate(self._prepare(batch))
        return self._layout.sum([float(total)])[0]

    def _prepare(self, batch: Batch) -> Batch:
        """Return this rank's part of a batch."""
        multiple = math.lcm(*(d.multiple(self._setting) for d in self._dimensions))
        ready = prepared(batch, multiple, heads=keeps_heads(self._setting))
        for dimension in self._dimensions:
            ready = dimension.shard_batch(ready, self._setting, self._layout)
        return ready

    def owned(self) -> Iterator[tuple[Account, torch.Tensor]]:
        yield from (("weights", local(p.data)) for p in self._weights)
        yield from (("gradients", local(p.grad)) for p in self._trained if p.grad is not None)
        for state in self._states():
            yield from (("optimizer_state", local(v)) for v in state.values() if isinstance(v, torch.Tensor))

    def _states(self) -> Iterator[dict[str, Any]]:
        """Yield the optimizer's state of each parameter."""
        yield from self.optimizer.state.values()

    def trained(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, p in self.module.named_parameters():
            if p.requires_grad:
                # On the device, where ranks can gather; what is replicated would be the parameter itself.
                yield name, whole_value(p.detach().to(self._layout.device)).clone()

    def snapshot(self) -> list[torch.Tensor]:
        return [local(p.detach()).to("cpu", copy=True) for p in self._trained]

    def _forget_gathered(self) -> None:
        """Free weights that an evaluation gathered and no backward pass freed: they would hide new values."""
        for module in (m for part in self.parts for m in part.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()

    @torch.no_grad()
    def restore(self, snapshot: Sequence[torch.Tensor]) -> None:
        self._forget_gathered()
        for p, saved in zip(self._trained, snapshot, strict=True):
            local(p).copy_(saved)
        # Not zeros: torch gives an optimizer that has none the state to load into only where there are no gradients.
        self.optimizer.zero_grad(set_to_none=True)
        self.reset_optimizer()

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.module, self.optimizer, options=SAVED)
        state = {"model": self._of_trained(model), "optimizer": optimizer}
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        state_dict_saver.save(state, checkpoint_id=folder, no_dist=self._layout.world.size == 1)

    def _of_trained(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the trained weights of a state, each once: a frozen head that is tied to an embedding is in it too."""
        names = {name for name, p in self.module.named_parameters() if p.requires_grad}
        return {name: value for name, value in state.items() if name in names}

    def load(self, folder: Path, updates: int) -> None:
        self._forget_gathered()
        model, optimizer = get_state_dict(self.module, self.optimizer, options=SAVED)
        state = {"model": self._of_trained(model), "optimizer": optimizer}
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        state_dict_loader.load(state, checkpoint_id=folder, no_dist=self._layout.world.size == 1)
        set_state_dict(self.module, self.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=SAVED)
        if updates == 0:
            self.reset_optimizer()  # saving gave an unused optimizer a state of one step
        self._has_state = updates > 0
        self._schedule_after(updates)


class Runner(ABC):
    """How the micro batches of a window run through this rank's part of the model."""

    def window(self, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return a window's micro batches in the form in which they can run; called before any division of rows."""
        return micro_batches

    @abstractmethod
    def train(self, batches: Iterable[Batch], count: int, scale: float, meter: MemoryMeter) -> torch.Tensor:
        """Run forward and backward passes; return the sum of this rank's target losses, float64, a scalar."""

    @abstractmethod
    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Return the sum of this rank's target losses, without gradients."""

    def counted_elsewhere(self) -> Sequence[nn.Parameter]:
        """Return trained parameters whose gradient another rank counts in the global norm."""
        return ()


class OneByOne(Runner):
    """The whole model is on this rank (or its shards are gathered): micro batch after micro batch."""

    def __init__(self, model: nn.Module, setting: Setting, layout: Layout) -> None:
        self._model, self._setting, self._layout = model, setting, layout
        self._strategy = STRATEGIES[setting.system.strategy]

    def train(self, batches: Iterable[Batch], count: int, scale: float, meter: MemoryMeter) -> torch.Tensor:
        offload = self._setting.system.offload_activations
        total = torch.zeros((), dtype=torch.float64, device=self._layout.device)
        for i, batch in enumerate(batches):
            meter.micro_step, last = i, i == count - 1
            with self._strategy.accumulating(self._model, self._setting, last), loss_context(self._setting):
                with meter.phase("forward"), activation_checkpointing.offloaded(offload, self._layout.device):
                    loss = token_loss.loss_of(self._model, batch)
                with meter.phase("backward"):
                    (loss * scale).backward()
            total += whole_value(loss)
        return total

    def evaluate(self, batch: Batch) -> torch.Tensor:
        with loss_context(self._setting):
            return whole_value(token_loss.loss_of(self._model, batch)).double()


def make_runner(built: Built, setting: Setting, layout: Layout) -> Runner:
    """Return how this rank's part of the model is run."""
    if setting.plan.pp == 1:
        return OneByOne(built.parts[0], setting, layout)
    from trainers.stages import Pipeline

    return Pipeline(built, setting, layout)


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by the mesh that they are spread over: an optimizer's fused step takes one mesh at a time."""
    groups: dict[int, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(hash(p.device_mesh) if isinstance(p, DTensor) else 0, []).append(p)
    return list(groups.values())


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
