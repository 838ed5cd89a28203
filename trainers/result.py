"""What one training job measured: plain values that cross process boundaries and are written as JSON."""

from __future__ import annotations

import dataclasses
import math
import statistics
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

GIB = 2**30

StopReason = Literal["target", "budget", "nan", "diverged", "dominated", "requested"]


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


@dataclass
class History:
    """What a run has done so far, in order. Every save holds it, so that a resumed run knows its whole past."""

    updates: list[Update] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)

    @property
    def consumed_tokens(self) -> int:
        """Non-pad training tokens so far."""
        return self.updates[-1].consumed_tokens if self.updates else 0

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; what is not finite becomes null."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> History:
        """Read the histories of what to_json wrote, here or in TrialResult; a null number is NaN again."""
        return History(
            [Update(**_numbers(u)) for u in data["updates"]],
            [Evaluation(**_numbers(e)) for e in data["evaluations"]],
            [Save(**s) for s in data["saves"]],
        )


Account = Literal["weights", "gradients", "optimizer_state", "activations", "temporary"]


@dataclass(frozen=True)
class Accounts:
    """Bytes by what they are for, at one instant."""

    weights: int = 0
    gradients: int = 0
    optimizer_state: int = 0  # master copies of the weights, too
    activations: int = 0  # what a forward pass leaves for the backward pass
    temporary: int = 0  # logits and loss, buffers of collectives, gathered weights, what optimizers and kernels need

    @staticmethod
    def names() -> tuple[Account, ...]:
        return typing.get_args(Account)

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer_state + self.activations + self.temporary

    @property
    def largest(self) -> Account:
        """The account that holds most."""
        return max(self.names(), key=lambda name: int(getattr(self, name)))

    def filled(self, total: int) -> Accounts:
        """Return these with as much more that is temporary as makes `total`: what no account was seen to hold."""
        return dataclasses.replace(self, temporary=max(0, self.temporary + total - self.total))


@dataclass(frozen=True)
class RankMemory:
    """Peak of one phase on one rank, in bytes. On CPU what is allocated is traced, and `reserved` equals it."""

    allocated: int
    reserved: int  # by the allocator: what it holds to give out again, too
    accounts: Accounts  # of what is allocated, at the instant of its peak
    device_used: int = 0  # CUDA: of the whole device, by whomever, when the phase ended
    retries: int = 0  # CUDA: how often the allocator gave back what it held to go on
    host: int = 0  # CUDA: of tensors in host memory


@dataclass(frozen=True)
class PhaseMemory:
    """Peaks of one phase, by rank."""

    ranks: tuple[RankMemory, ...]

    @property
    def worst_rank(self) -> int:
        """The rank with the most allocated: what is reserved is not given back between phases."""
        return max(range(len(self.ranks)), key=lambda r: self.ranks[r].allocated)

    @property
    def worst(self) -> RankMemory:
        return self.ranks[self.worst_rank]

    @property
    def allocated(self) -> int:
        return self.worst.allocated

    @property
    def reserved(self) -> int:
        return max(rank.reserved for rank in self.ranks)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> PhaseMemory:
        return PhaseMemory(tuple(RankMemory(**{**r, "accounts": Accounts(**r["accounts"])}) for r in data["ranks"]))


@dataclass(frozen=True)
class FirstUpdates:
    """Mean loss and global gradient norm of a run's first updates, without dropout."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]

    def difference(self, other: FirstUpdates) -> float:
        """Return the largest relative difference, over the updates that both have; NaN where one is not finite."""
        pairs = [*zip(self.losses, other.losses, strict=False), *zip(self.grad_norms, other.grad_norms, strict=False)]
        found = [abs(a - b) / abs(a) if a else abs(b) for a, b in pairs]
        return max(found, default=0.0) if all(math.isfinite(f) for f in found) else math.nan

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> FirstUpdates:
        return FirstUpdates(*(tuple(_number(v) for v in data[name]) for name in ("losses", "grad_norms")))


@dataclass(frozen=True)
class Reference:
    """What trials of a learning configuration are compared with."""

    source: Literal["one process", "this trial"]
    first: FirstUpdates
    noise: float  # how far `first` moves, relatively, when each window's samples come in another order
    dtype: str  # of compute


@dataclass(frozen=True)
class Miniature:
    """One step of a small model of the same architecture against one process."""

    difference: float  # the largest relative one, over loss, gradient norm and trained parameters
    dtype: str


@dataclass(frozen=True)
class Proof:
    """What tells whether a trial took the steps that one process would have taken."""

    first: FirstUpdates
    miniature: Miniature | None = None
    reference: Reference | None = None

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Proof:
        small, other = data["miniature"], data["reference"]
        return Proof(
            FirstUpdates.from_json(data["first"]),
            Miniature(**_numbers(small)) if small is not None else None,
            Reference(other["source"], FirstUpdates.from_json(other["first"]), _number(other["noise"]), other["dtype"])
            if other is not None
            else None,
        )


@dataclass(frozen=True)
class Speed:
    """Windows that stand for the data's lengths, timed again and again and then profiled; over all ranks.

    Counts and operations are of one round, which is all windows once.
    """

    rounds: tuple[tuple[float, ...], ...]  # seconds of each window, on the slowest rank
    tokens: int
    targets: int
    slots: int
    model_flops: float
    hardware_flops: float
    peak_flops: float | None  # FLOP/s of all devices together; None where it is not known
    precision: float  # half-width of the 95 % confidence interval of a round's time, relative
    parts: Mapping[str, float]  # of a profiled step, seconds, mean over ranks: see trainers.split
    profiled_step_s: float
    busy_s: tuple[float, ...]  # of a profiled step, by rank: without waiting for others
    noisy_rounds: tuple[int, ...]
    disturbances: tuple[str, ...]
    timed_s: float  # what measuring took: warm-up and rounds, then the profiled ones
    profiled_s: float
    dominated: bool = False  # others are better for certain: it was timed no longer, and not profiled

    @property
    def window_seconds(self) -> list[float]:
        """Median seconds of each window."""
        return [statistics.median(times) for times in zip(*self.rounds, strict=True)]

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Speed:
        rows = _numbers(data)
        rows["rounds"] = tuple(tuple(r) for r in data["rounds"])
        rows["peak_flops"] = data["peak_flops"]
        for name in ("busy_s", "noisy_rounds", "disturbances"):
            rows[name] = tuple(data[name])
        return Speed(**rows)


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
    proof: Proof | None = None
    speed: Speed | None = None  # None where it was not asked for: then training itself tells
    largest: Mapping[str, int] | None = None  # micro batch that the rehearsal ran: rows, tokens, heads (with logits)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; what is not finite becomes null."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> TrialResult:
        """Read what to_json wrote; a null number is NaN again."""
        rows = dict(data)
        rows |= {name: tuple(values) for name, values in vars(History.from_json(data)).items()}
        rows["memory"] = {name: PhaseMemory.from_json(m) for name, m in data["memory"].items()}
        rows["fingerprints"] = tuple(data["fingerprints"])
        rows["proof"] = Proof.from_json(data["proof"]) if data.get("proof") is not None else None
        rows["speed"] = Speed.from_json(data["speed"]) if data.get("speed") is not None else None
        return TrialResult(**rows)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _number(v) for k, v in row.items()}


def _number(value: Any) -> Any:
    return math.nan if value is None else value
