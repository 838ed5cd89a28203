"""The global norm of gradients that are spread over ranks in several ways, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from trainers.layout import Layout


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def global_norm(parameters: Iterable[nn.Parameter], layout: Layout, apart: Sequence[nn.Parameter] = ()) -> float:
    """Return the Euclidean norm of all gradients of the model, the same on every rank.

    Each gradient counts once, however many ranks hold it: sums of squares are added over the mesh dimensions that
    shard a gradient, and over the stages of a pipeline. `apart`: parameters of this stage that another one counts.
    """
    skipped = {id(p) for p in apart}
    gradients = [p.grad for p in parameters if p.grad is not None and id(p) not in skipped]
    groups: dict[tuple[str, ...], list[torch.Tensor]] = {}
    processes: dict[tuple[str, ...], list[dist.ProcessGroup]] = {}
    for gradient in gradients:
        over = _sharded_over(gradient)
        key = tuple(str(group.group_name) for group in over)
        groups.setdefault(key, []).append(local(gradient))
        processes[key] = over
    total = torch.zeros((), dtype=torch.float64, device=layout.device)
    for key in sorted(groups):  # every rank reduces in the same order
        square = nn.utils.get_total_norm(groups[key]).to(torch.float64).square().to(layout.device)
        for process_group in processes[key]:
            dist.all_reduce(square, group=process_group)
        total += square
    if layout.plan.pp > 1:
        dist.all_reduce(total, group=layout.mesh["pp"].get_group())
    return float(total.sqrt())


def clip(parameters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Scale gradients in place so that their global norm, `norm`, is at most `limit`; 0 switches clipping off.

    The factor is torch's: limit / (norm + 1e-6), never above 1. A norm that is not finite leaves NaN, as there.
    """
    factor = limit / (norm + 1e-6)
    if limit <= 0 or factor >= 1:
        return
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def _sharded_over(gradient: torch.Tensor) -> list[dist.ProcessGroup]:
    if not isinstance(gradient, DTensor):
        return []
    assert not any(isinstance(p, Partial) for p in gradient.placements), "a gradient is still to be summed"
    mesh = gradient.device_mesh
    # Not isinstance(p, Shard): what fsdp2 makes of a shard over tp is a class of its own.
    return [mesh.get_group(i) for i, p in enumerate(gradient.placements) if not isinstance(p, Replicate)]
