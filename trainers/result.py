"""What one training job measured: plain values that cross process boundaries and are written as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

GIB = 2**30

StopReason = Literal["target", "budget", "nan", "diverged", "requested"]


@dataclass(frozen=True)
class Update:
    """One optimizer update, over all ranks. `loss`: mean over the window's targets, before the update."""

    update: int
    consumed_tokens: int  # non-pad training tokens up to and with this update
    tokens: int
    targets: int
    slots: int  # tokens computed, padding included
    loss: float
    grad_norm: float  # global, before clipping
    learning_rate: float
    step_time_s: float  # of the slowest rank


@dataclass(frozen=True)
class Evaluation:
    """One pass over the evaluation data after `consumed_tokens` training tokens."""

    update: int
    consumed_tokens: int
    loss: float  # mean over target tokens
    seconds: float


@dataclass(frozen=True)
class Save:
    """One save of model, optimizer, scheduler, random state and data position."""

    consumed_tokens: int
    seconds: float
    bytes: int


@dataclass(frozen=True)
class PhaseMemory:
    """Peak of one phase, in bytes. `reserved` is the allocator's on CUDA; on CPU it equals `allocated`."""

    allocated: int
    reserved: int
    worst_rank: int


@dataclass(frozen=True)
class TrialResult:
    """Everything a job measured. Histories are in order; failures are exceptions, not results."""

    stop_reason: StopReason
    updates: tuple[Update, ...]
    evaluations: tuple[Evaluation, ...]
    saves: tuple[Save, ...]
    memory: Mapping[str, PhaseMemory]
    host_peak_bytes: int
    fingerprints: tuple[str, ...]  # of the samples of each update
    seconds: Mapping[str, float]  # outside training: model, rehearsal, ...
    num_workers: int
    effective_config: Mapping[str, Any]  # as the worker read it
    environment: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> TrialResult:
        rows = dict(data)
        rows["updates"] = tuple(Update(**u) for u in data["updates"])
        rows["evaluations"] = tuple(Evaluation(**e) for e in data["evaluations"])
        rows["saves"] = tuple(Save(**s) for s in data["saves"])
        rows["memory"] = {name: PhaseMemory(**m) for name, m in data["memory"].items()}
        rows["fingerprints"] = tuple(data["fingerprints"])
        return TrialResult(**rows)
