"""Attention over a sequence whose tokens are divided among ranks: the three ways, as transformers calls them.

Each is registered with transformers under the name of its method, and is a pure function: it finds the ranks that it
talks to in the attention layer that calls it, so that models of one process can be divided differently. Shapes are
[rows, heads, tokens, head_dim] as in transformers, whose attention returns [rows, tokens, heads, head_dim]. Heads are
counted in the tensors: under tensor parallelism a rank holds fewer than the configuration says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import _disable_current_modes

from trainers.errors import UserError
from trainers.model import blocks

States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value."""

PREFIX = "context_"
"""Names that are registered with transformers start with it."""


def install(model: nn.Module, method: str, mesh: DeviceMesh) -> None:
    """Let a model's attention layers work on parts of sequences that the ranks of a one-dimensional mesh share."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = PREFIX + method
    AttentionInterface.register(name, FUNCTIONS[method])
    AttentionMaskInterface.register(name, no_mask)
    for block in blocks(model):
        layer: Any = block.self_attn
        if getattr(layer, "sliding_window", None) is not None:
            raise UserError(
                f"cp={mesh.size()}: layers of this model attend to a sliding window, cp needs full attention"
            )
        layer.config._attn_implementation = name
        layer.context_mesh = mesh
    if method == "ring":
        enable_ring()


def no_mask(*_: Any, **__: Any) -> None:
    """Make no mask: attention is causal, and rows are padded on the right, where no token looks."""


def part(tokens: torch.Tensor, rank: int, size: int, method: str) -> torch.Tensor:
    """Return a rank's part of what each token has: [rows, tokens] to [rows, tokens / size].

    For ulysses the tokens of a part follow each other. Otherwise a part is one chunk from the front and its mirror
    image from the back, so that each rank's queries see equally many keys.
    """
    if method == "ulysses":
        return tokens.chunk(size, dim=1)[rank].contiguous()
    chunks = tokens.chunk(2 * size, dim=1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=1)


def ulysses(module: nn.Module, states: States, options: Mapping[str, Any]) -> torch.Tensor:
    """Trade tokens for heads: every rank computes its share of the heads for whole sequences, then trades back.

    Key and value heads that are too few to share out are repeated, as often as is needed and no more. A query's head
    then still meets its own: contiguous heads go to a rank, in the order of the groups.
    """
    (query, key, value), (group, size) = states, _ranks(module)
    repeats = math.lcm(key.shape[1], size) // key.shape[1]
    heads = [query, *(t.repeat_interleave(repeats, dim=1) for t in (key, value))]
    # One exchange for all three: [rows, heads, tokens / size, dim] to [size, rows, heads / size, tokens / size, dim].
    shared = torch.cat([t.unflatten(1, (size, -1)) for t in heads], dim=2).movedim(1, 0)
    gathered = _Exchange.apply(shared, group).movedim(0, 2).flatten(2, 3)
    q, k, v = gathered.split([t.shape[1] // size for t in heads], dim=1)
    out = _attend(q, k, v, options)
    back = _Exchange.apply(out.unflatten(2, (size, -1)).movedim(2, 0), group)  # [size, rows, heads / size, ...]
    return cast(torch.Tensor, back).permute(1, 3, 0, 2, 4).flatten(2, 3)


def allgather(module: nn.Module, states: States, options: Mapping[str, Any]) -> torch.Tensor:
    """Gather the keys and values of all tokens; each of the two chunks of queries meets those up to its own end.

    No number of heads is required. Keys that a chunk cannot see are cut off rather than masked: that is what makes
    the parts of `part` equal work.
    """
    (query, key, value), (group, size) = states, _ranks(module)
    rank, length = dist.get_rank(group), query.shape[2] // 2
    gathered = _Gather.apply(torch.stack([key, value]), group).unflatten(0, (size, 2))
    front, mirrored = gathered.chunk(2, dim=4)  # each [size, 2, rows, heads, length, dim]
    k, v = torch.cat([front, mirrored.flip(0)]).movedim(0, 3).flatten(3, 4)  # tokens in their own order
    outs = [
        _attend(chunk, k[:, :, : seen * length], v[:, :, : seen * length], options)
        for chunk, seen in zip(query.chunk(2, dim=2), (rank + 1, 2 * size - rank), strict=True)
    ]
    return torch.cat(outs, dim=2).transpose(1, 2).contiguous()


def ring(module: nn.Module, states: States, options: Mapping[str, Any]) -> torch.Tensor:
    """Let keys and values travel from rank to rank: torch's context parallelism, which only CUDA kernels have.

    torch runs the ring where attention meets tensors that are sharded over tokens; its parts are those of `part`.
    Key and value heads are repeated, since the ring is not specified for fewer than there are query heads. Of torch's
    kernels it has no plain one, which would otherwise be taken for float64 and fail for another reason.
    """
    from torch.distributed.tensor import DTensor, Shard
    from torch.nn.attention import SDPBackend, sdpa_kernel

    (query, key, value), mesh = states, cast(DeviceMesh, module.context_mesh)
    repeats = query.shape[1] // key.shape[1]
    heads = (query, *(t.repeat_interleave(repeats, dim=1) for t in (key, value)))
    q, k, v = (DTensor.from_local(t.contiguous(), mesh, [Shard(2)], run_check=False) for t in heads)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
        out: Any = scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    return cast(torch.Tensor, out.to_local()).transpose(1, 2).contiguous()


def enable_ring() -> None:
    """Let torch run attention over sharded tokens as a ring, from now on; other attention is not affected.

    torch's `context_parallel` does this for the length of a context, and replaces the attention of every model in the
    process meanwhile. Its parts are used here instead, so that only the layers which ask for a ring get one.
    """
    from torch.distributed.tensor.experimental import _attention

    _attention._cp_options.enable_load_balance = True  # parts mirror front and back
    _attention.set_rotate_method("alltoall")  # the default gathers all keys and values, as `allgather` does
    _attention._enable_context_parallel_dispatcher()


def as_called(attention: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, None]]:
    """Return an attention function as transformers calls it: with a mask, which is None, and keywords for others."""

    def called(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        return attention(module, (query, key, value), {"dropout_p": dropout, "scale": scaling}), None

    return called


FUNCTIONS = {
    name: as_called(method) for name, method in (("ulysses", ulysses), ("allgather", allgather), ("ring", ring))
}


def _ranks(module: nn.Module) -> tuple[ProcessGroup, int]:
    mesh: Any = module.context_mesh
    return mesh.get_group(), mesh.size()


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """Attend causally; the last query sees the last key."""
    options = {**options, "enable_gqa": q.shape[1] != k.shape[1]}
    if q.shape[2] == k.shape[2]:
        return scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    # A bias of torch's rather than a mask, so that the flash kernel stays open. It is a tensor of a class of its own,
    # which cannot be made while selective recomputation looks on.
    with _disable_current_modes():
        bias = causal_lower_right(q.shape[2], k.shape[2])
    return scaled_dot_product_attention(q, k, v, attn_mask=bias, **options)


class _Exchange(torch.autograd.Function):
    """Send slice i of the first dimension, as long as the group, to rank i; slice i of the result is rank i's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _exchanged(gradient, ctx.group), None


def _exchanged(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    out = x.new_empty(x.shape)  # not empty_like: it keeps strides, and collectives fill memory regardless of them
    dist.all_to_all_single(out, x.contiguous(), group=group)
    return out


class _Gather(torch.autograd.Function):
    """Join the tensors of all ranks along the first dimension; a rank's gradient is what all ranks found, summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        out = gradient.new_empty((gradient.shape[0] // ctx.group.size(), *gradient.shape[1:]))
        dist.reduce_scatter_single(out, gradient.contiguous(), group=ctx.group)
        return out, None
