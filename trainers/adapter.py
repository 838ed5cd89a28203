"""What of the model is trained: all weights, or a LoRA adapter on a frozen base."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from trainers.config import LearningConfig

if TYPE_CHECKING:
    from torch import nn


def apply_adapter(model: nn.Module, learning: LearningConfig) -> nn.Module:
    """Freeze what is not trained and add the adapter. Adapter weights depend on `learning.seed` alone."""
    import torch

    if learning.adapter == "full":
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(learning.seed)
    names: str | list[str] = [t.strip() for t in learning.lora_targets.split(",")]
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=learning.lora_rank,
        # peft declares an int; the formula is alpha / rank for any number
        lora_alpha=cast(int, learning.lora_alpha),
        lora_dropout=learning.lora_dropout,
        target_modules="all-linear" if names == ["all-linear"] else names,
    )
    return cast("nn.Module", get_peft_model(cast(Any, model), lora))
