"""The numbers of a decoder that memory, FLOPs and legality follow from. Standard library and PyYAML only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from trainers.errors import UserError, did_you_mean

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Family:
    """What a Hugging Face model type fixes in code, and what it assumes for a key that config.json leaves out.

    Source: the configuration and modeling modules of each type in transformers 5.24.
    """

    max_position_embeddings: int
    num_key_value_heads: int | None = None
    """Assumed when the key is absent; None means as many as there are query heads."""
    head_dim: int | None = None
    """Assumed when the key is absent; None means hidden_size / num_attention_heads."""
    attention_bias: bool | None = None
    """None means that the config's own `attention_bias` decides, and then o_proj has a bias as well."""
    qk_norm: bool = False
    sliding_window: int | None = None
    window_is_switched: bool = False
    """Whether `sliding_window` counts only where `use_sliding_window` is true, from layer `max_window_layers` on."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(max_position_embeddings=2048),
    "mistral": Family(max_position_embeddings=131072, num_key_value_heads=8, attention_bias=False, sliding_window=4096),
    "qwen2": Family(
        max_position_embeddings=32768, num_key_value_heads=32, attention_bias=True, window_is_switched=True
    ),
    "qwen3": Family(
        max_position_embeddings=32768, num_key_value_heads=32, head_dim=128, qk_norm=True, window_is_switched=True
    ),
}


@dataclass(frozen=True)
class ModelShape:
    """A decoder of Llama's shape: per block grouped-query attention, a gated MLP of three matrices, two RMSNorms."""

    name: str
    """Hub id or path of the weights."""
    model_type: str
    """Hugging Face's name of the architecture: a key of FAMILIES."""
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Width of one head; heads × head_dim need not equal hidden_size (Qwen3-0.6B: 16 × 128, hidden 1024)."""
    vocab_size: int
    """Rows of the embedding matrix, padding rows included."""
    max_position_embeddings: int
    tie_word_embeddings: bool
    """Whether the output head is the embedding matrix: one copy of vocab_size × hidden_size instead of two."""
    attention_bias: bool = False
    """Whether q, k and v have biases (Qwen2.5); in Llama and Qwen3 o_proj then has one too."""
    qk_norm: bool = False
    """Whether each head's q and k pass an RMSNorm of head_dim weights (Qwen3)."""
    sliding_window: int | None = None
    """Tokens that every layer attends back to; None where any layer attends to all (an upper bound for mixtures)."""
    dtype: str = "bfloat16"
    """dtype of the published weights."""

    def __post_init__(self) -> None:
        faults = [
            f"{field.name}={getattr(self, field.name)}: at least 1"
            for field in fields(self)
            if field.type == "int" and getattr(self, field.name) < 1
        ]
        if self.model_type not in FAMILIES:
            faults.append(_unknown_model_type(self.model_type))
        if self.dtype not in DTYPES:
            faults.append(f"dtype={self.dtype}: one of {', '.join(DTYPES)}{did_you_mean(self.dtype, DTYPES)}")
        if self.sliding_window is not None and self.sliding_window < 1:
            faults.append(f"sliding_window={self.sliding_window}: at least 1, or null for full attention")
        if self.num_key_value_heads > 0 and self.num_attention_heads % self.num_key_value_heads:
            faults.append(
                f"num_attention_heads={self.num_attention_heads} is not divisible by "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if faults:
            raise ValueError("\n".join(faults))

    @property
    def query_size(self) -> int:
        """Width of q, and of the attention output that o_proj reads: num_attention_heads · head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of k, and of v: num_key_value_heads · head_dim."""
        return self.num_key_value_heads * self.head_dim

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """(in_features, out_features) of each linear layer of one block, in the order of the forward pass."""
        hidden, ffn = self.hidden_size, self.intermediate_size
        query, key_value = self.query_size, self.key_value_size
        return {
            "q_proj": (hidden, query),
            "k_proj": (hidden, key_value),
            "v_proj": (hidden, key_value),
            "o_proj": (query, hidden),
            "gate_proj": (hidden, ffn),
            "up_proj": (hidden, ffn),
            "down_proj": (ffn, hidden),
        }

    @property
    def num_embedding_parameters(self) -> int:
        """Parameters of the embedding and of the output head: vocab_size · hidden_size, twice if untied."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)

    @property
    def num_block_parameters(self) -> int:
        """Parameters of one block: the seven matrices, their biases, the q and k norms, the two RMSNorms."""
        matrices = sum(inputs * outputs for inputs, outputs in self.linear_layers.values())
        biases = 0
        if self.attention_bias:
            biases = self.query_size + 2 * self.key_value_size
            if FAMILIES[self.model_type].attention_bias is None:
                biases += self.hidden_size
        head_norms = 2 * self.head_dim if self.qk_norm else 0
        return matrices + biases + head_norms + 2 * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All parameters, exactly: embeddings + layers · block + the final RMSNorm. Tied weights count once."""
        return self.num_embedding_parameters + self.num_hidden_layers * self.num_block_parameters + self.hidden_size

    def num_lora_parameters(self, rank: int, targets: Collection[str] = LINEAR_LAYERS) -> int:
        """Trainable parameters of LoRA on `targets`: rank · (in + out) for each targeted layer of each block.

        Source: Hu et al. 2021, "LoRA", section 4.1: A is rank × in, B is out × rank, neither has a bias.
        """
        if rank < 1:
            raise UserError(f"lora_rank={rank}: at least 1")
        unknown = sorted(set(targets) - set(LINEAR_LAYERS))
        if unknown:
            raise UserError(
                [
                    f"LoRA target {target!r} is not a linear layer of a block{did_you_mean(target, LINEAR_LAYERS)}; "
                    f"available: {', '.join(LINEAR_LAYERS)}"
                    for target in unknown
                ]
            )
        widths = sum(sum(size) for layer, size in self.linear_layers.items() if layer in targets)
        return self.num_hidden_layers * rank * widths

    def to_hf_config(self) -> dict[str, Any]:
        """Return the keys of a config.json that make a model of this shape: what from_hf_config reads."""
        same = (
            "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "dtype",
        )  # fmt: skip
        given = {name: getattr(self, name) for name in same}
        family = FAMILIES[self.model_type]
        if family.attention_bias is None:
            given["attention_bias"] = self.attention_bias
        if self.sliding_window is not None:
            switched = {"use_sliding_window": True, "max_window_layers": 0} if family.window_is_switched else {}
            given |= {"sliding_window": self.sliding_window, **switched}
        elif not family.window_is_switched and family.sliding_window is not None:
            given["sliding_window"] = None
        return given

    @classmethod
    def from_yaml(cls, path: str | Path) -> ModelShape:
        """Read a preset such as search_spaces/models/qwen3-0.6b.yaml: one mapping, its keys this class's fields."""
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise UserError(f"{path}: not valid YAML: {error}") from error
        if not isinstance(values, dict):
            raise UserError(f"{path}: expected a mapping of {', '.join(field.name for field in fields(cls))}")
        return cls._checked(values, str(path))

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], name: str | None = None) -> ModelShape:
        """Translate a Hugging Face config.json, or `config.to_dict()`; `name` defaults to its `_name_or_path`.

        An absent optional key gets the default that transformers documents for the model type. The dtype is read
        from `dtype` (transformers 5) or `torch_dtype` (4); absent, it is float32, as torch's default is.
        """
        model_type = str(config.get("model_type"))
        if model_type not in FAMILIES:
            raise UserError(_unknown_model_type(model_type))
        family = FAMILIES[model_type]
        if config.get("mlp_bias"):
            raise UserError("mlp_bias=true: a shape whose MLP has biases is not supported; its counts would be wrong")
        source = str(name or config.get("_name_or_path") or model_type)
        required = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        missing = [key for key in required if config.get(key) is None]
        if missing:
            raise UserError([f"the config of {source}: {key} is missing" for key in missing])
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        # An explicit null means "derive it" to transformers, whatever the model type assumes for an absent key.
        key_value_heads = config.get("num_key_value_heads", family.num_key_value_heads)
        head_dim = config.get("head_dim", family.head_dim)
        if head_dim is None:
            if hidden % heads:
                raise UserError(f"hidden_size={hidden} is not divisible by num_attention_heads={heads}: give head_dim")
            head_dim = hidden // heads
        values: dict[str, Any] = {key: config[key] for key in required} | {
            "name": source,
            "model_type": model_type,
            "num_key_value_heads": heads if key_value_heads is None else key_value_heads,
            "head_dim": head_dim,
            "max_position_embeddings": config.get("max_position_embeddings", family.max_position_embeddings),
            "tie_word_embeddings": config.get("tie_word_embeddings", False),
            "attention_bias": (
                config.get("attention_bias", False) if family.attention_bias is None else family.attention_bias
            ),
            "qk_norm": family.qk_norm,
            "sliding_window": _window(config, family),
            "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        }
        return cls._checked(values, f"the config of {source}")

    @classmethod
    def _checked(cls, values: Mapping[str, Any], source: str) -> ModelShape:
        """Build from untyped values; raise one UserError with every fault, each prefixed by its source."""
        known = {field.name: str(field.type) for field in fields(cls)}
        required = [field.name for field in fields(cls) if field.default is MISSING]
        faults = [f"unknown key {key!r}{did_you_mean(str(key), known)}" for key in values if key not in known]
        faults += [f"{key} is missing" for key in required if values.get(key) is None]
        faults += [
            f"{key}={value!r}: expected {known[key]}"
            for key, value in values.items()
            if key in known and not _has_type(value, known[key]) and not (value is None and key in required)
        ]
        if not faults:
            try:
                return cls(**values)
            except ValueError as error:
                faults = str(error).split("\n")
        raise UserError([f"{source}: {fault}" for fault in faults])


def _has_type(value: object, annotation: str) -> bool:
    """Whether `value` is exactly of one of the annotated types: isinstance would take true for an int."""
    return ("None" if value is None else type(value).__name__) in annotation.split(" | ")


def _unknown_model_type(model_type: str) -> str:
    return (
        f"model_type={model_type}: not a known shape{did_you_mean(model_type, FAMILIES)}; "
        f"available: {', '.join(FAMILIES)}"
    )


def _window(config: Mapping[str, Any], family: Family) -> int | None:
    """Return the window if every layer slides, else None."""
    window: int | None = config.get("sliding_window", family.sliding_window)
    layer_types = config.get("layer_types")
    if layer_types is not None:
        return window if all(kind == "sliding_attention" for kind in layer_types) else None
    if family.window_is_switched and not (config.get("use_sliding_window") and config.get("max_window_layers") == 0):
        return None
    return window
