"""What a failure was: kinds kept apart, the root cause named before its consequences."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainers import oom
from trainers.errors import UserError
from trainers.result import GIB, Account, Accounts

FaultKind = Literal["device_oom", "host_oom", "library_oom", "killed_unproved", "illegal_config", "crash", "timeout"]

OUT_OF_MEMORY: frozenset[str] = frozenset({"device_oom", "host_oom", "library_oom"})

# A process that was killed says no more: what killed it is for its parent to prove.
_KILLED = re.compile(r"SIGKILL|exit ?code *[:=]? *-9\b|killed by signal: Killed|killed by signal 9")
_TIMED_OUT = "Timed out waiting"

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
    """Why a job ended: kind, the phase and rank where it failed first, one sentence, and the traceback.

    Where memory ran out also what is known of it, for `lines`.
    """

    kind: FaultKind
    phase: str
    rank: int
    message: str
    traceback: str = ""
    at: float = 0.0  # seconds since the epoch, by the clock of the rank's machine
    requested: int | None = None  # bytes of the allocation that failed
    limit: int | None = None  # bytes that memory_limit_gib allows, where it was this that was reached
    held: Accounts | None = None  # in use when it failed, where that was traced
    account: str = ""  # that was growing
    row: str = ""  # the longest one of the batch: file:line, tokens
    hint: str = ""
    consequences: tuple[str, ...] = ()  # what other ranks said afterwards

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Fault:
        """Read what dataclasses.asdict and JSON made of a fault."""
        held = Accounts(**data["held"]) if data["held"] else None
        return Fault(**{**data, "held": held, "consequences": tuple(data["consequences"])})

    @property
    def lines(self) -> list[str]:
        """What a person should know beside the message, a phrase each."""
        asked = f"{size(self.requested)} were asked for" if self.requested and not self.limit else ""
        growing = f"what was growing: {self.account.replace('_', ' ')}" if self.account else ""
        row = f"the longest row of the batch: {self.row}" if self.row else ""
        return [text for text in (asked, growing, self._in_use, row, self.hint, *self.consequences) if text]

    @property
    def _in_use(self) -> str:
        if self.held is None:
            return ""
        accounts = ", ".join(f"{name.replace('_', ' ')} {size(getattr(self.held, name))}" for name in Accounts.names())
        return f"in use then: {size(self.held.total)} ({accounts})"

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
    return _own_kind(_telling(error))


def _telling(error: BaseException) -> BaseException:
    """Return the exception that tells what happened: this one, or what it was raised from."""
    origin = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return _telling(origin) if _own_kind(error) == "crash" and origin is not None else error


def _own_kind(error: BaseException) -> FaultKind:
    if isinstance(error, UserError):
        return "illegal_config"
    if isinstance(error, MemoryError):
        return "host_oom"
    text = f"{type(error).__name__}: {error}"
    if (memory := oom.read(text)) is not None:
        return memory.kind
    if _KILLED.search(text):
        return "killed_unproved"
    if _TIMED_OUT in text:
        return "timeout"
    return "crash"


# What a phase adds to memory: the first where nothing tells, else the one that held most. After the first step of the
# optimizer nothing stays that was not there.
_GROWING: Mapping[str, tuple[Account, ...]] = {
    "load": ("weights",),
    "forward": ("activations", "temporary"),
    "backward": ("activations", "temporary", "gradients"),
    "first_optimizer_step": ("optimizer_state", "temporary"),
    "optimizer": ("temporary",),
    "eval": ("temporary",),
    "save": ("temporary",),
}


@dataclass(frozen=True)
class Running:
    """The micro batch that was running: its longest row, and the number of its logits; empty and 0 where unknown."""

    row: str = ""
    logits: int = 0


@dataclass(frozen=True)
class Use:
    """Memory of a rank when it failed: what was in use, where that was traced, and the bytes that were allowed."""

    held: Accounts | None = None
    limit: int | None = None


def fault_of(error: BaseException, phase: str, rank: int, running: Running, trace: str, use: Use = Use()) -> Fault:
    """Return the fault that an exception is; `trace`: its traceback."""
    first = str(error).strip().splitlines()[:1]
    message = f"{type(error).__name__}: {first[0] if first else 'no message'}"
    kind, telling = classify(error), _telling(error)
    if kind not in OUT_OF_MEMORY:
        return Fault(kind, phase, rank, message, trace, time.time())
    memory = oom.read(f"{type(telling).__name__}: {telling}")
    limited = use.held is not None or (memory is not None and memory.detail == "limit")
    limit = use.limit if limited else None
    requested = memory.requested if memory is not None else None
    if limit is not None:
        asked = size(requested) if requested else "more"
        beside = f" beside the {size(use.held.total)} in use" if use.held is not None else ""
        message = f"memory_limit_gib={limit / GIB:.4g} is reached: {asked} were asked for{beside}"
    # A request of their exact size, in half precision, float32 or float64, tells them better than a traceback can.
    of_logits = "in loss_sum" in trace or (requested or 0) in {running.logits * size for size in (2, 4, 8)} - {0}
    account = "temporary (logits and loss)" if of_logits else _growing(phase, use.held)
    in_batch = phase in ("forward", "backward")
    return Fault(
        kind,
        phase,
        rank,
        message,
        trace,
        time.time(),
        requested,
        limit,
        use.held,
        account,
        running.row if in_batch else "",
        memory.hint if memory is not None else "",
    )


def _growing(phase: str, held: Accounts | None) -> str:
    accounts = _GROWING.get(phase, ())
    return max(accounts, key=lambda name: getattr(held, name) if held is not None else 0, default="")


def size(count: int) -> str:
    """Write bytes in the unit that suits them."""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count} bytes"


def is_consequence(message: str) -> bool:
    """Tell whether an error only says that another rank is gone."""
    return any(text in message for text in _CONSEQUENCES)


def root_cause(faults: Mapping[int, Fault]) -> Fault:
    """Return the fault of the rank that failed first, with what the others said as its consequences.

    Out of memory goes before others, what only says that a peer is gone goes last; among equals the earliest.
    """
    assert faults, "a failed job has at least one fault"

    def order(fault: Fault) -> tuple[bool, bool, bool, float, int]:
        lost = is_consequence(fault.message)
        return lost, fault.kind not in OUT_OF_MEMORY, fault.kind == "timeout", fault.at, fault.rank

    cause = min(faults.values(), key=order)
    others = sorted((f for f in faults.values() if f is not cause), key=lambda f: f.rank)
    said = tuple(f"then rank {f.rank} in {f.phase}: {f.message[:120]}" for f in others)
    return replace(cause, consequences=cause.consequences + said)
