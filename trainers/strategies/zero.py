"""ZeRO: optimizer state (stage 1), gradients too (2), weights too (3) divided over data-parallel ranks."""

from __future__ import annotations

import importlib.util
import math
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainers import deepspeed_memory
from trainers.deepspeed_memory import BUCKET, LIVE
from trainers.plan import Plan
from trainers.strategies import STRATEGIES, Option, Parameters, Setting, Share, Strategy, Traffic

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainers.config import SystemConfig
    from trainers.engine import Engine
    from trainers.layout import Layout


MODULES = 9
"""Of a block, that have weights: stage 3 gathers for one after another."""
HOOKS = 80
"""Operations that the host starts for each of these in a micro batch; as measured, see fsdp2's."""


class Zero(Strategy):
    """DeepSpeed, or for stage 1 torch's ZeroRedundancyOptimizer over DistributedDataParallel."""

    options = (
        Option("zero_stage", int, 1, "1: optimizer state is divided; 2: gradients too; 3: weights too", (1, 2, 3)),
        Option("zero_engine", str, "deepspeed", "torch: stage 1 alone", ("deepspeed", "torch")),
        Option("offload", str, "none", "what is kept in host memory", ("none", "optimizer", "parameters")),
    )

    def plan(self, system: SystemConfig) -> Plan:
        # Ranks hold different shards of the state, and different samples.
        return Plan.of(system.num_workers, tp=system.tp, pp=system.pp, cp=system.cp, dp_replicate=1)

    def validate(self, setting: Setting) -> list[str]:
        stage, engine, offload = (setting.options[o.name] for o in self.options)
        rules = []  # beside tp, pp and cp it is illegal by their rules
        if engine == "torch":
            if stage != 1:
                rules.append(f"zero_stage={stage}: zero_engine=torch divides the optimizer state alone, stage 1")
            if offload != "none":
                rules.append(f"offload={offload}: zero_engine=torch keeps all on the device; use deepspeed")
            if setting.half:
                rules.append("zero_engine=torch trains weights in the dtype of compute: not bfloat16, use deepspeed")
        elif importlib.util.find_spec("deepspeed") is None:
            rules.append("zero_engine=deepspeed needs the package deepspeed: pip install deepspeed")
        if engine == "deepspeed" and offload == "parameters" and stage != 3:
            rules.append(f"offload=parameters: only zero_stage=3 divides weights, not {stage}; use offload=optimizer")
        if engine == "deepspeed" and stage == 3 and setting.system.activation_checkpointing == "selective":
            rules.append(
                "zero_stage=3 with activation_checkpointing=selective: torch would replay DeepSpeed's gathers from a "
                "cache; use full or none"
            )
        return rules

    def before_memory(self, setting: Setting) -> bool:
        return False

    def recomputation(self, setting: Setting) -> dict[str, Any]:
        # The check looks at frozen weights when stage 3 has let go of them again (DeepSpeed 0.19.8); they are gathered
        # once more before they are used.
        return {"determinism_check": "none"} if setting.options["zero_stage"] == 3 else {}

    def knows_float64(self, setting: Setting) -> bool:
        return setting.options["zero_engine"] == "torch"

    def engine(self, setting: Setting) -> type[Engine]:
        if setting.options["zero_engine"] == "torch":
            from trainers.torch_zero_engine import TorchZeroEngine

            return TorchZeroEngine
        from trainers.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine

    def apply(self, module: nn.Module, setting: Setting, layout: Layout) -> nn.Module:
        if setting.options["zero_engine"] == "deepspeed":
            return module  # its engine wraps the model
        return STRATEGIES["ddp"].apply(module, setting, layout)

    def accumulating(self, wrapped: nn.Module, setting: Setting, last: bool) -> AbstractContextManager[None]:
        return STRATEGIES["ddp"].accumulating(wrapped, setting, last)

    def keeps_gradients(self, setting: Setting) -> bool:
        return setting.options["zero_engine"] == "torch" and STRATEGIES["ddp"].keeps_gradients(setting)

    def gradient_divisor(self, setting: Setting) -> int:
        return setting.plan.dp

    def share(self, setting: Setting, whole: Parameters, accumulation: int) -> Share:
        if setting.options["zero_engine"] == "torch":
            plain = super().share(setting, whole, accumulation)
            return replace(plain, optimizer_state=plain.optimizer_state / setting.plan.dp)
        return deepspeed_memory.share(setting, whole, accumulation)

    def traffic(self, setting: Setting, whole: Parameters, micro_batches: int) -> list[Traffic]:
        stage = int(setting.options["zero_stage"])
        if setting.options["zero_engine"] == "torch":
            (plain,) = super().traffic(setting, whole, micro_batches)  # and each rank's part of the new weights
            return [replace(plain, bytes=plain.bytes + self.ring(setting) * 4 * whole.trained)]
        sums = 1 if stage == 1 else micro_batches
        # Stage 1 in bfloat16 sums after the last backward pass; 1 and 2 exchange new weights after the optimizer.
        beside = not (stage == 1 and setting.half)
        size, rings = self.ring(setting) * sums * 4 * whole.trained, sums * math.ceil(whole.trained / BUCKET)
        reducing = Traffic(size, setting.plan.dp, overlapped=beside, rings=rings)
        times = (1 if whole.in_use <= LIVE * whole.compute else 2) * micro_batches if stage == 3 else 1
        gathered = whole.in_use if stage == 3 else whole.compute * whole.trained
        rings = MODULES * whole.blocks * times if stage == 3 else 1
        sent = self.ring(setting) * times * gathered
        return [reducing, Traffic(sent, setting.plan.dp, overlapped=stage == 3, rings=rings)]

    def starts(self, setting: Setting, whole: Parameters) -> float:
        return HOOKS * MODULES * whole.blocks if setting.options["zero_stage"] == 3 else 0.0

    def part(self, setting: Setting) -> float:
        return 1 / setting.plan.dp

    def to_host(self, setting: Setting, whole: Parameters, micro_batches: int) -> float:
        # Gradients go down and new weights come up; in stage 3 weights come up for every pass.
        offload, ranks = setting.options["offload"], setting.plan.dp
        if offload == "none":
            return 0.0
        state = (4 + whole.compute) * whole.trained / ranks
        return state + (2 * micro_batches * whole.in_use / ranks if offload == "parameters" else 0.0)

    def optimizer(
        self, groups: list[dict[str, Any]], layout: Layout, cls: type[torch.optim.Optimizer], **options: Any
    ) -> torch.optim.Optimizer:
        if layout.world.size == 1:
            return cls(groups, **options)
        from torch.distributed.optim import ZeroRedundancyOptimizer

        parameters = [p for group in groups for p in group["params"]]
        return ZeroRedundancyOptimizer(parameters, cls, **options)


STRATEGIES.register("zero")(Zero())
