"""Every allocation of a step, and the account that it belongs to."""

from __future__ import annotations

import itertools
import resource
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from trainers import oom, regions
from trainers.allocator import GRANULE, Request
from trainers.result import Account, Accounts

Owned = Callable[[], Iterable[tuple[Account, torch.Tensor]]]
"""Yields the tensors that live between steps, each with its account."""

_NO_STREAM = torch.cpu.current_stream()
PAGE = 4096  # bytes: smaller requests are met from what the C library holds


@dataclass(frozen=True)
class Limit:
    """A device with less memory than this one: an allocation beyond `bytes` fails, in one phase or in all."""

    bytes: int
    phase: str | None = None


class Block:
    """A storage, and what decides its account."""

    __slots__ = ("account", "backward", "born", "recompute", "ref", "size", "stream")

    def __init__(self, size: int, born: int, backward: int, recompute: int, stream: int) -> None:
        self.size = size
        self.born = born  # backward passes that had begun before
        self.backward = backward  # the backward pass in which it was made, or -1
        self.recompute = recompute  # the recomputation in which it was made, or -1
        self.stream = stream  # on which it was made
        self.account: Account | None = None
        self.ref: weakref.ref[Any] | None = None


@dataclass
class Segment:
    """A stretch of the events: one run of a phase."""

    phase: str
    start: int
    end: int = -1


@dataclass(frozen=True)
class Part:
    """A stretch of a run of a phase: the run's number, its phase, the part of the model, and the how manieth of it."""

    run: int
    phase: str
    name: str
    occurrence: int


@dataclass(frozen=True)
class Peak:
    """The instant of a phase at which most bytes were alive; and the peak of those in host memory, on CUDA."""

    accounts: Accounts
    host: int


class MemoryTrace(TorchDispatchMode):
    """Notes every storage that is made and freed on a device while active, and sums them by account afterwards.

    Exact for what goes through the dispatcher; it does not see what kernels and libraries allocate by themselves.

    State is known from its owner. Of the rest, what a forward pass (or its repetition) makes and a backward pass still
    needs is activations; what a backward pass makes and leaves behind is gradients; all other is temporary: logits and
    loss, gathered weights and other buffers that change their size, what optimizers and collectives need.
    """

    def __init__(
        self, device: torch.device, owned: Owned, limit: Limit | None = None, granule: int | None = None
    ) -> None:
        """`granule`: bytes to a multiple of which the device's allocator rounds requests, where it is another's."""
        super().__init__()
        self._device, self._owned = device.type, owned
        self._limit = limit if device.type == "cpu" else None  # CUDA's allocator keeps its own
        self._granule = granule or (GRANULE if device.type == "cuda" else 1)
        self._alive: dict[int, Block] = {}
        self._events: list[tuple[int, Block]] = []  # bytes made (or freed, negative) of a block, in order
        self._host: list[tuple[int, int]] = []  # number of events before, bytes made or freed in host memory
        self._segments: list[Segment] = []
        self._marks: list[tuple[int, str]] = []  # number of events before, part of the model
        self._backwards = 0  # backward passes that have begun
        self._backward = -1  # torch's number of the latest one
        self._recomputations, self._recomputing = 0, False
        self.bytes = 0
        self._guessing = 0  # of a sharded tensor's operation, its result's shape: DTensor tries it on fake tensors
        self.failed: Accounts | None = None
        """what was in use when an operation first failed"""

    def __enter__(self) -> MemoryTrace:
        for account, tensor in self._owned():
            self._see(tensor)
            self._assign(tensor, account)
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = _noting(self, self._resize)  # type: ignore[method-assign]
        self._guess = ShardingPropagator._propagate_tensor_meta_non_cached
        ShardingPropagator._propagate_tensor_meta_non_cached = _apart(self, self._guess)  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        ShardingPropagator._propagate_tensor_meta_non_cached = self._guess  # type: ignore[method-assign]
        for block in self._alive.values():
            self._settle(block)
        self._alive.clear()  # what is freed from now on is not looked at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as what DTensor makes of it: local operations and collectives
        if self._guessing:
            return func(*args, **(kwargs or {}))
        try:
            result = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if oom.read(f"{type(error).__name__}: {error}") is not None:
                self._fail()
            raise
        self._where()
        before, events = self.bytes, len(self._events)
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        request = self.bytes - before
        if self._limit is not None and request >= PAGE and self.bytes > self._limit.bytes:
            self._keep(self._limit, request, events)
        if regions.inside(regions.LOSS):
            for leaf in tree_iter(args):  # the logits
                if isinstance(leaf, torch.Tensor):
                    self._assign(leaf, "temporary")
        return result

    def _keep(self, limit: Limit, request: int, events: int) -> None:
        """Let the latest request fail; `events`: the number of those before it."""
        phase = self._segments[-1].phase if self._segments and self._segments[-1].end < 0 else ""
        if limit.phase in (None, phase):
            self._fail(events)
            with _disable_current_modes():
                run_out(request)

    def _fail(self, events: int | None = None) -> None:
        """Note what is in use, once: the backward pass that would tell activations from the rest never comes."""
        if self.failed is None:
            with _disable_current_modes():
                for account, tensor in self._owned():
                    self._assign(tensor, account)
            loading = bool(self._segments) and self._segments[-1].phase == "load"
            for block in self._alive.values():
                if block.account is None and block.backward == block.recompute == -1:
                    block.account = "weights" if loading else "activations"
                self._settle(block)
            self.failed = Accounts(*self._levels()[len(self._events) if events is None else events])

    def start(self, phase: str) -> None:
        """Begin a run of a phase."""
        self._segments.append(Segment(phase, len(self._events)))

    def stop(self) -> None:
        """End the run of a phase that began last, and learn what became state in it."""
        self._segments[-1].end = len(self._events)
        for account, tensor in self._owned():
            self._assign(tensor, account)

    def mark(self, part: str) -> None:
        """Say which part of the model runs from now on."""
        self._marks.append((len(self._events), part))

    def peaks(self) -> dict[str, Peak]:
        """Return the peak of each phase, over all its runs."""
        levels = self._levels()
        found: dict[str, Peak] = {}
        for segment in self._segments:
            end = segment.end if segment.end >= 0 else len(self._events)
            peak = Peak(Accounts(*max(levels[segment.start : end + 1], key=sum)), self._host_peak(segment.start, end))
            found[segment.phase] = larger(found[segment.phase], peak) if segment.phase in found else peak
        return found

    def timeline(self) -> dict[str, Any]:
        """Return the bytes of each account after every event, and which events each run of a phase spans."""
        phases = [{"phase": s.phase, "first": s.start, "end": s.end} for s in self._segments]
        return {"accounts": Accounts.names(), "phases": phases, "bytes": self._levels()[1:]}

    def parts(self) -> dict[Part, list[tuple[int, ...]]]:
        """Return the accounts, as `_levels` has them, before and after every event of each part that was marked."""
        levels = self._levels()
        found: dict[Part, list[tuple[int, ...]]] = {}
        for run, segment in enumerate(self._segments):
            seen: Counter[str] = Counter()
            inside = [(at, part) for at, part in self._marks if segment.start <= at < segment.end]
            stretches = [(segment.start, ""), *inside, (segment.end, "")]
            for (start, part), (end, _) in itertools.pairwise(stretches):
                found[Part(run, segment.phase, part, seen[part])] = levels[start : end + 1]
                seen[part] += 1
        return found

    def requests(self) -> list[tuple[str, list[Request]]]:
        """Return what was asked of the device's allocator and given back, in order, up to the end of each phase's run.

        A run's requests hold those since the run before it.
        """
        sizes: Counter[int] = Counter()
        found = []
        start = 0
        for segment in self._segments:
            requests = []
            for change, block in self._events[start : segment.end]:
                key = id(block)
                if sizes[key]:
                    requests.append(Request(key, 0))
                sizes[key] += change
                if sizes[key]:
                    requests.append(Request(key, sizes[key], block.stream))
            found.append((segment.phase, requests))
            start = segment.end
        return found

    def _levels(self) -> list[tuple[int, ...]]:
        """Return the bytes of each account, in the order of Accounts, before the first event and after every one."""
        sums = dict.fromkeys(Accounts.names(), 0)
        levels = [tuple(sums.values())]
        for change, block in self._events:
            sums[block.account or "temporary"] += change
            levels.append(tuple(sums.values()))
        return levels

    def _host_peak(self, start: int, end: int) -> int:
        level = peak = 0
        for at, change in self._host:
            level += change
            if start <= at <= end:
                peak = max(peak, level)
            elif at < start:
                peak = level
        return peak

    def _where(self) -> int:
        """Return torch's number of the backward pass that is running, or -1; and keep count."""
        task = torch._C._current_graph_task_id()
        if task != -1 and task != self._backward:
            self._backward = task
            self._backwards += 1
        recomputing = regions.inside(regions.RECOMPUTE)
        self._recomputations += recomputing and not self._recomputing
        self._recomputing = recomputing
        return task

    def _stream(self) -> int:
        """Return the number of the current stream; on the CPU there are none, but those who use them say so."""
        stream: Any = torch.cuda.current_stream() if self._device == "cuda" else torch.cpu.current_stream()
        if stream is _NO_STREAM:
            return 0
        return int(stream.cuda_stream) if self._device == "cuda" else id(stream)

    def _see(self, tensor: torch.Tensor) -> None:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.device.type != "meta":
            self._see_storage(local.untyped_storage(), local.device.type == self._device)

    def _see_storage(self, storage: Any, on_device: bool) -> None:
        key = storage._cdata
        if key in self._alive or not storage.nbytes():
            return
        task = self._where()
        recomputation = self._recomputations if self._recomputing else -1
        block = Block(0, self._backwards, task, recomputation, self._stream())
        block.account = "temporary" if regions.inside(regions.LOSS) else None
        self._alive[key] = block

        def freed(_: Any) -> None:
            if self._alive.pop(key, None) is not None:
                self._settle(block)
                self._change(block, -block.size, on_device)

        block.ref = weakref.ref(storage, freed)
        self._change(block, storage.nbytes(), on_device)

    def _change(self, block: Block, change: int, on_device: bool) -> None:
        before = self._rounded(block.size)
        block.size += change
        rounded = self._rounded(block.size) - before
        if on_device:
            self._events.append((rounded, block))
            self.bytes += rounded
        else:
            self._host.append((len(self._events), change))

    def _rounded(self, size: int) -> int:
        return -(-size // self._granule) * self._granule

    def _resized(self, storage: Any) -> None:
        on_device = storage.device.type in (self._device, "meta")  # those of fake tensors are on no device
        self._see_storage(storage, on_device)
        block = self._alive.get(storage._cdata)
        if block is not None:
            block.account = block.account or "temporary"  # FSDP2's way to free and to get again what it gathers
            if change := storage.nbytes() - block.size:
                self._change(block, change, on_device)

    def _assign(self, tensor: torch.Tensor, account: Account) -> None:
        local = getattr(tensor, "_local_tensor", tensor)
        block = self._alive.get(local.untyped_storage()._cdata) if local.device.type != "meta" else None
        if block is not None:
            block.account = block.account or account

    def _settle(self, block: Block) -> None:
        """Decide the account of a block that is freed now, or alive at the end."""
        if block.account is not None:
            return
        task = self._where()
        if block.recompute != -1:
            still_recomputing = self._recomputing and block.recompute == self._recomputations
            block.account = "temporary" if still_recomputing else "activations"
        elif block.backward != -1:
            block.account = "temporary" if task == block.backward else "gradients"
        else:
            block.account = "activations" if self._backwards > block.born else "temporary"


def run_out(request: int) -> NoReturn:
    """Let an allocation of `request` bytes fail as it does when the machine has no more: by torch's own allocator."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    held = []
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used, before[1]))
    try:
        while True:  # what the C library has kept from earlier tensors may serve the first ones
            held.append(torch.empty(request, dtype=torch.uint8))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def larger(a: Peak, b: Peak) -> Peak:
    """Return the higher of two peaks, with the higher of both in host memory."""
    return replace(a if a.accounts.total >= b.accounts.total else b, host=max(a.host, b.host))


def _noting(trace: MemoryTrace, resize: Any) -> Any:
    """Return `resize_` of storages, which no dispatcher sees, told to a trace."""

    def resize_(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        trace._resized(storage)
        return result

    return resize_


def _apart(trace: MemoryTrace, guess: Any) -> Any:
    """Return the method by which DTensor learns the shape of a result, kept out of a trace."""

    def guessing(*args: Any, **kwargs: Any) -> Any:
        trace._guessing += 1
        try:
            return guess(*args, **kwargs)
        finally:
            trace._guessing -= 1

    return guessing
