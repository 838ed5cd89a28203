"""What every cell of the contract suite is compared with: one process, the whole window at once, torch alone."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from trainers.adapter import apply_adapter, base_name, initial_weight, is_adapter
from trainers.config import LearningConfig

VOCABULARY, LONGEST = 128, 24
FAMILIES = ("llama", "qwen3")  # untied; tied, with norms on queries and keys


def save_models(folder: Path) -> None:
    """Save a tiny model of each family in float64, 4 blocks, 8 heads, 4 of them for keys and values."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 64,
    }  # fmt: skip
    for name, config in (
        ("llama", LlamaConfig(**shape, tie_word_embeddings=False)),
        ("qwen3", Qwen3Config(**shape, tie_word_embeddings=True)),
    ):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():  # norms too: at 1 they would hide a missing gradient
                parameter.add_(0.05 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)


def exact_norms(model: nn.Module) -> None:
    """Let RMSNorm compute in the input's dtype: transformers rounds it to float32."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.variance_epsilon))

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(forward, module)


Sample = tuple[tuple[int, ...], tuple[bool, ...]]
"""Tokens, and which of them are targets."""


def window(update: int, count: int) -> list[Sample]:
    """Return the samples of an update: unequal lengths and numbers of targets, the fourth without any."""
    generator = torch.Generator().manual_seed(100 + update)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    samples = []
    for i in range(count):
        length = draw(5, LONGEST)
        tokens = tuple(int(t) for t in torch.randint(0, VOCABULARY, (length,), generator=generator))
        first = draw(1, length) if i % 3 else 1
        samples.append((tokens, tuple(i % 8 != 3 and t >= first for t in range(length))))
    return samples


def collated(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Return input_ids and labels, padded on the right; one padding row where there is no sample."""
    longest = max((len(tokens) for tokens, _ in samples), default=1)
    ids = torch.zeros(max(len(samples), 1), longest, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row, (tokens, targets) in enumerate(samples):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, : len(tokens)] = torch.tensor([t if on else -100 for t, on in zip(tokens, targets, strict=True)])
    return {"input_ids": ids, "labels": labels}


def targets_of(samples: Sequence[Sample]) -> int:
    return sum(sum(targets) for _, targets in samples)


@dataclass(frozen=True)
class Trace:
    """Losses and gradient norms of the updates, and the trained parameters after the last one."""

    losses: list[float]
    norms: list[float]
    trained: dict[str, torch.Tensor]


@torch.no_grad()
def round_to_4_bits(model: nn.Module) -> None:
    """Round every linear layer but the output head to what NF4 keeps of it (arXiv 2305.14314): codes times scales."""
    from bitsandbytes.functional import dequantize_blockwise, quantize_4bit

    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or name.endswith("lm_head"):
            continue
        packed, state = quantize_4bit(layer.weight.flatten(), blocksize=64, compress_statistics=True, quant_type="nf4")
        codes = torch.stack((packed >> 4, packed & 15), dim=-1).flatten()
        scales = dequantize_blockwise(state.absmax, state.state2) + state.offset
        layer.weight.copy_((state.code[codes.long()].view(-1, 64) * scales[:, None]).view_as(layer.weight))


@cache
def reference(
    folder: Path, family: str, learning: LearningConfig, optimizer: str, updates: int, samples: int, dtype: str
) -> Trace:
    """Train in this process, the whole window at once."""
    from transformers import AutoModelForCausalLM

    quantized = learning.adapter == "qlora"
    if quantized:
        learning, dtype = replace(learning, adapter="lora"), "float32"
    base: Any = AutoModelForCausalLM.from_pretrained(folder / family, dtype=getattr(torch, dtype))
    if quantized:
        round_to_4_bits(base)
    if dtype == "float64":
        exact_norms(base)
    model = apply_adapter(base, learning)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.copy_(initial_weight(name, tuple(parameter.shape), learning.seed))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rate = learning.learning_rate
    chosen: torch.optim.Optimizer = (
        torch.optim.SGD(trained.values(), lr=rate)
        if optimizer == "sgd"
        else torch.optim.AdamW(trained.values(), lr=rate, weight_decay=learning.weight_decay)
    )
    losses, norms = [], []
    for update in range(updates):
        drawn = window(update, samples)
        batch = collated(drawn)
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
        summed = cross_entropy(
            logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
        loss = summed / targets_of(drawn)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(trained.values(), learning.max_grad_norm or float("inf"))))
        losses.append(float(loss.detach()))
        chosen.step()
        chosen.zero_grad()
    final = {base_name(n) if not is_adapter(n) else n: p.detach().clone() for n, p in trained.items()}
    return Trace(losses, norms, final)
