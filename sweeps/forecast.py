"""What one configuration would take on a cluster: memory by the ledger, time by the closed form, and a verdict.

Memory is the ledger's; a verdict rests on its bounds. Time ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sweeps.candidates import Context
from sweeps.clusters import ClusterPreset
from sweeps.predict import predict
from trainers import ledger
from trainers.ledger import MicroBatch
from trainers.result import GIB, Accounts
from trainers.shape import ModelShape
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
    started: bool = False
    """whether the host's starting of operations decides the step time"""
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
    limit_gib: float | None = None
    """of a device's memory, where less of it may be used"""

    @property
    def capacity_gib(self) -> float:
        """Memory of a device that may be used."""
        there = self.cluster.device_memory_gib
        return there if self.limit_gib is None else min(there, self.limit_gib)

    def predict(self, config: Mapping[str, Any]) -> Prediction | None:
        """Return what a configuration, flat, would take; None where it is none."""
        found, shape = predict(config, self.context), self.context.shape
        if found is None or found.time is None or shape is None:
            return None
        setting, phase, accounts = found.setting, found.phase, found.accounts
        outside, allocated = outside_of(setting), accounts.total / GIB
        host = on_host(shape, setting, found.work.largest, self.cluster)
        fits = verdict(allocated, outside, self.capacity_gib)
        if host > self.cluster.host_memory_gib:
            fits, phase = "OOM", HOST
        seconds = (self.correction.apply(found.time) if self.correction is not None else found.time).total
        tokens = found.work.tokens
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
            started=found.time.started,
        )


def outside_of(setting: Setting) -> float:
    """Return the GiB of a device that are outside torch's allocator."""
    return OUTSIDE_GIB + (NCCL_GIB if setting.plan.world > 1 else 0.0)


def on_host(shape: ModelShape, setting: Setting, batch: MicroBatch, cluster: ClusterPreset) -> float:
    """Return the GiB of host memory of a node: what its ranks keep there, a copy of what is trained, and themselves.

    The copy is taken while a trial proves itself and rehearses. Weights are read in pieces, which the system caches and
    gives up where it must.
    """
    kept = ledger.on_host(shape, setting, batch) / GIB
    return min(setting.plan.world, cluster.devices_per_node) * (PROCESS_GIB + kept)


def verdict(allocated_gib: float, outside_gib: float, capacity_gib: float) -> Verdict:
    """Return whether it fits: for certain, for certain not, or within the ledger's error."""
    if allocated_gib * (1 + BOUND) + outside_gib <= capacity_gib:
        return "FITS"
    return "OOM" if allocated_gib * (1 - BOUND) + outside_gib > capacity_gib else "AT_RISK"
