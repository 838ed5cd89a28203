"""Context parallelism: the tokens of every sequence are divided among ranks, for sequences too long for one.

Only attention looks at other tokens, so only attention is changed. Every rank holds all weights, or its shards of them,
and finds the gradient of its tokens: for the data-parallel method these ranks are more ranks with other data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainers.strategies import DIMENSIONS, Dimension, Option, Setting, Traffic

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainers.layout import Layout
    from trainers.shape import ModelShape


class Context(Dimension):
    """The three ways of trainers.context_attention."""

    options = (
        Option(
            "cp_method",
            str,
            "ulysses",
            "how attention sees the tokens of other ranks: ulysses trades tokens for heads, allgather gathers keys and "
            "values, ring passes them on (CUDA only)",
            ("ulysses", "allgather", "ring"),
        ),
    )

    def validate(self, setting: Setting) -> list[str]:
        system, shape, cp = setting.system, setting.shape, setting.plan.cp
        rules = []
        if system.attn_implementation != "sdpa":
            rules.append(
                f"attn_implementation={system.attn_implementation} beside cp={cp}: cp replaces the attention, which "
                "must be sdpa"
            )
        if system.strategy == "zero":
            rules.append(f"cp={cp} beside strategy=zero: cp needs strategy=ddp or fsdp2")
        if method(setting) == "ring" and setting.device != "cuda":
            rules.append(f"cp_method=ring on {setting.device}: only CUDA has it, use ulysses or allgather")
        if shape is not None and shape.sliding_window is not None:
            rules.append(
                f"cp={cp}: {shape.name} attends to a window of {shape.sliding_window} tokens, cp needs full attention"
            )
        if method(setting) == "ulysses" and shape is not None:
            rules += undivided_heads(shape.num_attention_heads, setting.plan.tp, cp)
        return rules

    def traffic(self, setting: Setting, shape: ModelShape, tokens: float) -> Traffic:
        # Ulysses exchanges queries, keys, values and what comes out, all-gather keys and values of all ranks; and back.
        plan = setting.plan
        exchanged = 2 * shape.query_size + 2 * shape.key_value_size
        gathered = 2 * shape.key_value_size * plan.cp
        numbers = exchanged if method(setting) == "ulysses" else gathered
        blocks = shape.num_hidden_layers / plan.pp
        sent = 2 * (plan.cp - 1) / plan.cp * blocks * tokens * numbers / plan.tp * setting.width
        return Traffic(sent, plan.cp, overlapped=False, stride=plan.tp, rings=4 * blocks * setting.micro_batches)

    def knows_float64(self, setting: Setting) -> bool:
        return method(setting) != "ring"  # whose kernels have none

    def multiple(self, setting: Setting) -> int:
        return setting.plan.cp * (1 if method(setting) == "ulysses" else 2)

    def apply(self, model: nn.Module, setting: Setting, layout: Layout) -> None:
        from trainers.context_attention import install

        install(model, method(setting), layout.mesh["cp"])

    def shard_batch(self, batch: dict[str, torch.Tensor], setting: Setting, layout: Layout) -> dict[str, torch.Tensor]:
        from trainers.context_attention import part

        rank, size = layout.at["cp"], setting.plan.cp
        return {name: part(tokens, rank, size, method(setting)) for name, tokens in batch.items()}


def method(setting: Setting) -> str:
    """Return the method that a setting names, or the default."""
    return str(setting.options.get("cp_method") or "ulysses")


def undivided_heads(heads: int, tp: int, cp: int) -> list[str]:
    """Return the rule that ulysses breaks where cp does not share out the heads that tp leaves on a rank."""
    if heads % (tp * cp) == 0:
        return []
    allowed = [str(c) for c in range(1, heads + 1) if heads % (tp * c) == 0]
    beside = f" beside tp={tp}" if tp > 1 else ""
    return [
        f"cp={cp}{beside}: cp_method=ulysses shares out {heads} attention heads, so cp must be one of "
        f"{', '.join(allowed)}; allgather takes any"
        if allowed
        else f"cp={cp}{beside}: tp does not divide {heads} attention heads, which cp_method=ulysses shares out further"
    ]


DIMENSIONS.register("cp")(Context())
