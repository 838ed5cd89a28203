"""Parameter counts against published figures, hand-worked sums and the models themselves on the meta device."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainers.errors import UserError
from trainers.shape import FAMILIES, LINEAR_LAYERS, ModelShape

PRESETS = sorted((Path(__file__).parents[2] / "search_spaces" / "models").glob("*.yaml"))

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def preset(stem: str) -> ModelShape:
    return ModelShape.from_yaml(next(path for path in PRESETS if path.stem == stem))


# Totals: sums of the tensors in the published safetensors files, tied heads once. Without embeddings: the model cards.
@pytest.mark.parametrize(
    ("stem", "total", "published_without_embeddings"),
    [
        ("qwen3-0.6b", 596_049_920, 0.44e9),
        ("qwen3-1.7b", 1_720_574_976, 1.4e9),
        ("qwen3-4b", 4_022_468_096, 3.6e9),
        ("qwen3-8b", 8_190_735_360, 6.95e9),
        ("qwen2.5-7b", 7_615_616_512, 6.53e9),
        ("llama-3.2-1b", 1_235_814_400, None),
        ("llama-3.1-8b", 8_030_261_248, None),
        ("mistral-7b-v0.3", 7_248_023_552, None),
        ("smollm2-135m", 134_515_008, None),
    ],
)
def test_published_parameter_counts(stem: str, total: int, published_without_embeddings: float | None) -> None:
    shape = preset(stem)
    assert shape.num_parameters == total
    if published_without_embeddings:
        assert total - shape.num_embedding_parameters == pytest.approx(published_without_embeddings, rel=0.015)


def test_count_worked_by_hand() -> None:
    """Qwen3-0.6B, matrix by matrix."""
    shape = preset("qwen3-0.6b")
    attention = 1024 * 2048 + 1024 * 1024 + 1024 * 1024 + 2048 * 1024
    mlp = 3 * 1024 * 3072
    norms = 1024 + 1024 + 128 + 128
    assert shape.num_block_parameters == attention + mlp + norms == 15_730_944
    assert shape.num_parameters == 151_936 * 1024 + 28 * 15_730_944 + 1024


@pytest.mark.parametrize(("stem", "trainable"), [("qwen3-0.6b", 10_092_544), ("qwen3-8b", 43_646_976)])
def test_lora_on_all_linear_layers(stem: str, trainable: int) -> None:
    assert preset(stem).num_lora_parameters(16) == trainable


def test_lora_on_some_layers() -> None:
    shape = preset("llama-3.1-8b")
    assert shape.num_lora_parameters(8, ["q_proj", "v_proj"]) == 32 * 8 * ((4096 + 4096) + (4096 + 1024)) == 3_407_872
    by_layer = [shape.num_lora_parameters(8, [layer]) for layer in LINEAR_LAYERS]
    assert sum(by_layer) == shape.num_lora_parameters(8)


def test_lora_faults() -> None:
    with pytest.raises(UserError, match="lora_rank=0"):
        preset("qwen3-0.6b").num_lora_parameters(0)
    with pytest.raises(UserError, match=r"'q_prj'.*did you mean q_proj\?") as caught:
        preset("qwen3-0.6b").num_lora_parameters(16, ["q_prj", "lm_head", "v_proj"])
    assert len(caught.value.faults) == 2


def on_meta(model_type: str, **config: Any) -> Any:
    """Return the real model without storage; `torch.device("meta")` makes an 8B model in well under a second."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **config))


def count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_against_the_model_itself(path: Path) -> None:
    shape = ModelShape.from_yaml(path)
    config = {name: getattr(shape, name) for name in TINY}
    config |= {
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        "sliding_window": shape.sliding_window,
        "dtype": shape.dtype,
    }
    model = on_meta(shape.model_type, **config)
    assert count(model) == shape.num_parameters
    assert ModelShape.from_hf_config(model.config.to_dict(), name=shape.name) == shape

    block = model.model.layers[0]
    assert count(block) == shape.num_block_parameters
    found = {
        name.rsplit(".", 1)[-1]: (layer.in_features, layer.out_features)
        for name, layer in block.named_modules()
        if hasattr(layer, "in_features")
    }
    assert found == shape.linear_layers


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("tie_word_embeddings", [False, True])
def test_biases_and_ties_against_the_model_itself(
    model_type: str, attention_bias: bool, tie_word_embeddings: bool
) -> None:
    config = TINY | {"attention_bias": attention_bias, "tie_word_embeddings": tie_word_embeddings}
    model = on_meta(model_type, **config)
    assert ModelShape.from_hf_config(config | {"model_type": model_type}).num_parameters == count(model)
    assert ModelShape.from_hf_config(model.config.to_dict()).num_parameters == count(model)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_absent_keys_get_the_defaults_of_transformers(model_type: str) -> None:
    sizes = {key: TINY[key] for key in TINY if key not in ("num_key_value_heads", "tie_word_embeddings")}
    sizes |= {"num_attention_heads": 32, "hidden_size": 64}
    model = on_meta(model_type, **sizes)
    written = ModelShape.from_hf_config({"model_type": model_type} | sizes, name="tiny")
    assert written == ModelShape.from_hf_config(model.config.to_dict() | {"dtype": "float32"}, name="tiny")
    assert written.num_parameters == count(model)


def config_of(model_type: str, **keys: Any) -> ModelShape:
    return ModelShape.from_hf_config(TINY | {"model_type": model_type} | keys)


def test_dtype_under_either_name() -> None:
    assert config_of("llama").dtype == "float32"
    assert config_of("llama", torch_dtype="bfloat16").dtype == "bfloat16"
    assert config_of("llama", dtype="torch.float16").dtype == "float16"
    with pytest.raises(UserError, match=r"dtype=bfloat61.*did you mean bfloat16\?"):
        config_of("llama", dtype="bfloat61")


def test_null_heads_are_derived() -> None:
    assert config_of("llama", num_key_value_heads=None).num_key_value_heads == 4
    assert config_of("mistral", head_dim=None).head_dim == 8
    with pytest.raises(UserError, match="hidden_size=30 is not divisible by num_attention_heads=4"):
        config_of("llama", hidden_size=30)


def test_sliding_window_only_where_every_layer_slides() -> None:
    assert config_of("mistral").sliding_window == 4096
    assert config_of("mistral", sliding_window=None).sliding_window is None
    assert config_of("qwen2", sliding_window=64).sliding_window is None
    switched_on = {"sliding_window": 64, "use_sliding_window": True}
    assert config_of("qwen2", max_window_layers=2, **switched_on).sliding_window is None
    assert config_of("qwen2", max_window_layers=0, **switched_on).sliding_window == 64
    assert config_of("qwen3", layer_types=["sliding_attention"] * 3, **switched_on).sliding_window == 64
    assert config_of("llama").sliding_window is None


def test_config_faults() -> None:
    with pytest.raises(UserError, match=r"model_type=qwen4: .*did you mean qwen\d\?.*available: llama, mistral"):
        config_of("qwen4")
    with pytest.raises(UserError, match="model_type=None"):
        ModelShape.from_hf_config({})
    with pytest.raises(UserError, match="mlp_bias=true"):
        config_of("llama", mlp_bias=True)
    with pytest.raises(UserError) as caught:
        ModelShape.from_hf_config({"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4})
    assert [fault.split(": ")[1] for fault in caught.value.faults] == [
        "intermediate_size is missing",
        "num_hidden_layers is missing",
        "vocab_size is missing",
    ]


def test_yaml_faults_are_all_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    text = next(path for path in PRESETS if path.stem == "qwen3-0.6b").read_text(encoding="utf-8")
    for line, bad in (
        ("hidden_size: 1024", "hiden_size: 1024"),
        ("num_hidden_layers: 28", "num_hidden_layers: 28.0"),
        ("vocab_size: 151936", "vocab_size: true"),
    ):
        assert line in text
        text = text.replace(line, bad)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        ModelShape.from_yaml(path)
    assert caught.value.faults == (
        f"{path}: unknown key 'hiden_size' (did you mean hidden_size?)",
        f"{path}: hidden_size is missing",
        f"{path}: num_hidden_layers=28.0: expected int",
        f"{path}: vocab_size=True: expected int",
    )


def test_yaml_values_out_of_range_are_all_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    text = next(path for path in PRESETS if path.stem == "qwen3-0.6b").read_text(encoding="utf-8")
    text = text.replace("num_key_value_heads: 8", "num_key_value_heads: 3").replace("head_dim: 128", "head_dim: 0")
    path.write_text(text.replace("sliding_window: null", "sliding_window: -1"), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        ModelShape.from_yaml(path)
    assert caught.value.faults == (
        f"{path}: head_dim=0: at least 1",
        f"{path}: sliding_window=-1: at least 1, or null for full attention",
        f"{path}: num_attention_heads=16 is not divisible by num_key_value_heads=3",
    )


@pytest.mark.parametrize(("text", "fault"), [("- 1", "expected a mapping"), ("a: [", "not valid YAML")])
def test_yaml_that_is_no_preset(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=fault):
        ModelShape.from_yaml(path)
    with pytest.raises(UserError, match="cannot be read"):
        ModelShape.from_yaml(tmp_path / "absent.yaml")


def test_imports_neither_torch_nor_pydantic() -> None:
    code = "import sys, trainers.shape; assert not {'torch', 'transformers', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_a_shape_survives_the_way_through_a_config(path: Path) -> None:
    """Of Hugging Face's own class, so that what it assumes for keys that are not given counts."""
    from transformers import AutoConfig

    shape = ModelShape.from_yaml(path)
    given = shape.to_hf_config()
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    assert ModelShape.from_hf_config(config.to_dict(), shape.name) == shape
    slid = replace(shape, sliding_window=512)
    given = slid.to_hf_config()
    if shape.model_type == "llama":
        return  # whose attention knows no window
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    assert ModelShape.from_hf_config(config.to_dict(), shape.name) == slid
