"""Finding, describing and loading the model: the embedded one, a local folder, or a hub id."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trainers.embedded import model as embedded
from trainers.embedded.model import EMBEDDED
from trainers.errors import UserError, did_you_mean
from trainers.shape import FAMILIES, ModelShape

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase


def looks_like_path(name: str) -> bool:
    """Tell a path from a hub id: a hub id is `name` or `org/name` with no leading dot, slash or tilde."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).is_dir()


def locate(name: str) -> str:
    """Return the model's name with a path made absolute. Raises UserError when the path holds no model."""
    if name == EMBEDDED or not looks_like_path(name):
        return name
    path = Path(name).expanduser().resolve()
    if not path.is_dir():
        siblings = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        raise UserError(
            f"model={name}: no such folder{did_you_mean(path.name, siblings)}; give {EMBEDDED}, a hub id "
            "such as Qwen/Qwen3-0.6B, or the path of a Hugging Face model folder"
        )
    if not (path / "config.json").is_file():
        raise UserError(f"model={name}: {path} holds no config.json, so it is not a Hugging Face model folder")
    return str(path)


def hf_config(name: str, revision: str | None) -> Any:
    """Return the transformers config. Raises UserError when the model cannot be found or reached."""
    if name == EMBEDDED:
        return embedded.config()
    from transformers import AutoConfig

    return reached(name, lambda: AutoConfig.from_pretrained(name, revision=revision))


def shape(name: str, revision: str | None = None) -> ModelShape | None:
    """Return the model's shape, from its config alone; None for a kind of model whose shape is not known.

    Such a model can be trained all the same; what follows from its shape cannot be said in advance.
    """
    config = hf_config(name, revision).to_dict()
    known = config.get("model_type") in FAMILIES and not config.get("mlp_bias")
    return ModelShape.from_hf_config(config, name) if known else None


def max_positions(name: str, revision: str | None = None) -> int | None:
    """Return the longest input, in tokens, that the model's position embeddings reach; None where it sets no limit."""
    limit = getattr(hf_config(name, revision).get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer, with a pad token (the end token where the model defines none)."""
    if name == EMBEDDED:
        return embedded.tokenizer()
    from transformers import AutoTokenizer

    found = reached(name, lambda: AutoTokenizer.from_pretrained(name, revision=revision))
    if found.eos_token is None:
        raise UserError(f"model={name}: its tokenizer has no end-of-sequence token, so answers could not end")
    if found.pad_token is None:
        found.pad_token = found.eos_token
    return found


def skeleton(name: str, revision: str | None, dtype: torch.dtype, attn_implementation: str) -> nn.Module:
    """Return the model on the meta device: its modules and the shapes of its weights, and no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    config = hf_config(name, revision)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    model.tie_weights()  # types differ on meta, and a tied head must be one tensor before anything is divided
    return cast("nn.Module", model)


def whole(name: str, revision: str | None, dtype: torch.dtype, attn: str, device: torch.device) -> nn.Module:
    """Load the pretrained model in one piece onto `device`: for kinds whose weights cannot be read by name."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # one line a rank, in logs that nobody watches
    model = reached(
        name,
        lambda: AutoModelForCausalLM.from_pretrained(name, revision=revision, dtype=dtype, attn_implementation=attn),
    )
    return cast("nn.Module", model.to(device))


def blocks(module: nn.Module) -> list[nn.Module]:
    """Return the decoder blocks of a model, of an adapter around one, or of a pipeline's stage, in order."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]


def reached(name: str, call: Any) -> Any:
    """Call transformers, and turn its many ways of not finding a model into one sentence."""
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # without a network each retry would be a line of its own
    try:
        return call()
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise UserError(
            f"model={name}: it cannot be loaded{offline}: {first}; give {EMBEDDED}, a hub id, or the "
            "path of a Hugging Face model folder"
        ) from None
