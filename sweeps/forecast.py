"""What one configuration would take on a cluster: memory by the ledger, time by the closed form, and a verdict.

Memory is the ledger's; a verdict rests on its bounds. Time ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sweeps.candidates import Context, setting_of
from sweeps.clusters import ClusterPreset
from trainers import ledger, steptime
from trainers.ledger import MicroBatch
from trainers.result import GIB, Accounts
from trainers.shape import ModelShape
from trainers.steptime import Machine
from trainers.strategies import Setting

if TYPE_CHECKING:
    from sweeps.correction import Correction

Verdict = Literal["FITS", "AT_RISK", "OOM"]
BOUND = 0.15  # relative: by how much the ledger has been off at most, against simulations of unseen configurations
OUTSIDE_GIB, NCCL_GIB = 0.75, 0.75  # of a device outside torch's allocator: context and libraries; buffers of NCCL
PROCESS_GIB = 3.0  # of host memory: a rank's interpreter, libraries and what CUDA maps
HOST = "host memory"


@dataclass(frozen=True)
class Prediction:
    """One candidate, predicted for the rank that holds most."""

    config: Mapping[str, Any]
    """axes, flat"""
    verdict: Verdict
    phase: str
    """in which memory peaks; HOST where that of a node does not suffice"""
    account: str
    """the largest at that instant"""
    accounts: Accounts
    point_gib: float
    """of the device: allocated, and what is outside the allocator"""
    upper_gib: float
    """the same, with the error that such a prediction has had at most; of a simulation what is reserved"""
    host_gib: float
    """of a node's host memory, by all its ranks"""
    step_time_s: float
    tokens_per_second: float
    usd_per_million_tokens: float
    by: Literal["ledger", "simulation"] = "ledger"
    note: str = ""
    """why a simulation that was asked for is missing"""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Forecaster:
    """Predicts single configurations on a cluster."""

    context: Context
    cluster: ClusterPreset
    price: float
    correction: Correction | None = None

    def predict(self, config: Mapping[str, Any]) -> Prediction | None:
        """Return what a configuration, flat, would take; None where it is none."""
        setting, shape = setting_of(config, self.context), self.context.shape
        if setting is None or shape is None:
            return None
        seq_len, batch = setting.learning.seq_len, batch_of(setting)
        phase, accounts = ledger.peak(ledger.predict(shape, setting, batch))
        outside, allocated = outside_of(setting), accounts.total / GIB
        host = on_host(shape, setting, self.cluster)
        fits = verdict(allocated, outside, self.cluster.device_memory_gib)
        if host > self.cluster.host_memory_gib:
            fits, phase = "OOM", HOST
        time = steptime.predict(shape, setting, batch, machine(self.cluster))
        seconds = (self.correction.apply(time) if self.correction is not None else time).total
        tokens = setting.learning.global_batch_size * seq_len
        return Prediction(
            config,
            fits,
            phase,
            accounts.largest,
            accounts,
            allocated + outside,
            allocated * (1 + BOUND) + outside,
            host,
            seconds,
            tokens / seconds,
            self.price * setting.plan.world * seconds / 3600 / tokens * 1e6,
        )


def batch_of(setting: Setting) -> MicroBatch:
    """Return the largest micro batch that data can make: every row is `seq_len` tokens long, all of them targets."""
    return MicroBatch(setting.system.micro_batch_size, setting.learning.seq_len, setting.learning.seq_len)


def outside_of(setting: Setting) -> float:
    """Return the GiB of a device that are outside torch's allocator."""
    return OUTSIDE_GIB + (NCCL_GIB if setting.plan.world > 1 else 0.0)


def on_host(shape: ModelShape, setting: Setting, cluster: ClusterPreset) -> float:
    """Return the GiB of host memory of a node: what its ranks keep there, a copy of what is trained, and themselves.

    The copy is taken while a trial proves itself and rehearses. Weights are read in pieces, which the system caches and
    gives up where it must.
    """
    kept = ledger.on_host(shape, setting, batch_of(setting)) / GIB
    return min(setting.plan.world, cluster.devices_per_node) * (PROCESS_GIB + kept)


def verdict(allocated_gib: float, outside_gib: float, capacity_gib: float) -> Verdict:
    """Return whether it fits: for certain, for certain not, or within the ledger's error."""
    if allocated_gib * (1 + BOUND) + outside_gib <= capacity_gib:
        return "FITS"
    return "OOM" if allocated_gib * (1 - BOUND) + outside_gib > capacity_gib else "AT_RISK"


def machine(cluster: ClusterPreset) -> Machine:
    """Return a cluster's numbers as the closed form of time takes them."""
    return Machine(
        {"bfloat16": cluster.peak_flops.bf16, "float32": cluster.peak_flops.fp32},
        cluster.memory_bandwidth_bytes_per_s,
        cluster.intra_node_link_bytes_per_s,
        cluster.inter_node_link_bytes_per_s,
        cluster.host_link_bytes_per_s,
        cluster.devices_per_node,
    )
