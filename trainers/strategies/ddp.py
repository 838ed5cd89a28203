"""Distributed data parallel: every rank holds the whole model, gradients are averaged over ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from trainers.plan import Plan
from trainers.strategies import STRATEGIES, Strategy

if TYPE_CHECKING:
    from torch import nn

    from trainers.config import SystemConfig
    from trainers.ranks import World


class DDP(Strategy):
    """torch's DistributedDataParallel; the bare model where there is one rank."""

    def plan(self, system: SystemConfig) -> Plan:
        return Plan(dp_replicate=system.num_workers)

    def apply(self, model: nn.Module, world: World) -> nn.Module:
        if world.size == 1:
            return model
        from torch.nn.parallel import DistributedDataParallel

        # Not static_graph: with no_sync in the first window it fails an internal assertion (torch 2.13).
        # Buckets as gradients: one copy of the gradients, not two. Buffers are constants, the same on every rank.
        device_ids = [world.device.index] if world.device.type == "cuda" else None
        return DistributedDataParallel(
            model, device_ids=device_ids, gradient_as_bucket_view=True, broadcast_buffers=False
        )

    def accumulating(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        from torch.nn.parallel import DistributedDataParallel

        return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext()

    def gradient_divisor(self, plan: Plan) -> int:
        return plan.dp


STRATEGIES.register("ddp")(DDP())
