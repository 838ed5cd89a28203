"""What a failure was: kinds kept apart, the root cause named before its consequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainers.errors import UserError

FaultKind = Literal["device_oom", "host_oom", "library_oom", "killed_unproved", "illegal_config", "crash", "timeout"]

OUT_OF_MEMORY: frozenset[str] = frozenset({"device_oom", "host_oom", "library_oom"})

# Text of an exception to its kind; the first match wins. Order matters: specific before general.
_PATTERNS: tuple[tuple[str, FaultKind], ...] = (
    ("CUDA out of memory", "device_oom"),
    ("HIP out of memory", "device_oom"),
    ("CUDA error: out of memory", "device_oom"),
    ("CUBLAS_STATUS_ALLOC_FAILED", "library_oom"),
    ("CUDNN_STATUS_ALLOC_FAILED", "library_oom"),
    ("Failed to CUDA calloc", "library_oom"),
    ("Cuda failure 'out of memory'", "library_oom"),
    ("DefaultCPUAllocator: can't allocate memory", "host_oom"),
    ("DefaultCPUAllocator: not enough memory", "host_oom"),
    ("node running low on memory", "host_oom"),
    ("due to memory pressure (OOM)", "host_oom"),
    ("Timed out waiting", "timeout"),
)

# A peer that died shows up in every other rank's collective: a consequence, not the cause.
_CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "gloo",
    "NCCL communicator was aborted",
    "ncclRemoteError",
    "DistStoreError",
    "DistBackendError",
    "Broken pipe",
)


@dataclass(frozen=True)
class Fault:
    """Why a job ended: kind, the phase and rank where it failed first, one sentence, and the traceback."""

    kind: FaultKind
    phase: str
    rank: int
    message: str
    traceback: str = ""

    @property
    def status(self) -> Literal["OOM", "INFEASIBLE", "FAILED"]:
        """The trial status that this fault means."""
        return "OOM" if self.kind in OUT_OF_MEMORY else "INFEASIBLE" if self.kind == "illegal_config" else "FAILED"


class WorkerFault(Exception):
    """A failure in a worker, with where it happened; survives pickling between processes."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(f"rank {fault.rank}, {fault.phase}: {fault.message}")

    def __reduce__(self) -> tuple[type[WorkerFault], tuple[Fault]]:
        return type(self), (self.fault,)


def classify(error: BaseException) -> FaultKind:
    """Return the kind of an exception, by its own type and text, or else by those of what it was raised from."""
    kind = _own_kind(error)
    origin = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return classify(origin) if kind == "crash" and origin is not None else kind


def _own_kind(error: BaseException) -> FaultKind:
    if isinstance(error, UserError):
        return "illegal_config"
    if isinstance(error, MemoryError):
        return "host_oom"
    text = f"{type(error).__name__}: {error}"
    for pattern, kind in _PATTERNS:
        if pattern in text:
            return kind
    return "device_oom" if type(error).__name__ == "OutOfMemoryError" else "crash"


def is_consequence(message: str) -> bool:
    """Tell whether an error only says that another rank is gone."""
    return any(text in message for text in _CONSEQUENCES)


def root_cause(faults: Mapping[int, Fault]) -> Fault:
    """Return the fault of the rank that failed first: out of memory before others, consequences last."""
    assert faults, "a failed job has at least one fault"

    def order(fault: Fault) -> tuple[bool, bool, bool, int]:
        return (is_consequence(fault.message), fault.kind not in OUT_OF_MEMORY, fault.kind == "timeout", fault.rank)

    return min(faults.values(), key=order)
