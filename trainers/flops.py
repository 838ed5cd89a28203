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


def of_rows(lengths: Sequence[int], shape: ModelShape, learning: LearningConfig, recompute: str) -> Flops:
    """Return the operations of one micro batch of rows with `lengths` non-pad tokens, padded to the longest."""
    if not lengths:
        return Flops()
    padded = [max(lengths)] * len(lengths)
    useful = sum(_forward(n, shape, learning) + _backward(n, shape, learning) for n in lengths)
    done = sum(
        _forward(n, shape, learning) + _backward(n, shape, learning) + _again(n, shape, learning, recompute)
        for n in padded
    )
    return Flops(useful, done)


def multiplier(shape: ModelShape, learning: LearningConfig) -> float:
    """Return the operations of a token's matrix products over those of full fine-tuning: 1, or about 2/3 for LoRA."""
    everything, trained = _weights(shape, learning), _trained(shape, learning)
    return (2 * everything + trained) / (3 * everything)


def _forward(tokens: int, shape: ModelShape, learning: LearningConfig) -> float:
    return 2.0 * tokens * _weights(shape, learning) + _attention(tokens, shape)


def _backward(tokens: int, shape: ModelShape, learning: LearningConfig) -> float:
    return 2.0 * tokens * (_weights(shape, learning) + _trained(shape, learning)) + 2 * _attention(tokens, shape)


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
    targets = _targets(learning)
    for name, (inputs, outputs) in shape.linear_layers.items():
        yield inputs * outputs
        if name in targets:
            yield inputs * learning.lora_rank
            yield learning.lora_rank * outputs


def _weights(shape: ModelShape, learning: LearningConfig) -> float:
    """Return the weights that every token is multiplied with: blocks, output head, adapters; not the embedding."""
    return shape.num_hidden_layers * sum(_products(shape, learning)) + shape.vocab_size * shape.hidden_size


def _trained(shape: ModelShape, learning: LearningConfig) -> float:
    if learning.adapter == "full":
        return _weights(shape, learning)
    return shape.num_lora_parameters(learning.lora_rank, _targets(learning))


def _targets(learning: LearningConfig) -> tuple[str, ...]:
    if learning.adapter == "full":
        return ()
    named = learning.lora_targets
    if named == "all-linear":
        return LINEAR_LAYERS
    # Modules outside the blocks that may get an adapter, embedding and head, are left out: a product of rank columns.
    return tuple(name for given in named.split(",") if (name := given.strip().rpartition(".")[2]) in LINEAR_LAYERS)
