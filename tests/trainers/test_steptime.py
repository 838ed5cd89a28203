"""Seconds of an update in closed form, worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from trainers.config import LearningConfig, SystemConfig, from_tree
from trainers.ledger import MicroBatch
from trainers.shape import ModelShape
from trainers.steptime import Machine, predict, seconds, traffic
from trainers.strategies import STRATEGIES, Setting

SHAPE = ModelShape("llama-3.1-8b", "llama", 4096, 14336, 32, 32, 8, 128, 128256, 131072, False)
P = SHAPE.num_parameters
H100 = Machine({"bfloat16": 9.894e14, "float32": 6.69e13}, 3.35e12, 4.5e11, 5e10, 6.3e10, 8)
BATCH = MicroBatch(1, 4096, 4096)


def setting(adapter: str = "full", **system: Any) -> Setting:
    typed = from_tree(SystemConfig, system)
    learned = from_tree(LearningConfig, {"adapter": adapter, "global_batch_size": 64})
    return Setting(learned, typed, STRATEGIES[typed.strategy].plan(typed), SHAPE, "cuda")


def bytes_of(one: Setting, micro_batches: int) -> list[float]:
    return [t.bytes for t in traffic(SHAPE, one, BATCH, micro_batches)]


def test_six_operations_a_weight_and_token_at_45_percent_of_the_peak() -> None:
    """64 rows of 4,096 tokens on one device: 6 · 7.5e9 matrix weights, and attention 12 · layers · tokens² · q."""
    products = 6 * (P - SHAPE.vocab_size * 4096 - 65 * 4096) * 4096
    attention = 12 * 32 * 4096**2 * 4096
    found = predict(SHAPE, setting(), BATCH, H100)
    assert found.compute == pytest.approx(64 * (products + attention) / (0.45 * 9.894e14), rel=1e-3)
    assert (found.communication, found.bubble, found.transfer) == (0, 0, 0)
    assert found.optimizer == pytest.approx(28 * P / (0.8 * 3.35e12))
    assert found.total == found.compute + found.optimizer


def test_what_travels_in_an_update() -> None:
    """On 8 ranks with 4 micro batches, 7/8 of each: gradients of 4 bytes, weights of 2."""
    part = 7 / 8
    assert bytes_of(setting(num_workers=8), 4) == [pytest.approx(part * 2 * 4 * P)]
    sharded = {"strategy": "fsdp2", "num_workers": 8}
    assert bytes_of(setting(**sharded), 4) == [pytest.approx(part * (4 * 2 * 2 * P + 4 * 4 * P))]
    kept = {**sharded, "reshard_after_forward": False, "sync_each_batch": False}
    assert bytes_of(setting(**kept), 4) == [pytest.approx(part * (4 * 2 * P + 4 * P))]
    # Gradients beside the backward pass; new weights in the way of the next step.
    parts = setting(strategy="zero", zero_stage=2, num_workers=8)
    assert bytes_of(parts, 4) == [pytest.approx(part * 16 * P), pytest.approx(part * 2 * P)]
    assert [t.overlapped for t in traffic(SHAPE, parts, BATCH, 4)] == [True, False]


def test_tensor_parallelism_moves_every_token_eight_times_a_block() -> None:
    """Twice forward and twice backward a gather and a scatter of [tokens, hidden], bfloat16."""
    _, of_tp = bytes_of(setting(num_workers=2, tp=2), 1)
    assert of_tp == pytest.approx(8 * 32 * 4096 * 4096 * 2 / 2)


def test_a_pipelines_bubble_is_p_minus_1_over_m() -> None:
    found = predict(SHAPE, setting(num_workers=4, pp=4), BATCH, H100)
    assert found.bubble == pytest.approx(found.compute * 3 / 64)
    looped = predict(SHAPE, setting(num_workers=4, pp=4, pp_schedule="interleaved_1f1b"), BATCH, H100)
    assert looped.bubble == pytest.approx(found.bubble / 2)


def test_links_between_nodes_are_slower_and_computing_hides_what_it_can() -> None:
    """Two nodes of 8 with a link of 50 GB/s each: 400 GB/s a node, of which 80 % are reached. 25 MiB a sum."""
    inside = predict(SHAPE, setting(num_workers=8), BATCH, H100)
    assert inside.communication == 0  # 56 GB at 360 GB/s beside 4 s of computing
    (one,) = traffic(SHAPE, setting(num_workers=16), BATCH, 1)
    sums = math.ceil(4 * P / (25 * 2**20))
    rings = 2 * sums * (14 * 3.4e-6 + 1.4e-5)  # 15 steps around, of which one is between the nodes
    assert seconds(one, H100) == pytest.approx(15 / 16 * 2 * 4 * P / (0.8 * 4e11) + rings)
    across = predict(SHAPE, setting(num_workers=16), MicroBatch(1, 64, 64), replace(H100, operation=0.0))
    assert across.communication == pytest.approx(seconds(one, H100) - 0.9 * across.compute)


def test_one_gpu_of_each_node_has_one_link() -> None:
    """Copies of shards over nodes: all-reduce among every 8th rank, 50 GB/s; a pipeline's stage sends to the next."""
    hybrid = setting(strategy="fsdp2", num_workers=16, dp_replicate=2)
    shards, copies = traffic(SHAPE, hybrid, BATCH, 4)
    assert (shards.ranks, copies.ranks, copies.stride) == (8, 2, 8)
    assert copies.bytes == pytest.approx(2 * 0.5 * 4 * 4 * P / 8)
    groups = 4 * 2 * 33  # micro batches, twice around for a sum, blocks and the root
    assert seconds(copies, H100) == pytest.approx(copies.bytes / (0.8 * 5e10) + groups * 1.4e-5)


def test_small_work_is_bound_by_what_the_host_starts() -> None:
    """45 operations a block, twice as many backward, and 300 for what wraps each of 33 groups: 8 µs each.

    A host that computes itself does both in turn. On divided tensors an operation takes ten times as long to start.
    """
    tiny = MicroBatch(1, 1, 1)
    starting = 64 * (32 * 45 * 3 + 300 * 33) * 8e-6
    assert predict(SHAPE, setting(), tiny, replace(H100, memory_bandwidth=1e18)).compute == pytest.approx(starting)
    alone = predict(SHAPE, setting(), BATCH, replace(H100, operation=0.0)).compute
    assert predict(SHAPE, setting(), BATCH, replace(H100, overlap=0.0)).compute == pytest.approx(alone + starting)
    divided = predict(SHAPE, setting(num_workers=2, tp=2), tiny, replace(H100, memory_bandwidth=1e18)).compute
    assert divided == pytest.approx(64 * (10 * 32 * 45 * 3 + 300 * 33) * 8e-6)


def test_what_is_kept_on_the_host_has_to_travel() -> None:
    sharded = {"strategy": "fsdp2", "num_workers": 8}
    on_device, on_host = (predict(SHAPE, setting(**sharded, offload=o), BATCH, H100) for o in ("none", "parameters"))
    assert on_host.optimizer == pytest.approx(28 * P / 8 / 2.5e10)
    assert on_host.total > on_device.total
