"""From a configuration to a model that can be trained on this rank: the order in which things are applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainers import activation_checkpointing, model
from trainers.adapter import apply_adapter, bare
from trainers.layout import Layout
from trainers.strategies import DIMENSIONS, STRATEGIES, Setting
from trainers.weights import Weights, fill

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Built:
    """A divided model. `model` has all parameters of this rank under the checkpoint's names; `parts` are what runs."""

    model: nn.Module
    parts: tuple[nn.Module, ...]  # the wrapped model, or this rank's wrapped stages of a pipeline


def build(
    name: str,
    revision: str | None,
    setting: Setting,
    layout: Layout,
    prepare: Callable[[nn.Module], None] | None = None,
    weights: Weights | None = None,
) -> Built:
    """Build, divide and fill the model. Each rank reads the weights that it holds, and no others.

    `prepare` is called with the bare model first: a proof in float64 needs other norms than transformers'. `weights`:
    where they are read from; None: the model's own.
    """
    system, dtype = setting.system, DTYPES[setting.weight_dtype]
    strategy = STRATEGIES[system.strategy]
    if weights is None and setting.shape is not None:
        weights = Weights.of(name, revision)

    # 1. The model, without memory where its weights can be read by name.
    base = (
        model.skeleton(name, revision, dtype, system.attn_implementation)
        if weights is not None
        else model.whole(name, revision, dtype, system.attn_implementation, layout.device)
    )
    if prepare is not None:
        prepare(base)
    # 2. The adapter; what it freezes stays frozen.
    adapted = apply_adapter(base, setting.learning)
    adapted.train()
    # 3. Tensor, then context parallelism.
    for degree in ("tp", "cp"):
        if getattr(system, degree) > 1:
            DIMENSIONS[degree].apply(adapted, setting, layout)
    # 4. Recomputation, which must see the blocks before they are wrapped.
    activation_checkpointing.apply(adapted, system.activation_checkpointing, **strategy.recomputation(setting))
    # 5. The stages of a pipeline that are this rank's.
    whole, parts = split(adapted, setting, layout)
    # 6. The data-parallel method around each part; memory and weights after it, or before where it needs them.
    tied = is_tied(whole)
    if not strategy.before_memory(setting):
        give_memory(whole, weights, setting, layout)
    wrapped = tuple(strategy.apply(part, setting, layout) for part in parts)
    if strategy.before_memory(setting):
        give_memory(whole, weights, setting, layout)
    assert is_tied(whole) == tied, "the output head is no longer tied to the embedding"
    return Built(whole, wrapped)


def give_memory(module: nn.Module, weights: Weights | None, setting: Setting, layout: Layout) -> None:
    """Allocate what this rank holds of a module, and copy the weights into it; an adapter's first ones in any case."""
    if weights is not None:
        weights.begin()
        offloaded = setting.options.get("offload") == "parameters"
        materialize(module, torch.device("cpu") if offloaded else layout.device)
    fill(module, weights, setting.learning.seed)


def split(adapted: nn.Module, setting: Setting, layout: Layout) -> tuple[nn.Module, tuple[nn.Module, ...]]:
    """Return this rank's share of the model: as one module, and as the parts that run one after another."""
    if setting.plan.pp == 1:
        return adapted, (adapted,)
    from trainers.stages import stages

    return stages(adapted, setting, layout)


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give a module that is on the meta device memory, and make again the buffers that no checkpoint holds.

    Not `to_empty`: it unties what is tied, and cannot exchange the tensors of a simulation.
    """
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, old in part.named_parameters(recurse=False):
            if id(old) not in made:
                made[id(old)] = nn.Parameter(torch.empty_like(old, device=device), old.requires_grad)
            setattr(part, name, made[id(old)])
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = torch.empty_like(buffer, device=device)
    for part in module.modules():
        if hasattr(part, "inv_freq") and hasattr(part, "config"):  # rotary embedding: garbage after to_empty
            kind: Any = type(part)
            for buffer, value in kind(part.config).named_buffers():
                setattr(part, buffer, nn.Buffer(value.to(device), persistent=False))


def tie(module: nn.Module) -> None:
    """Make the embedding's weight the output head's too."""
    inner: Any = bare(module)
    inner.lm_head.weight = inner.model.embed_tokens.weight


def is_tied(module: nn.Module) -> bool:
    """Tell whether output head and embedding are one tensor."""
    inner: Any = bare(module)
    head = getattr(getattr(inner, "lm_head", None), "weight", None)
    embedding = getattr(getattr(getattr(inner, "model", None), "embed_tokens", None), "weight", None)
    return head is not None and head is embedding
