"""Tensor parallelism: the ranks of a tp group hold slices of every matrix, and each holds a part of every sequence.

Between matrix products an activation [rows, tokens, hidden] is divided over the tokens (sequence parallelism): norms
and residuals cost each rank 1/tp of the memory, and the two all-reduces of a block become an all-gather and a
reduce-scatter each, which move as much. Embedding and output head are divided over the vocabulary, and so are the
logits [rows, tokens, vocabulary], the largest activation of all; the loss is computed on them as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainers.strategies import DIMENSIONS, Dimension, Setting, Traffic

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    from trainers.layout import Layout
    from trainers.shape import ModelShape

Styles = Iterator[tuple[str, "ParallelStyle"]]
"""Names of modules below some other, and how each is divided."""

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
"""Linear layers whose outputs are divided: whole heads, and the same columns of gate and up."""
ROWS = ("self_attn.o_proj", "mlp.down_proj")
"""Linear layers whose inputs are divided: what the former put out."""
NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


DTENSOR = 10.0
"""How many times as long an operation on divided tensors takes to start; as measured, see fsdp2's."""


class Tensor(Dimension):
    """A plan of DTensor styles, over the `tp` dimension of the mesh."""

    def validate(self, setting: Setting) -> list[str]:
        tp, rules = setting.plan.tp, []
        if setting.system.strategy == "zero":
            rules.append(f"tp={tp} with strategy=zero: DeepSpeed's ZeRO is data parallel alone; use ddp or fsdp2")
        return rules + (_indivisible(tp, setting.shape) if setting.shape is not None else [])

    def slows(self, setting: Setting) -> float:
        return DTENSOR

    def traffic(self, setting: Setting, shape: ModelShape, tokens: float) -> Traffic:
        # A block gathers its tokens and scatters its sums twice, forward and backward, and once more to recompute.
        passes = 2 if setting.system.activation_checkpointing == "none" else 3
        blocks = shape.num_hidden_layers / setting.plan.pp
        tp = setting.plan.tp
        sent = (tp - 1) / tp * 4 * passes * blocks * tokens * shape.hidden_size * setting.width
        return Traffic(sent, tp, overlapped=False, rings=4 * passes * blocks * setting.micro_batches)

    def multiple(self, setting: Setting) -> int:
        return setting.plan.tp * setting.plan.cp  # each part of a sequence that context parallelism makes is divided

    def apply(self, model: nn.Module, setting: Setting, layout: Layout) -> None:
        """Make the parameters DTensors over tp, and let each module convert what it takes and gives.

        Nothing is sent: the weights have no memory yet, or every rank has them all.
        """
        from torch.distributed.tensor.parallel import parallelize_module

        from trainers.adapter import bare
        from trainers.build import is_tied, tie

        inner: Any = bare(model)
        tied = is_tied(inner)
        frozen = {name for name, parameter in inner.named_parameters() if not parameter.requires_grad}
        parallelize_module(inner, layout.mesh["tp"], dict(styles(inner)), src_data_rank=None)
        for name, parameter in inner.named_parameters():  # not every style keeps it
            parameter.requires_grad_(name not in frozen)
        if tied:  # each style made a parameter of its own; both are divided over the vocabulary
            tie(inner)


def _indivisible(tp: int, shape: ModelShape) -> list[str]:
    """Return a rule for each number of the model that tp does not divide."""
    counts = {
        "attention heads": shape.num_attention_heads,
        "key and value heads": shape.num_key_value_heads,
        "intermediate columns": shape.intermediate_size,
        "rows of vocabulary": shape.vocab_size,
    }
    common = math.gcd(*counts.values())
    allowed = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
    return [
        f"tp={tp} does not divide the model's {count} {what}; tp can be {allowed}"
        for what, count in counts.items()
        if count % tp
    ]


def styles(model: Any) -> Styles:
    """Yield how each module of a transformers model is divided. Activations between modules: DTensors, Shard(1)."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel

    yield "model.embed_tokens", by_vocabulary()
    for i, block in enumerate(model.model.layers):
        for name, style in (*_attention_and_mlp(block), *_norms(block)):
            yield f"model.layers.{i}.{name}", style
    yield "model.norm", SequenceParallel()
    # The logits stay divided over the vocabulary: the loss is too.
    yield "lm_head", ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)


def _attention_and_mlp(block: nn.Module) -> Styles:
    """Yield how a block's matrix products are divided, and where its tokens [rows, tokens, hidden] are gathered."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import PrepareModuleInput

    yield (
        "self_attn",
        PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
    )
    yield "mlp", PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for name in (*COLUMNS, *ROWS):
        yield from _linear(name, adapted=hasattr(block.get_submodule(name), "base_layer"))


def _linear(name: str, adapted: bool) -> Styles:
    """Yield how a linear layer is divided, and its adapter's A [rank, in] and B [out, rank] with it.

    Of the adapter what touches the layer's divided side is divided alike; the other matrix, whole on every rank, is
    small. After a divided A the sum over ranks is of rank numbers a token, and divides the tokens at once: B gives
    what the layer gives.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    columns = name in COLUMNS
    divided = ColwiseParallel() if columns else RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    yield f"{name}.base_layer" if adapted else name, divided
    if adapted:
        yield f"{name}.lora_A.default", whole_on_every_rank() if columns else divided
        yield f"{name}.lora_B.default", divided if columns else SequenceParallel()


def _norms(block: nn.Module) -> Styles:
    """Yield how norms are divided: weights whole on every rank, inputs over the tokens, or over the heads.

    As DTensors their gradients are summed over tp. On queries and keys [rows, tokens, heads, head_dim] too: each rank
    has its own heads.
    """
    from torch.distributed.tensor.parallel import SequenceParallel

    for name in NORMS:
        yield name, SequenceParallel()
    present = dict(block.named_modules())
    for name in HEAD_NORMS:
        if name in present:
            yield name, SequenceParallel(sequence_dim=2, use_local_output=True)


def whole_on_every_rank() -> ParallelStyle:
    """Return the style of a module that every rank runs whole, on gathered input.

    Where each rank then uses its slice of the output alone, the gradient is a sum over ranks; DTensor knows.
    """
    from torch.distributed.tensor import distribute_module
    from torch.distributed.tensor.parallel import ParallelStyle

    class Whole(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            return distribute_module(module, device_mesh)  # without a function that divides, it replicates

    return Whole()


def by_vocabulary() -> ParallelStyle:
    """Return the style of an embedding [vocabulary, hidden] divided over its rows; it gives tokens divided over tp.

    Not RowwiseParallel: DTensor's backward pass of an embedding makes the gradient of all rows on every rank.
    """
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
    from torch.distributed.tensor.parallel import ParallelStyle

    def divide(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
        weight: Any = module.weight
        divided = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter("weight", type(weight)(divided, requires_grad=weight.requires_grad))

    class ByVocabulary(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            module.forward = lambda ids: _looked_up(ids, module, device_mesh)
            return distribute_module(module, device_mesh, divide)

    return ByVocabulary()


def _looked_up(ids: torch.Tensor, module: Any, mesh: DeviceMesh) -> torch.Tensor:
    """Look `ids` [rows, tokens] up in an embedding divided over its rows: each rank its own ids, 0 for the others."""
    from torch.distributed.tensor import DTensor, Partial, Shard
    from torch.nn.functional import embedding

    own = module.weight.to_local()
    first, count = mesh.get_local_rank() * own.shape[0], own.shape[0]
    unmoved = module.padding_idx  # the row that gets no gradient
    unmoved = unmoved - first if unmoved is not None and first <= unmoved < first + count else None
    elsewhere = (ids < first) | (ids >= first + count)
    found = embedding((ids - first).masked_fill(elsewhere, 0), own, padding_idx=unmoved)
    found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
    return DTensor.from_local(found, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(1)])


DIMENSIONS.register("tp")(Tensor())
