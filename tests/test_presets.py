"""Every preset that ships loads, says where its numbers come from, and is physically plausible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trainers.shape import ModelShape

SPACES = Path(__file__).parents[1] / "search_spaces"
MODELS = sorted((SPACES / "models").glob("*.yaml"))
CLUSTERS = sorted((SPACES / "clusters").glob("*.yaml"))

CLUSTER_TYPES = {
    "name": str,
    "device": str,
    "devices_per_node": int,
    "nodes": int,
    "device_memory_gib": float,
    "peak_flops": dict,
    "memory_bandwidth_bytes_per_s": float,
    "intra_node_link_bytes_per_s": float,
    "inter_node_link_bytes_per_s": float,
    "host_memory_gib": float,
    "host_link_bytes_per_s": float,
    "price_per_gpu_hour": float,
}

PLAUSIBLE = {
    "devices_per_node": (1, 16),
    "nodes": (1, 1),
    "device_memory_gib": (16.0, 192.0),
    "memory_bandwidth_bytes_per_s": (3e11, 1e13),
    "intra_node_link_bytes_per_s": (1e10, 1e12),
    "inter_node_link_bytes_per_s": (1e8, 1e11),
    "host_memory_gib": (64.0, 4096.0),
    "host_link_bytes_per_s": (1e10, 1.3e11),
    "price_per_gpu_hour": (0.1, 15.0),
}

# Streaming multiprocessors, dense bf16 FLOP per SM and clock (accumulating in fp32), boost clock in Hz.
# Sources: NVIDIA's architecture white papers (Ampere, Ada, Hopper); the A10G's SM count is what its driver reports.
CHIPS = {
    "h100x8": (132, 4096, 1.83e9),
    "h200x8": (132, 4096, 1.83e9),
    "a100-80gx8": (108, 2048, 1.41e9),
    "a100-40gx8": (108, 2048, 1.41e9),
    "l40sx4": (142, 1024, 2.52e9),
    "a10gx4": (80, 512, 1.71e9),
    "rtx4090x2": (128, 512, 2.52e9),
}

each_model = pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
each_cluster = pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)


def load(path: Path) -> dict[str, Any]:
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def header(path: Path) -> str:
    """Return the comment lines before the first key."""
    lines = path.read_text(encoding="utf-8").splitlines()
    first_key = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(lines[:first_key])


def test_the_presets_are_found() -> None:
    assert len(MODELS) >= 8
    assert {path.stem for path in CLUSTERS} >= set(CHIPS)


@each_model
def test_model_preset_loads_under_its_name(path: Path) -> None:
    shape = ModelShape.from_yaml(path)
    assert shape.name == load(path)["name"]
    owner, _, model = shape.name.partition("/")
    assert owner
    assert model.lower() == path.stem


@each_model
def test_model_header_names_source_count_use_and_command(path: Path) -> None:
    shape, text = ModelShape.from_yaml(path), header(path)
    for part in ("config.json", f"{shape.num_parameters:,} parameters", "# For: ", f"model={shape.name} "):
        assert part in text


@each_cluster
def test_cluster_preset_has_every_key_with_its_type(path: Path) -> None:
    cluster = load(path)
    # type(), not isinstance: true is an int, and 3e12 without a point and a sign is a string to a YAML 1.1 reader.
    assert {key: type(value) for key, value in cluster.items()} == CLUSTER_TYPES
    assert {key: type(value) for key, value in cluster["peak_flops"].items()} == dict.fromkeys(
        ("bf16", "fp16", "tf32", "fp32"), float
    )
    assert cluster["name"] == path.stem
    assert path.stem.endswith(f"x{cluster['devices_per_node']}")


@each_cluster
def test_cluster_header_names_use_and_command(path: Path) -> None:
    assert "# For: " in header(path)
    assert f"cluster={path.stem}" in header(path)


@each_cluster
def test_each_cluster_number_has_its_source(path: Path) -> None:
    """A comment stands directly above every key from `device_memory_gib` on."""
    lines = path.read_text(encoding="utf-8").splitlines()
    keys = list(CLUSTER_TYPES)
    for key in keys[keys.index("device_memory_gib") :]:
        index = next(index for index, line in enumerate(lines) if line.startswith(f"{key}:"))
        assert lines[index - 1].startswith("#"), key


@each_cluster
def test_cluster_numbers_are_plausible(path: Path) -> None:
    cluster = load(path)
    for key, (lowest, highest) in PLAUSIBLE.items():
        assert lowest <= cluster[key] <= highest, key
    flops = cluster["peak_flops"]
    assert 1e13 <= flops["fp32"] <= flops["tf32"] < flops["bf16"] == flops["fp16"] <= 2.5e15
    assert flops["bf16"] / flops["tf32"] == pytest.approx(2, rel=0.02)
    assert cluster["inter_node_link_bytes_per_s"] < cluster["intra_node_link_bytes_per_s"]
    assert cluster["intra_node_link_bytes_per_s"] < cluster["memory_bandwidth_bytes_per_s"]
    assert cluster["host_link_bytes_per_s"] <= cluster["intra_node_link_bytes_per_s"]
    assert cluster["host_memory_gib"] >= cluster["device_memory_gib"] * cluster["devices_per_node"]


@pytest.mark.parametrize("stem", CHIPS)
def test_peak_flops_are_dense(stem: str) -> None:
    """From the chip's own numbers; the sparsity figure of a data sheet would be off by a factor of two."""
    multiprocessors, flop_per_clock, clock = CHIPS[stem]
    bf16 = load(SPACES / "clusters" / f"{stem}.yaml")["peak_flops"]["bf16"]
    assert bf16 == pytest.approx(multiprocessors * flop_per_clock * clock, rel=0.02)
