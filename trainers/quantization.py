"""Frozen base weights in 4 bits, for QLoRA: NF4 with doubly quantized scales, packed and multiplied by bitsandbytes.

Not bitsandbytes' own layer: it keeps the scales on a class of parameter that wrappers replace. Here the packed weight
is a plain parameter, uint8 [in · out / 2, 1], which can be sharded, gathered and replaced like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

BLOCK = 64  # weights that share a scale, as in the paper (arXiv 2305.14314)


class NF4Linear(nn.Linear):
    """A linear layer whose weight is packed; `pack` gives it its scales, and the packed weight to copy into it."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.compute_dtype = linear.weight.dtype
        self.scales: Any = None
        self.bias = linear.bias
        size = -(-linear.weight.numel() // 2)
        packed = torch.empty(size, 1, dtype=torch.uint8, device=linear.weight.device)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Quantize a whole weight [out, in]; keep its scales, return it packed, uint8 [in · out / 2, 1].

        As one row: bitsandbytes 0.50 unpacks matrices whose rows are not whole blocks wrongly, on CPUs with AVX-512.
        """
        from bitsandbytes.functional import quantize_4bit

        packed: torch.Tensor
        packed, self.scales = quantize_4bit(
            weight.to(self.compute_dtype).flatten(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
        )
        return packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.scales is not None, "the weight has not been packed"
        self.scales.to(x.device)  # a weight that is kept on the host was packed there
        product: torch.Tensor = _Product.apply(x, self.weight, self.bias, self.scales)
        return product


class _Product(torch.autograd.Function):
    """The product of x and a frozen packed weight, unpacked for it, as bitsandbytes trains.

    bitsandbytes' own function keeps a view of the weight, and so the weights that ZeRO has gathered; this one saves the
    weight as torch's products do, so that whoever shards it can free it between the passes. Its fused products, which
    it takes where no gradient is asked for, round float32 to bfloat16 on processors that multiply it.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scales: Any) -> Any:
        ctx.save_for_backward(weight)
        ctx.scales, ctx.inputs = scales, x.shape[-1]
        return nn.functional.linear(x, unpacked(weight, scales, ctx.inputs).to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = gradients
        (weight,) = ctx.saved_tensors
        return gradient @ unpacked(weight, ctx.scales, ctx.inputs).to(gradient.dtype), None, None, None


def unpacked(weight: torch.Tensor, scales: Any, inputs: int) -> torch.Tensor:
    """Return the weight [out, in] that a packed one stands for, in the dtype that it was packed from."""
    from bitsandbytes.functional import dequantize_4bit

    whole: torch.Tensor = dequantize_4bit(weight, scales)
    return whole.view(-1, inputs)


@torch.no_grad()
def quantize(model: nn.Module) -> None:
    """Replace every linear layer of a model but its output head; pack weights that are there already."""
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or name.endswith("lm_head"):
            continue
        packed = NF4Linear(module)
        if not module.weight.is_meta:
            packed.weight.copy_(packed.pack(module.weight))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, packed)


def packed_layers(module: nn.Module) -> dict[str, NF4Linear]:
    """Return the packed layers below a module, by the name of their weight."""
    return {f"{name}.weight": m for name, m in module.named_modules() if isinstance(m, NF4Linear)}


def scales(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold the scales of packed weights; every rank has them whole."""
    for layer in packed_layers(module).values():
        state = layer.scales
        while state is not None:  # the scales are quantized in turn
            yield from (t for t in (state.absmax, state.offset) if t is not None)
            state = state.state2
