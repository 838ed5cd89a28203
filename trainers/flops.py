"""Floating-point operations of training, in closed form. Standard library only.

Sources: Chowdhery et al. 2022, "PaLM", appendix B, for model FLOPs utilisation (mfu): two operations a weight and token
forward, twice that backward, and attention over the whole row, as published figures count it. Korthikanti et al. 2022,
"Reducing activation recomputation", for hardware FLOPs (hfu): what is computed again, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainers.config import LearningConfig
from trainers.shape import LINEAR_LAYERS, ModelShape


@dataclass(frozen=True)
class Flops:
    """Operations of some rows, forward and backward, over all devices."""

    model: float = 0.0  # what the mathematics asks for: non-pad tokens, nothing twice, no gradients of frozen weights
    hardware: float = 0.0  # what is computed: padding and recomputation, too

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.model + other.model, self.hardware + other.hardware)


@dataclass(frozen=True)
class Rows:
    """A micro batch: the non-pad tokens of each row, its targets, and the positions at which logits are made.

    Its rows are padded to the longest, or to `padded_to` tokens if that is more.
    """

    lengths: Sequence[int]
    targets: int
    heads: int
    padded_to: int = 0


def of_rows(rows: Rows, shape: ModelShape, learning: LearningConfig, recompute: str) -> Flops:
    """Return the operations of one micro batch; the output head serves targets only."""
    if not rows.lengths:
        return Flops()
    longest = max(*rows.lengths, rows.padded_to)
    useful = sum(_trained_on(n, shape, learning) for n in rows.lengths)
    done = len(rows.lengths) * (_trained_on(longest, shape, learning) + _again(longest, shape, learning, recompute))
    head = 2.0 * shape.vocab_size * shape.hidden_size * (3 if learning.adapter == "full" else 2)
    return Flops(useful + head * rows.targets, done + head * rows.heads)


def _trained_on(tokens: int, shape: ModelShape, learning: LearningConfig) -> float:
    """Return the operations of the blocks for a row, forward and backward."""
    products = 2.0 * tokens * (2 * _weights(shape, learning) + _trained(shape, learning))
    return products + 3 * _attention(tokens, shape)


def _attention(tokens: int, shape: ModelShape) -> float:
    """Scores and their use: 2 · tokens² · query_size each, a layer; no less where a window slides."""
    seen = min(tokens, shape.sliding_window or tokens)
    return 4.0 * shape.num_hidden_layers * tokens * seen * shape.query_size


def _again(tokens: int, shape: ModelShape, learning: LearningConfig, recompute: str) -> float:
    """Return what the backward pass computes again: it stops before the last product of a block, which none needs."""
    if recompute == "none":
        return 0.0
    products = [*_products(shape, learning)][:-1]
    if recompute == "selective":  # attention and every second product, beginning with the first, are kept
        return 2.0 * tokens * shape.num_hidden_layers * sum(products[1::2])
    return 2.0 * tokens * shape.num_hidden_layers * sum(products) + _attention(tokens, shape)


def _products(shape: ModelShape, learning: LearningConfig) -> Iterator[int]:
    """Yield the weights of the matrix products of one block, in the order of the forward pass."""
    targets = adapted(learning)
    for name, (inputs, outputs) in shape.linear_layers.items():
        yield inputs * outputs
        if name in targets:
            yield inputs * learning.lora_rank
            yield learning.lora_rank * outputs


def _weights(shape: ModelShape, learning: LearningConfig) -> float:
    """Return the weights of the blocks that every token is multiplied with, adapters among them."""
    return shape.num_hidden_layers * sum(_products(shape, learning))


def _trained(shape: ModelShape, learning: LearningConfig) -> float:
    if learning.adapter == "full":
        return _weights(shape, learning)
    return shape.num_lora_parameters(learning.lora_rank, adapted(learning))


def adapted(learning: LearningConfig) -> tuple[str, ...]:
    """Return the linear layers of a block that have an adapter."""
    if learning.adapter == "full":
        return ()
    if learning.targets is None:
        return LINEAR_LAYERS
    # Modules outside the blocks that may get an adapter, embedding and head, are left out: a product of rank columns.
    return tuple(name for given in learning.targets if (name := given.rpartition(".")[2]) in LINEAR_LAYERS)
