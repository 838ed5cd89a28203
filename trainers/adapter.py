"""What of the model is trained: all weights, or a LoRA adapter on a frozen base, which may be quantized."""

from __future__ import annotations

import hashlib
import importlib.util
import math
from typing import TYPE_CHECKING, Any, cast

from trainers.config import LearningConfig
from trainers.errors import did_you_mean
from trainers.shape import LINEAR_LAYERS

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainers.strategies import Setting


ADAPTABLE = (*LINEAR_LAYERS, "lm_head", "embed_tokens")  # layers of a known architecture that LoRA can be put on


def apply_adapter(model: nn.Module, learning: LearningConfig) -> nn.Module:
    """Freeze what is not trained and add the adapter, whose weights `initial_weight` gives."""
    if learning.adapter == "full":
        return model
    import torch
    from peft import get_peft_model

    if learning.adapter == "qlora":
        from trainers.quantization import quantize

        quantize(model)
    first = next(model.parameters())
    # On the meta device the adapter is too, and gets its memory with the model.
    adapted = cast(
        "nn.Module", get_peft_model(cast(Any, model), lora_config(learning), low_cpu_mem_usage=first.is_meta)
    )
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32  # trained weights: never in half precision
    for name, parameter in adapted.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.to(dtype)
    return adapted


def lora_config(learning: LearningConfig) -> Any:
    """Return peft's description of the adapter."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=learning.lora_rank,
        # peft declares an int; the formula is alpha / rank for any number
        lora_alpha=cast(int, learning.lora_alpha),
        lora_dropout=learning.lora_dropout,
        target_modules="all-linear" if learning.targets is None else list(learning.targets),
    )


def illegal(setting: Setting) -> list[str]:
    """Return why this setting's adapter is illegal: one rule a line, empty when it is legal."""
    rules = _target_rules(setting)
    if setting.learning.adapter != "qlora":
        return rules
    if importlib.util.find_spec("bitsandbytes") is None:
        rules.append("adapter=qlora needs the package bitsandbytes: pip install 'finetune-sweeper[quantize]'")
    if setting.plan.tp > 1:
        rules.append(f"tp={setting.plan.tp} with adapter=qlora: quantized weights cannot be sliced; use full or lora")
    return rules


def _target_rules(setting: Setting) -> list[str]:
    learning = setting.learning
    if learning.adapter == "full" or setting.shape is None:
        return []
    unknown = [
        t for t in learning.targets or () if t.rsplit(".", 1)[-1] not in ADAPTABLE
    ]  # as peft: a name, or the end of a path
    return [
        f"lora_targets={learning.lora_targets}: {t!r} is no layer of this model; it has {', '.join(ADAPTABLE)}"
        f"{did_you_mean(t, ADAPTABLE)}"
        for t in unknown
    ]


def is_adapter(name: str) -> bool:
    """Tell whether a parameter of this name belongs to the adapter."""
    return "lora_" in name


def initial_weight(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return the adapter's weight of this name at the start, float32 on the CPU, drawn as peft draws it.

    A of a linear layer is uniform within ± 1 / √(its inputs) (Kaiming with a = √5), B of an embedding is normal, the
    others are 0. It depends on seed and name alone, so that it is the same however the model is divided among ranks.
    """
    import torch

    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if "lora_A" in name:
        bound = 1 / math.sqrt(shape[1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    return torch.randn(shape, generator=generator) if "lora_embedding_B" in name else torch.zeros(shape)


def bare(model: nn.Module) -> nn.Module:
    """Return the transformers model under an adapter, or the model itself."""
    inner: Any = model
    return cast("nn.Module", inner.get_base_model() if hasattr(inner, "get_base_model") else inner)


def saved_name(name: str) -> str:
    """Return the name under which a trained parameter is known: the checkpoint's, or an adapter's own."""
    return name if is_adapter(name) else base_name(name)


def base_name(name: str) -> str:
    """Return the checkpoint's name of a parameter that an adapter may have wrapped."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")
