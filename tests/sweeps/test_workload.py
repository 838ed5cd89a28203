"""What data asks of a configuration, counted by hand; and the machine that a sweep's times are predicted for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sweeps.candidates import Cluster
from sweeps.clusters import load_cluster
from sweeps.machines import CPU, machine_here, machine_of
from sweeps.workload import FullRows, OfData
from trainers import hardware
from trainers.config import LearningConfig, SystemConfig, from_tree
from trainers.data import TokenizedDataset
from trainers.ledger import MicroBatch
from trainers.prepare import TrialData
from trainers.shape import ModelShape
from trainers.strategies import STRATEGIES, Setting

TINY = ModelShape("tiny", "llama", 64, 128, 2, 4, 2, 16, 256, 512, True)


def rows(*lengths: int) -> TrialData:
    """Rows of these lengths, the last half of each (rounded up) targets."""
    is_target = np.concatenate([np.arange(n) >= n // 2 for n in lengths])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.ones(sum(lengths), np.int32)
    found = TokenizedDataset(tokens, is_target, offsets, np.arange(len(lengths)), "rows")
    return TrialData(found, found, 0)


def setting(batch: int = 4, seq_len: int = 64, **system: Any) -> Setting:
    of_system = from_tree(SystemConfig, system)
    learning = from_tree(LearningConfig, {"global_batch_size": batch, "seq_len": seq_len})
    return Setting(learning, of_system, STRATEGIES[of_system.strategy].plan(of_system), TINY, "cpu")


def test_the_largest_micro_batch_and_the_usual_ones() -> None:
    """Rows of 2, 4, 6 and 8 tokens in one update, longest first, two at a time: 8 with 6, and 4 with 2.

    The largest is padded to 8 tokens; its targets are at columns 4 to 7 and 3 to 5: 5 columns. A window of a stratified
    draw holds each row once or so; over two windows of 4 rows, each row twice.
    """
    work = OfData({64: rows(2, 4, 6, 8)}, None, 1).of(setting(micro_batch_size=2))
    assert work.largest == MicroBatch(2, 8, 5)
    # Each row twice, in two windows: 20 tokens an update on average, half of them targets.
    assert (work.tokens, work.targets) == (20, 10)
    assert work.usual.rows == 2
    assert 5 <= work.usual.tokens <= 8


def test_two_ranks_share_an_update() -> None:
    """Every second row of the order is a rank's: 8 and 4, 6 and 2; one at a time the largest is 8."""
    work = OfData({64: rows(2, 4, 6, 8)}, None, 1).of(setting(micro_batch_size=1, num_workers=2))
    assert work.largest == MicroBatch(1, 8, 4)
    assert work.usual == MicroBatch(1, 5, 2)  # nothing is padded: 20 tokens of 4 rows, 10 of them targets (2.5 a row)


def test_what_a_run_never_meets_is_not_counted() -> None:
    """Two updates of one row, and then its 7 tokens are spent: the rows that are never trained on do not matter."""
    lengths = [3] * 50
    work = OfData({64: rows(*lengths, 60)}, 6, 1).of(setting(batch=1))
    met = OfData({64: rows(*lengths, 60)}, None, 1).of(setting(batch=1))
    assert (work.largest.tokens, met.largest.tokens) == (3, 60)


def test_a_plan_assumes_the_worst() -> None:
    work = FullRows().of(setting(batch=8, seq_len=32, micro_batch_size=4))
    assert (work.largest, work.tokens, work.targets) == (MicroBatch(4, 32, 32), 256, 256)


@pytest.mark.parametrize(
    ("name", "model", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "H100", "h100x8"),
        ("NVIDIA H100 PCIe", "H100", "h100x8"),
        ("NVIDIA H200", "H200", "h200x8"),
        ("NVIDIA L40S", "L40S", "l40sx4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", "rtx4090x2"),
        ("NVIDIA A10G", "A10G", "a10gx4"),
    ],
)
def test_the_machine_is_the_preset_of_the_device_that_is_there(name: str, model: str, preset: str) -> None:
    told: list[str] = []
    assert hardware.model_of(name) == model
    found = machine_here(Cluster("cuda", 1, "", model), None, told.append)
    assert found == machine_of(load_cluster(preset))
    assert told == []


def test_an_unknown_gpu_is_said_and_a_named_cluster_is_taken() -> None:
    told: list[str] = []
    assert machine_here(Cluster("cuda", 1, "", ""), None, told.append) == machine_of(load_cluster("h100x8"))
    assert told == ["no cluster preset has these GPUs: step times are predicted as on h100x8"]
    assert machine_here(Cluster("cuda", 1, ""), "l40sx4", told.append) == machine_of(load_cluster("l40sx4"))
    assert machine_here(Cluster("cpu", 1, ""), "l40sx4", told.append) == CPU
    assert len(told) == 1
