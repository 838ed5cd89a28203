"""What the backward pass recomputes instead of keeping, and what it keeps in host memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from trainers.adapter import bare
from trainers.regions import RECOMPUTE, region

_aten = torch.ops.aten
ATTENTION = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}
PRODUCTS = {_aten.mm.default, _aten.addmm.default}


# Never reentrant: that breaks frozen inputs and pipelines. Random state is kept: dropout draws the same mask again.
OPTIONS: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}


def apply(model: nn.Module, mode: str, **more: Any) -> None:
    """Switch recomputation on in every block: `full` keeps a block's input only, `selective` more (see below).

    `more`: options of torch.utils.checkpoint.
    """
    if mode == "none":
        return
    options = {**OPTIONS, "context_fn": partial(contexts, mode), **more}
    base: Any = bare(model)
    base.activation_checkpointing_enable(activation_checkpointing_kwargs=options)


def contexts(mode: str) -> tuple[Any, Any]:
    """Return the contexts of a block's forward pass and of its recomputation, which is a region of its own."""
    first, again = selective_contexts() if mode == "selective" else (nullcontext(), nullcontext())
    return first, recomputing(again)


@contextmanager
def recomputing(inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter another context in the region of recomputation."""
    with region(RECOMPUTE), inner:
        yield


def selective_contexts() -> tuple[Any, Any]:
    """Return the contexts of `selective`.

    Attention and every second matrix product are kept: what is dear to compute and, for the products, half of what
    is dear to keep (the policy that torchtitan calls selective op).
    """
    seen: Counter[bool] = Counter()

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        kept = op in ATTENTION
        if op in PRODUCTS:
            seen[context.is_recompute] += 1
            kept = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts


def offloaded(on: bool, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a forward pass whose saved activations go to host memory."""
    return torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda") if on else nullcontext()
