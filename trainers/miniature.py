"""One step of a small random model of another one's architecture, as a trial divides it and as one process does it.

In float64 the two agree to the tenth digit, or differ in more than rounding: whatever the size of the real model, and
without a reference that would have to fit into one process.
"""

from __future__ import annotations

import math
import tempfile
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from trainers import batch as batching
from trainers.adapter import apply_adapter, saved_name
from trainers.batch import Window
from trainers.config import LearningConfig
from trainers.data import IGNORED
from trainers.layout import Layout
from trainers.memory import MemoryMeter
from trainers.model import hf_config, shape
from trainers.result import Miniature
from trainers.strategies import STRATEGIES, Setting, proof_dtype
from trainers.token_loss import Batch, padded
from trainers.weights import fill

HEAD_DIM = 8
VOCABULARY = 64  # rows a tensor-parallel rank
# Of the original's config what names tokens or weights that the miniature does not have.
DROPPED = (
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "_name_or_path",
)
ROWS, LONGEST = 2, 24  # most rows of a micro batch, most tokens of a row


def compared(model: str, revision: str | None, setting: Setting, layout: Layout) -> Miniature | None:
    """Do one step of a miniature both ways; return how far they differ. Every rank must call it.

    None where the model's architecture is not known.
    """
    if setting.shape is None:
        return None
    small, dtype = _small(setting), proof_dtype(setting)
    with tempfile.TemporaryDirectory(prefix="miniature-") as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vocabulary = saved(model, revision, Path(folder), _layers(setting), setting.plan.tp)
        samples = drawn(small.learning.global_batch_size, vocabulary)
        small = replace(small, shape=shape(folder), dtype=dtype)
        right = _stepped_alone(folder, small.learning, samples, dtype, layout.device)
        found = _stepped(folder, small, layout, samples)
    return Miniature(layout.world.max([right.difference(found)])[0], dtype)


def _layers(setting: Setting) -> int:
    from trainers.strategies.pipeline import number_of_stages

    return max(2, number_of_stages(setting)) if setting.plan.pp > 1 else 2


def _small(setting: Setting) -> Setting:
    """Return a setting with the same degrees and options, whose window is as small as they allow."""
    micro = min(setting.system.micro_batch_size, ROWS)
    steps = 2 if setting.plan.pp == 1 else 2 * setting.plan.pp
    learning = replace(
        setting.learning,
        lora_dropout=0.0,
        learning_rate=0.5,
        lr_schedule="constant",
        warmup_fraction=0.0,
        max_grad_norm=0.0,
        global_batch_size=micro * steps * setting.plan.dp,
    )
    system = replace(setting.system, micro_batch_size=micro, attn_implementation="sdpa")
    return replace(setting, learning=learning, system=system)


def drawn(count: int, vocabulary: int) -> list[Batch]:
    """Return samples of unequal lengths and numbers of targets, the second without any: int64 [1, tokens]."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for i in range(count):
        length = int(torch.randint(6, LONGEST + 1, (1,), generator=generator))
        ids = torch.randint(0, vocabulary, (1, length), generator=generator)
        labels = ids.clone()
        labels[:, : length if i == 1 else 1 + i % 4] = IGNORED
        samples.append({"input_ids": ids, "labels": labels})
    return samples


@dataclass(frozen=True)
class _Stepped:
    """What an update came to on this rank: mean loss, gradient norm, trained parameters by the checkpoint's names."""

    loss: float
    norm: float
    trained: Mapping[str, torch.Tensor]

    def difference(self, other: _Stepped) -> float:
        """Return the largest relative difference over what `other` holds; infinite where it holds something else."""
        if not other.trained.keys() <= self.trained.keys():
            return math.inf
        pairs = [(self.loss, other.loss), (self.norm, other.norm)]
        parameters = [_relative_of_tensors(self.trained[name], other.trained[name]) for name in other.trained]
        return max([*(_relative(a, b) for a, b in pairs), *parameters])


def _stepped(folder: str, small: Setting, layout: Layout, samples: Sequence[Batch]) -> _Stepped:
    """Do one SGD update of a saved model as the strategy divides it."""
    plan = small.plan
    engine = STRATEGIES[small.system.strategy].make_engine(
        folder,
        None,
        small,
        layout,
        1,
        optimizer=torch.optim.SGD,
        prepare=exact_norms if small.dtype == "float64" else None,
    )
    try:
        split = batching.split(Window(0, 0, tuple(range(len(samples)))), plan.dp, small.system.micro_batch_size)
        mine = [joined([samples[i] for i in ids], layout.device) for ids in split[layout.dp_rank]]
        targets = sum(int((s["labels"] != IGNORED).sum()) for s in samples)
        step = engine.step(mine, targets, MemoryMeter(torch.device("cpu")))
        trained = {saved_name(name): value for name, value in engine.trained()}
        return _Stepped(step.loss_sum / targets, step.grad_norm, trained)
    finally:
        engine.close()


def _stepped_alone(
    folder: str, learning: LearningConfig, samples: Sequence[Batch], dtype: str, device: torch.device
) -> _Stepped:
    """Do the same update with plain torch: the whole window in one batch, a mean over its targets."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    if dtype == "float64":
        exact_norms(base)
    model: Any = apply_adapter(base.to(device), learning).to(device)
    fill(model, None, learning.seed)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    batch = joined(samples, device)
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
    loss = cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in trained.values() if p.grad is not None])
    torch.optim.SGD(trained.values(), lr=learning.learning_rate).step()
    final = {saved_name(name): p.detach() for name, p in trained.items()}
    return _Stepped(float(loss.detach()), float(norm), final)


def joined(samples: Sequence[Batch], device: torch.device) -> Batch:
    """Return samples as one batch, padded on the right."""
    longest = max(s["input_ids"].shape[1] for s in samples)
    rows = [padded(s, 1, longest) for s in samples]
    return {name: torch.cat([row[name] for row in rows]).to(device) for name in rows[0]}


def saved(model: str, revision: str | None, folder: Path, layers: int, tp: int) -> int:
    """Save a miniature of a model in float64 into a folder; return its vocabulary. Uses torch's random state."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    given: dict[str, Any] = {k: v for k, v in hf_config(model, revision).to_dict().items() if k not in DROPPED}
    kind, heads = given.pop("model_type"), given["num_attention_heads"]
    hidden, vocabulary = heads * HEAD_DIM, VOCABULARY * tp
    given |= {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
    }
    if given.get("layer_types"):
        given["layer_types"] = given["layer_types"][:layers]
    config = AutoConfig.for_model(kind, **given)
    small = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in small.parameters():  # norms too: at 1 they would hide a missing gradient
            parameter.add_(0.05 * torch.randn_like(parameter))
    weights = {name: p.detach().contiguous() for name, p in small.named_parameters()}  # a tied one once
    config.dtype = torch.float32  # what it says of the dtype is not used, and float64 is no published one
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return vocabulary


def _relative(a: float, b: float) -> float:
    """Return |a − b| / |a|; infinite where one of them is not finite."""
    found = abs(a - b) / max(abs(a), 1e-12)
    return found if math.isfinite(found) else math.inf


def _relative_of_tensors(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest value of the first."""
    found = float((a - b.to(a.device)).abs().max() / a.abs().max().clamp(min=1e-3))
    return found if math.isfinite(found) else math.inf


def exact_norms(model: nn.Module) -> None:
    """Let RMSNorm compute in the input's dtype: transformers rounds it to float32."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        normed: torch.Tensor = self.weight * (x * torch.rsqrt(variance + self.variance_epsilon))
        return normed

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            setattr(module, "forward", types.MethodType(forward, module))  # noqa: B010  # mypy: a method
