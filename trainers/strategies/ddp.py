"""Distributed data parallel: every rank holds the whole model, gradients are summed over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trainers.strategies import STRATEGIES, Parameters, Setting, Share, Strategy

if TYPE_CHECKING:
    from torch import nn

    from trainers.layout import Layout


class DDP(Strategy):
    """torch's DistributedDataParallel where every parameter is a plain tensor and used in its own dtype.

    Beside other degrees, and where compute is in half precision beside float32 weights, it is torch's composable
    `replicate`, which shares FSDP2's mechanism: the same casts as fsdp2, so the two differ in layout alone.
    """

    def before_memory(self, setting: Setting) -> bool:
        return not _plain(setting)

    def apply(self, module: nn.Module, setting: Setting, layout: Layout) -> nn.Module:
        if not _plain(setting):
            from trainers.strategies.fsdp2 import replicated

            return replicated(module, setting, layout)
        if layout.world.size == 1:
            return module
        from torch.nn.parallel import DistributedDataParallel

        # Not static_graph: with no_sync in the first window it fails an internal assertion (torch 2.13).
        # Buckets as gradients: one copy of the gradients, not two. Buffers are constants, the same on every rank.
        device_ids = [layout.device.index] if layout.device.type == "cuda" else None
        return DistributedDataParallel(
            module, device_ids=device_ids, gradient_as_bucket_view=True, broadcast_buffers=False
        )

    @contextmanager
    def accumulating(self, wrapped: nn.Module, setting: Setting, last: bool) -> Iterator[None]:
        from torch.nn.parallel import DistributedDataParallel

        if isinstance(wrapped, DistributedDataParallel) and not last:
            with wrapped.no_sync():
                yield
            return
        set_sync = getattr(wrapped, "set_requires_gradient_sync", None)
        if set_sync is not None:
            set_sync(last)
        yield

    def keeps_gradients(self, setting: Setting) -> bool:
        # Without them the micro steps before the last would make gradients of their own, beside the buckets.
        return _plain(setting) and setting.plan.world > 1

    def share(self, setting: Setting, whole: Parameters, accumulation: int) -> Share:
        if _plain(setting):
            return super().share(setting, whole, accumulation)
        from trainers.strategies.fsdp2 import mixed_share

        return mixed_share(setting, whole, accumulation, ranks=1, reshard=False, sync=False)

    def starts(self, setting: Setting, whole: Parameters) -> float:
        if _plain(setting):
            return 0.0
        from trainers.strategies.fsdp2 import GROUP

        return GROUP * (whole.blocks + 1)

    def gradient_divisor(self, setting: Setting) -> int:
        return setting.plan.dp if _plain(setting) else 1


def _plain(setting: Setting) -> bool:
    plan = setting.plan
    return plan.tp == plan.pp == plan.cp == 1 and not setting.half


STRATEGIES.register("ddp")(DDP())
