"""Peak memory by phase: the allocator's own peaks on CUDA, traced allocations on CPU."""

from __future__ import annotations

import gc
import resource
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainers.ranks import World
from trainers.result import PhaseMemory


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensor storages on the CPU while active, each storage once.

    Exact for what goes through the dispatcher; it does not see what libraries allocate by themselves.
    """

    def __init__(self, existing: Iterator[torch.Tensor]) -> None:
        super().__init__()
        self._live: dict[int, weakref.ref[Any]] = {}
        self.bytes = 0
        self.peak = 0
        for tensor in existing:
            self._see(tensor)
        self.peak = self.bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        self.peak = max(self.peak, self.bytes)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.device.type != "cpu":
            return
        storage = local.untyped_storage()
        key = storage._cdata
        if key in self._live or not storage.nbytes():
            return
        size = storage.nbytes()

        def freed(_: Any) -> None:
            del self._live[key]
            self.bytes -= size

        self._live[key] = weakref.ref(storage, freed)
        self.bytes += size


class MemoryMeter:
    """Collects the peak of each phase of a job on this rank.

    `with meter.phase("forward"):` takes the peak inside. On CPU a phase is traced only while `tracing` is on, since
    tracing slows small operations; on CUDA the allocator counts at no cost.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.current = "load"  # the phase that is running, or ran last: where a failure happened
        self._peaks: dict[str, tuple[int, int]] = {}
        self._trace: LiveBytes | None = None

    @contextmanager
    def tracing(self, existing: Iterator[torch.Tensor]) -> Iterator[None]:
        """Trace CPU allocations inside; `existing` are the tensors that are alive already."""
        if self.device.type == "cuda":
            yield
            return
        with LiveBytes(existing) as self._trace:
            try:
                yield
            finally:
                self._trace = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.current = name
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self._trace is not None:
            self._trace.peak = self._trace.bytes
        yield
        if self.device.type == "cuda":
            self._record(
                name, torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
            )
        elif self._trace is not None:
            self._record(name, self._trace.peak, self._trace.peak)

    def _record(self, name: str, allocated: int, reserved: int) -> None:
        before = self._peaks.get(name, (0, 0))
        self._peaks[name] = (max(before[0], allocated), max(before[1], reserved))

    def peaks(self, world: World) -> dict[str, PhaseMemory]:
        """Return each phase's peak over ranks, with the rank that had it. Every rank must call it."""
        names = sorted(self._peaks)
        result: dict[str, PhaseMemory] = {}
        for name in names:
            allocated, reserved = self._peaks[name]
            top = world.max([allocated, reserved])
            result[name] = PhaseMemory(int(top[0]), int(top[1]), world.argmax(allocated))
        return result


def return_memory() -> None:
    """Collect what nothing refers to, and give the device what its allocator has cached."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def reset_host_peak() -> None:
    """Forget the largest resident size so far, where the system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def host_peak_bytes() -> int:
    """Return the largest resident size that this process has had, in bytes; on Linux since it was last reset."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
