"""Peak memory by phase and account: traced allocations, and on CUDA what the allocator and the driver count."""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from trainers.config import TrialConfig
from trainers.diagnose import Running
from trainers.memory_trace import Limit, MemoryTrace, Owned
from trainers.ranks import World
from trainers.regions import region
from trainers.result import GIB, Accounts, PhaseMemory, RankMemory

ALWAYS = ("load", "eval", "save")  # phases that are no part of a timed step


class MemoryMeter:
    """Collects the peak of each phase of a job on this rank.

    `with meter.phase("forward"):` takes the peak inside. Accounts are known, and on CPU anything is, of phases that run
    while `tracing` is on: tracing slows small operations. On CUDA the allocator counts always, but asking it takes a
    tenth of a millisecond: of the steps that are timed only the peak over all of them is taken, as phase `training`.
    """

    def __init__(self, device: torch.device, limit: Limit | None = None, granule: int | None = None) -> None:
        self.device, self.limit, self._granule = device, limit, granule
        self.failed: Accounts | None = None  # what was in use when an operation of a traced phase failed
        # Where a failure happened: the phase that is running, or ran last; in it the micro batch, and what that holds.
        self.current = "load"
        self.micro_step = 0
        self.batch: Callable[[int], Running] = lambda _: Running()
        self._peaks: dict[str, RankMemory] = {}
        self._trace: MemoryTrace | None = None
        self._timed = False  # whether steps have run since the allocator was last asked
        self._retries = 0  # by then
        self.keep: Callable[[MemoryTrace], None] = lambda _: None  # is given every trace that has ended

    @contextmanager
    def tracing(self, owned: Owned) -> Iterator[None]:
        """Trace allocations inside; `owned` yields what lives between steps, when it is asked."""
        trace = MemoryTrace(self.device, owned, self.limit, self._granule)
        try:
            with trace:
                self._trace = trace
                try:
                    yield
                finally:
                    self._trace = None
                    self.failed = trace.failed
        finally:
            self.keep(trace)  # of a failure, too
        for name, peak in trace.peaks().items():
            total = peak.accounts.total
            allocated = self._peaks[name].allocated if self.device.type == "cuda" else total
            self._record(name, RankMemory(allocated, allocated, peak.accounts.filled(allocated), host=peak.host))

    def mark(self, part: str) -> None:
        """Say which part of the model runs from now on, for what looks at the trace by part."""
        if self._trace is not None:
            self._trace.mark(part)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Take the peak of what runs inside. A phase that fails has none."""
        self.current = name
        asked = self.device.type == "cuda" and (self._trace is not None or name in ALWAYS)
        if asked:
            self._ask("training")
            torch.cuda.reset_peak_memory_stats(self.device)
        if self._trace is not None:
            self._trace.start(name)
        with region(name):
            yield
        if self._trace is not None:
            self._trace.stop()
        self._timed = True
        if asked:
            self._ask(name)

    def _ask(self, name: str) -> None:
        """Record what the allocator of a CUDA device has counted since its peaks were last reset, if anything ran."""
        if self.device.type == "cuda" and self._timed:
            found = on_device(self.device, self._retries)
            self._retries += found.retries
            self._timed = False
            self._record(name, found)

    def _record(self, name: str, found: RankMemory) -> None:
        """Keep the larger of two runs of a phase."""
        known = self._peaks.get(name)
        if known is None:
            self._peaks[name] = found
            return
        higher = max(found, known, key=lambda m: m.allocated)
        # Of an untraced run no account is known but the sum; a traced one of the same phase tells what it is made of.
        traced = max(found, known, key=lambda m: m.accounts.total - m.accounts.temporary)
        self._peaks[name] = RankMemory(
            higher.allocated,
            max(found.reserved, known.reserved),
            traced.accounts.filled(higher.allocated),
            max(found.device_used, known.device_used),
            found.retries + known.retries,
            max(found.host, known.host),
        )

    def own_peaks(self) -> dict[str, RankMemory]:
        """Return this rank's peak of each phase so far."""
        return dict(self._peaks)

    def peaks(self, world: World) -> dict[str, PhaseMemory]:
        """Return each phase's peaks by rank. Every rank must call it."""
        self._ask("training")
        by_rank = world.gather(self.own_peaks())
        names = sorted({name for peaks in by_rank for name in peaks})
        nothing = RankMemory(0, 0, Accounts())
        return {name: PhaseMemory(tuple(peaks.get(name, nothing) for peaks in by_rank)) for name in names}


def limit_of(config: TrialConfig, world: World) -> Limit | None:
    """Return the limit on this rank's memory; on CUDA the allocator is told of it.

    The environment variables MEMORY_LIMIT_RANK and MEMORY_LIMIT_PHASE narrow it down on a CPU, to see what a person
    sees when one rank runs out of memory in one phase.
    """
    gib = config.run.memory_limit_gib
    if gib is None or os.environ.get("MEMORY_LIMIT_RANK", str(world.rank)) != str(world.rank):
        if world.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, world.device)  # of the job before
        return None
    if world.device.type == "cuda":
        total = torch.cuda.get_device_properties(world.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total), world.device)
    return Limit(int(gib * GIB), os.environ.get("MEMORY_LIMIT_PHASE"))


def on_device(device: torch.device, retries: int) -> RankMemory:
    """Return what the allocator and the driver say of a CUDA device; `retries`: those before."""
    allocated = torch.cuda.max_memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    return RankMemory(
        allocated,
        torch.cuda.max_memory_reserved(device),
        Accounts(temporary=allocated),
        total - free,
        torch.cuda.memory_stats(device)["num_alloc_retries"] - retries,
    )


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


_CGROUP = Path("/sys/fs/cgroup")


def oom_kills() -> int:
    """Return how many processes the kernel has ended for lack of memory in this control group; 0 where none says."""
    with suppress(OSError, ValueError):
        for line in (_CGROUP / "memory.events").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def host_usage() -> str:
    """Say how much host memory this control group has used at most, of how much; empty where none says."""
    with suppress(OSError, ValueError):
        peak = int((_CGROUP / "memory.peak").read_text())
        limit = (_CGROUP / "memory.max").read_text().strip()
        of = f" of {int(limit) / GIB:.2f}" if limit != "max" else ""
        return f"host memory peak {peak / GIB:.2f}{of} GiB"
    return ""
