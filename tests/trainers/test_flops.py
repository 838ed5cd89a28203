"""Operations of training, worked by hand and against published figures."""

from __future__ import annotations

import pytest

from sweeps.clusters import load_cluster, presets
from trainers import flops, hardware
from trainers.config import LearningConfig
from trainers.flops import Rows
from trainers.shape import ModelShape

# One block of hidden 4, query 4, keys 2, mlp 8; vocabulary 10: q 16, k 8, v 8, o 16, gate 32, up 32, down 32 = 144.
TINY = ModelShape("tiny", "llama", 4, 8, 1, 2, 1, 2, 10, 64, False)
BLOCK, HEAD = 144, 40
FULL = LearningConfig(adapter="full")
LORA = LearningConfig(adapter="lora", lora_rank=1)
ADAPTER = 8 + 6 + 6 + 8 + 12 + 12 + 12  # (in + out) of each


def test_full_fine_tuning_is_six_operations_a_weight_and_token() -> None:
    attention = 3 * 4 * 5 * 5 * 4  # forward and twice that backward: 4 · tokens² · query
    found = flops.of_rows(Rows([5], 2, 5), TINY, FULL, "none")
    assert found.model == 6 * 5 * BLOCK + 6 * 2 * HEAD + attention  # logits are asked for at the 2 targets
    assert found.hardware == 6 * 5 * (BLOCK + HEAD) + attention  # and were made at all 5 positions


def test_padding_is_computed_and_not_useful() -> None:
    one = flops.of_rows(Rows([5], 2, 5), TINY, FULL, "none")
    assert flops.of_rows(Rows([5, 2], 3, 10), TINY, FULL, "none").hardware == 2 * one.hardware
    both = flops.of_rows(Rows([5], 2, 5), TINY, FULL, "none") + flops.of_rows(Rows([2], 1, 2), TINY, FULL, "none")
    assert flops.of_rows(Rows([5, 2], 3, 10), TINY, FULL, "none").model == both.model


def test_frozen_weights_need_no_weight_gradient() -> None:
    attention = 3 * 4 * 5 * 5 * 4
    blocks = 5 * (4 * (BLOCK + ADAPTER) + 2 * ADAPTER)
    assert flops.of_rows(Rows([5], 2, 5), TINY, LORA, "none").model == blocks + 2 * 4 * HEAD + attention


def test_lora_takes_two_thirds_of_full_fine_tuning() -> None:
    """NeMo Automodel PR#786: with a share s of the weights trained, (1 + 1 + s) / 3; for 0.25 % that is 0.6675."""
    wide = ModelShape("wide", "llama", 4096, 4096, 1, 1, 1, 4096, 1, 64, False)
    learning = LearningConfig(adapter="lora", lora_rank=1, lora_targets="q_proj")
    # Seven square matrices and an output head of one row; rank 1 on one of them trains 8192.
    everything = 7 * 4096**2 + 4096 + 8192
    attention = 3 * 4 * 4096  # of a row of one token
    lora = flops.of_rows(Rows([1], 1, 1), wide, learning, "none").model - attention
    full = flops.of_rows(Rows([1], 1, 1), wide, FULL, "none").model - attention
    assert lora / full == pytest.approx((2 + 8192 / everything) / 3 * everything / (everything - 8192))


def test_recomputation_is_hardware_only() -> None:
    none, selective, full = (flops.of_rows(Rows([5], 2, 5), TINY, FULL, mode) for mode in ("none", "selective", "full"))
    assert none.model == selective.model == full.model
    # All but the last product, and attention.
    assert full.hardware - none.hardware == 2 * 5 * (BLOCK - 32) + 4 * 25 * 4
    # k, o and up: every second one, the first kept.
    assert selective.hardware - none.hardware == 2 * 5 * (8 + 16 + 32)


def test_a_published_step() -> None:
    """notes of the design: Llama-3-8B, 2,048 tokens: 3.294e13 forward, full recomputation 3.72 % less than forward."""
    llama = ModelShape("llama-3-8b", "llama", 4096, 14336, 32, 32, 8, 128, 128256, 8192, False)
    found = flops.of_rows(Rows([2048], 2048, 2048), llama, FULL, "none")
    assert found.model == pytest.approx(3 * 3.294e13, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "h100x8"),
        ("NVIDIA H200", "h200x8"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gx8"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gx8"),
        ("NVIDIA A10G", "a10gx4"),
        ("NVIDIA L40S", "l40sx4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090x2"),
    ],
)
def test_peaks_are_those_of_the_presets(name: str, preset: str) -> None:
    assert preset in presets()
    peaks = load_cluster(preset).peak_flops
    assert hardware.published(name, "bfloat16") == peaks.bf16
    assert hardware.published(name, "float32") == peaks.fp32


def test_a_device_that_is_not_known_has_no_peak() -> None:
    assert hardware.published("NVIDIA GeForce GTX 1080", "bfloat16") is None
