"""DeepSpeed as the engine: ZeRO stages 1 to 3, with offload."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainers import activation_checkpointing, token_loss
from trainers.deepspeed_memory import BUCKET
from trainers.engine import Engine, Step
from trainers.memory import MemoryMeter
from trainers.ranks import ensure_group
from trainers.result import Account
from trainers.strategies import Setting
from trainers.token_loss import Batch, keeps_heads, prepared


class DeepSpeedEngine(Engine):
    """A DeepSpeed engine over the process group that is there, with this project's windows.

    Its own division by accumulation is switched off, its division by the data-parallel size is undone, its clipping
    (on at 1.0 by default) is told our limit, and its schedule is ours.
    """

    def _start(self, parts: tuple[nn.Module, ...]) -> None:
        self._updates = 0
        self._engine: Any = self._initialize()

    def _initialize(self) -> Any:
        deepspeed = imported(self._layout.device)
        world = self._layout.world
        ensure_group(world)
        for name, value in (("RANK", world.rank), ("LOCAL_RANK", world.device.index or 0), ("WORLD_SIZE", world.size)):
            os.environ[name] = str(value)  # it insists on them, also where the group is there already
        engine, *_ = deepspeed.initialize(
            model=self.module,
            optimizer=self._optimizer_class(self._trained, **self._optimizer_options()),
            model_parameters=self._trained,
            config=settings(self._setting, sum(p.numel() for p in self._trained)),
        )
        return engine

    @classmethod
    def saved_as(cls, setting: Setting, world_size: int) -> str:
        return f"DeepSpeed ZeRO-{setting.options['zero_stage']} on {world_size} ranks"

    def step(self, micro_batches: Sequence[Batch], window_targets: int, meter: MemoryMeter) -> Step:
        self._engine.train()
        offload = self._setting.system.offload_activations
        scale = self._setting.plan.dp / max(window_targets, 1)
        total = torch.zeros((), dtype=torch.float64, device=self._layout.device)
        for i, batch in enumerate(micro_batches):
            meter.micro_step = i
            self._engine.set_gradient_accumulation_boundary(i == len(micro_batches) - 1)
            with meter.phase("forward"), activation_checkpointing.offloaded(offload, self._layout.device):
                loss = token_loss.loss_of(self._engine, self._prepare(batch))
            with meter.phase("backward"):
                self._engine.backward(loss * scale, scale_wrt_gas=False)
            total += loss.detach()
        rate = self._set_rate()
        with meter.phase(self._update_phase):
            self._engine.step()
            self._engine.zero_grad()
        self._updates += 1
        self._has_state = True
        norm = self._engine.get_global_grad_norm()
        return Step(self._layout.sum([float(total)])[0], math.nan if norm is None else float(norm), rate)

    def _prepare(self, batch: Batch) -> Batch:
        return prepared(batch, heads=keeps_heads(self._setting))

    def _set_rate(self) -> float:
        rate = self._setting.learning.learning_rate * self._rate_factor(self._updates)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        return rate

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        self._engine.eval()
        total = torch.zeros((), dtype=torch.float64, device=self._layout.device)
        for batch in batches:
            total += token_loss.loss_of(self._engine, self._prepare(batch)).double()
        return self._layout.sum([float(total)])[0]

    def owned(self) -> Iterator[tuple[Account, torch.Tensor]]:
        for p in self._weights:
            yield "weights", getattr(p, "ds_tensor", p).data
            if hasattr(p, "ds_tensor"):
                yield "temporary", p.data  # gathered, or empty
            for gradient in (p.grad, getattr(p, "grad_accum", None)):
                if gradient is not None:
                    yield "gradients", gradient
        yield from _owned_by(self._engine.optimizer)

    def trained(self) -> Iterator[tuple[str, torch.Tensor]]:
        from deepspeed.utils import safe_get_full_fp32_param

        half = self._setting.compute_dtype == "bfloat16"
        for name, p in self.module.named_parameters():
            if p.requires_grad and half:  # the module has rounded copies
                yield name, safe_get_full_fp32_param(p).detach().clone()
            elif p.requires_grad:
                with _gathered(p, self._setting):
                    value = p.detach().clone()
                yield name, value

    def snapshot(self) -> dict[str, torch.Tensor]:
        return {name: value.to("cpu", copy=True) for name, value in self.trained()}

    def restore(self, snapshot: dict[str, torch.Tensor]) -> None:
        """Put the weights back and build the engine anew: it has no other way to forget its optimizer's state."""
        named = dict(self.module.named_parameters())
        for name, value in snapshot.items():
            with _gathered(named[name], self._setting, written=True), torch.no_grad():
                named[name].copy_(value)
        self._engine.destroy()
        self._updates, self._has_state = 0, False
        self._engine = self._initialize()

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(str(folder), tag="deepspeed", exclude_frozen_parameters=True)

    def load(self, folder: Path, updates: int) -> None:
        self._engine.load_checkpoint(str(folder), tag="deepspeed", load_module_strict=False)
        self._updates, self._has_state = updates, updates > 0

    def close(self) -> None:
        self._engine.destroy()
        released()
        super().close()


def settings(setting: Setting, trained: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a setting; `trained`: the number of trained parameters."""
    stage, offload = setting.options["zero_stage"], setting.options["offload"]
    pinned = setting.device == "cuda"
    zero: dict[str, Any] = {"stage": stage, "contiguous_gradients": True, "overlap_comm": pinned}
    # Its buffer for gradients is as large as a bucket: no larger than all of them, which an adapter has few of.
    zero["reduce_bucket_size"] = zero["allgather_bucket_size"] = max(1, min(BUCKET, trained))
    if stage in (1, 2):
        zero["reduce_scatter"] = True
    if offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pinned}
    if offload == "parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": pinned}
    return {
        "train_micro_batch_size_per_gpu": setting.system.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": setting.learning.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # its own Adam is compiled at first use, for minutes
        "bf16": {"enabled": setting.compute_dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},  # as the other strategies accumulate, whatever is computed in
        "wall_clock_breakdown": False,
    }


def imported(device: torch.device) -> Any:
    """Return the package deepspeed, without its remarks, and on CPU without compiling its shared-memory collectives.

    That takes a minute.
    """
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import deepspeed.ops
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.utils import groups, logger

    if not _groups_before:
        _groups_before.update({name: value for name, value in vars(groups).items() if not name.startswith("__")})

    logger.setLevel(logging.ERROR)
    bf16_optimizer.see_memory_usage = lambda *_, **__: None  # it prints, and sets back the peaks that are measured
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


_groups_before: dict[str, Any] = {}


def released() -> None:
    """Let DeepSpeed forget the process group, which later jobs of the process do not share, and undo its patches.

    Stage 3 puts a linear layer of DeepSpeed's in the place of torch's, for good. That one keeps what any layer
    multiplied, frozen or not: later models of the process took more memory.
    """
    from deepspeed.comm import comm
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patches
    from deepspeed.utils import groups

    comm.cdb = None
    # Numbers of parameters and modules are compared between ranks, of which some may have had more jobs than others.
    # That of modules is counted in a default argument.
    Init.param_id = 0
    for default in DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__ or ():
        default[:] = [0]
    for name in [name for name in vars(groups) if name not in _groups_before and not name.startswith("__")]:
        del vars(groups)[name]
    vars(groups).update(_groups_before)
    if hasattr(Patches, "linear_bk"):
        torch.nn.functional.linear = Patches.linear_bk


def _gathered(parameter: nn.Parameter, setting: Setting, written: bool = False) -> Any:
    """Return the context in which a parameter is whole; what is `written` there to the first rank's is kept."""
    if setting.options["zero_stage"] != 3:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if written else None)


# What a DeepSpeed optimizer keeps beside the state of the one that it wraps: attribute to account.
_HELD: Mapping[str, Account] = {
    "bit16_groups_flat": "weights",
    "single_partition_of_fp32_groups": "optimizer_state",  # the master copies
    "fp32_partitioned_groups_flat": "optimizer_state",
    "averaged_gradients": "gradients",
    # Stage 1 in bfloat16 has an optimizer of its own.
    "bf16_groups_flat": "weights",
    "fp32_groups_flat_partition": "optimizer_state",
    "fp32_groups_gradients_flat": "gradients",
}


def _owned_by(optimizer: Any) -> Iterator[tuple[Account, torch.Tensor]]:
    """Yield the tensors that a DeepSpeed optimizer keeps, with their accounts."""
    for name, account in _HELD.items():
        held = getattr(optimizer, name, None) or []
        for tensors in held.values() if isinstance(held, dict) else held:
            some = tensors if isinstance(tensors, (list, tuple)) else [tensors]
            yield from ((account, t) for t in some if t is not None)
    inner = getattr(optimizer, "optimizer", optimizer)
    for state in inner.state.values():
        yield from (("optimizer_state", v) for v in state.values() if isinstance(v, torch.Tensor))
