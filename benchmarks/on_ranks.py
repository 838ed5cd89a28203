"""Rows that are run on gloo ranks for prediction.py: what each took, as torch.profiler and the clock saw it."""

from __future__ import annotations

import gc
import itertools
import statistics
import tempfile
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_check import save_random
from tests.rank_pool import RankPool
from trainers import hardware
from trainers.config import LearningConfig, SystemConfig, from_tree
from trainers.layout import Layout
from trainers.ledger import MicroBatch
from trainers.memory import MemoryMeter
from trainers.ranks import current
from trainers.result import Account, Accounts
from trainers.shape import ModelShape
from trainers.simulate import imagined
from trainers.split import muted
from trainers.steptime import Machine
from trainers.strategies import STRATEGIES, Setting

SHAPE = ModelShape("small", "llama", 256, 704, 6, 8, 4, 32, 8192, 1024, False)
WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "ddp": {"num_workers": 2},
    "fsdp2": {"strategy": "fsdp2", "num_workers": 2},
    "fsdp2 kept": {"strategy": "fsdp2", "num_workers": 2, "reshard_after_forward": False},
    "fsdp2 recomputed": {"strategy": "fsdp2", "num_workers": 2, "activation_checkpointing": "full"},
    "zero 1": {"strategy": "zero", "zero_stage": 1, "num_workers": 2},
    "zero 2": {"strategy": "zero", "zero_stage": 2, "num_workers": 2},
    "zero 3": {"strategy": "zero", "zero_stage": 3, "num_workers": 2},
    "zero 1 of torch": {"strategy": "zero", "zero_stage": 1, "zero_engine": "torch", "num_workers": 2},
    "tp": {"num_workers": 2, "tp": 2},
    "pp": {"num_workers": 2, "pp": 2},
    "cp": {"num_workers": 2, "cp": 2},
}
ADAPTERS, LENGTHS, MICRO = ("full", "lora"), (128, 256), (1, 4)
ROWS = 8  # of a window on each rank
# Updates: the first makes the optimizer's state, and DistributedDataParallel its buckets anew after it.
WARM_UP, PROFILED, TIMED = 2, 3, 5
PATIENCE = 0.004  # seconds


@dataclass(frozen=True)
class Row:
    """What is run."""

    way: str
    adapter: str
    tokens: int
    micro: int

    @property
    def name(self) -> str:
        return f"{self.way}, {self.adapter}, {self.micro} × {self.tokens}"

    def setting(self) -> Setting:
        system = from_tree(SystemConfig, {**WAYS[self.way], "micro_batch_size": self.micro})
        plan = STRATEGIES[system.strategy].plan(system)
        learning = from_tree(LearningConfig, {"adapter": self.adapter, "global_batch_size": ROWS * plan.dp})
        return Setting(learning, system, plan, SHAPE, "cpu")

    def batch(self) -> MicroBatch:
        return MicroBatch(self.micro, self.tokens, self.tokens)


@dataclass(frozen=True)
class Measured:
    """Of the rank that held most: bytes at the peak, gloo's beside them; what lives between updates; seconds."""

    peak: int
    gloo: int
    stored: Accounts
    step_time_s: float


def every_row() -> list[Row]:
    """Return all rows, such that the first ones are of different ways.

    Of the four sizes a way has the least and the most, or the two between, and in turn with its adapter.
    """
    short, long = LENGTHS
    few, many = MICRO
    sizes = (((short, few), (long, many)), ((short, many), (long, few)))
    return [
        Row(way, adapter, *sizes[(i + j) % 2][k])
        for k, (j, adapter) in itertools.product((0, 1), enumerate(ADAPTERS))
        for i, way in enumerate(WAYS)
    ]


class Ranks:
    """Pools of gloo ranks, one for each size, and a model that they load."""

    def __enter__(self) -> Ranks:
        self._folder = tempfile.TemporaryDirectory(prefix="prediction-")
        save_random(SHAPE, Path(self._folder.name))
        self._pools: dict[int, RankPool] = {}
        return self

    def __exit__(self, *_: Any) -> None:
        for pool in self._pools.values():
            pool.kill()
        self._folder.cleanup()

    def run(self, row: Row) -> Measured:
        found = self._pool(row.setting().plan.world).run(measure, self._folder.name, row, timeout_s=300.0)
        most = max(found, key=lambda measured: measured.peak)
        return replace(most, step_time_s=max(measured.step_time_s for measured in found))

    def machine(self) -> Machine:
        """Return what two ranks of this machine reach: their best product, and what an all-reduce carries."""
        flops, link, latency = self._pool(2).run(probe)[0]
        peaks = {"float32": flops, "bfloat16": flops}
        return Machine(peaks, 1e10, link, link, link, 2, latency, latency, operation=1.5e-5, overlap=0.0)

    def _pool(self, size: int) -> RankPool:
        return self._pools.setdefault(size, RankPool(size))


def probe() -> tuple[float, float, float]:
    """Return the FLOP/s of this rank beside the others, the bytes a second of its link, and its latency in seconds."""
    hops = 2 * (dist.get_world_size() - 1)

    def all_reduced(numbers: int) -> float:
        buffer = torch.ones(numbers)
        dist.all_reduce(buffer)
        start = time.perf_counter()
        for _ in range(5):
            dist.all_reduce(buffer)
        return (time.perf_counter() - start) / 5

    large = 2**20
    link = hops / dist.get_world_size() * 4 * large / all_reduced(large)
    return hardware.measured(torch.float32), link, all_reduced(1) / hops


def measure(folder: str, row: Row) -> Measured:
    """Build and do updates under torch's profiler, then some more against the clock, on this rank.

    Of the profiled updates the one with the lowest peak counts: gloo's threads let go of buffers a while after a
    collective is done, and Python collects what it does not free at once.
    """
    setting, world = row.setting(), current("cpu")
    layout = Layout(setting.plan, world)
    micro_batches = setting.micro_batches
    meter = MemoryMeter(torch.device("cpu"))
    begun = []
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with muted(), profiler:
        strategy = STRATEGIES[setting.system.strategy]
        engine = strategy.make_engine(folder, None, setting, layout, WARM_UP + PROFILED + TIMED)
        for _ in range(WARM_UP + PROFILED):
            gc.collect()
            begun.append(time.time_ns())  # the profiler's clock, too
            with Patient():
                engine.step([imagined(row.batch(), setting) for _ in range(min(2, micro_batches))], 1, meter)
        begun.append(time.time_ns())
    try:
        peaks = highest(memory_events(profiler), begun[WARM_UP:])
        peak, gloo = min(peaks)
        stored = sizes(engine.owned())
        seconds = []
        for _ in range(TIMED):
            start = time.perf_counter()
            engine.step([imagined(row.batch(), setting) for _ in range(micro_batches)], 1, meter)
            world.synchronize()
            seconds.append(time.perf_counter() - start)
        return Measured(peak, gloo, stored, statistics.median(seconds))
    finally:
        engine.close()


def sizes(owned: Iterable[tuple[Account, torch.Tensor]]) -> Accounts:
    """Return the bytes of tensors by account, every storage once."""
    seen: dict[int, tuple[Account, int]] = {}
    for account, tensor in owned:
        storage = tensor.untyped_storage()
        seen.setdefault(storage.data_ptr(), (account, storage.nbytes()))
    return Accounts(**{name: sum(n for a, n in seen.values() if a == name) for name in Accounts.names()})


@dataclass(frozen=True)
class Change:
    """Bytes made (or freed: negative) at an address, and whether within an operation of gloo's."""

    time: int
    bytes: int
    address: int
    gloo: bool
    freed: bool = False
    """whether the profiler sees it freed later"""


def memory_events(profiler: Any) -> list[Change]:
    """Return what the profiler saw allocated and freed on the CPU, in order."""

    def walk(events: Iterable[Any], inside: bool) -> Iterator[Change]:
        for event in events:
            if event.tag.name == "Allocation":
                fields = event.extra_fields
                yield Change(event.start_time_ns, fields.alloc_size, fields.ptr, inside)
            yield from walk(event.children, inside or event.name.startswith(("c10d::", "gloo:")))

    tree = profiler.profiler.kineto_results.experimental_event_tree()
    found = sorted(walk(tree, False), key=lambda c: c.time)
    made: dict[int, int] = {}  # by address, the position of the latest
    for i, change in enumerate(found):
        if change.bytes >= 0:
            made[change.address] = i
        elif (block := made.pop(change.address, None)) is not None:
            found[block] = replace(found[block], freed=True)
    return found


class Patient(TorchDispatchMode):
    """Waits a while before and after it waits for a collective.

    What gloo's threads free is not seen by the profiler. They are then done with a buffer before anybody else is.
    """

    def __enter__(self) -> Patient:
        self._wait = dist.Work.wait

        def wait(work: Any, *args: Any) -> Any:
            result = self._wait(work, *args)
            time.sleep(PATIENCE)
            return result

        dist.Work.wait = wait  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        dist.Work.wait = self._wait  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.wait_tensor.default:
            time.sleep(3 * PATIENCE)
        return func(*args, **(kwargs or {}))


class Alive:
    """The blocks that are in use. What gloo's threads free the profiler does not see: its place is taken by others."""

    def __init__(self) -> None:
        self._blocks: dict[int, Change] = {}
        self._addresses: list[int] = []  # of these, ascending
        self.own = self.gloo = 0  # bytes

    def apply(self, change: Change) -> None:
        if change.bytes < 0:
            self._drop(change.address)
            return
        while (found := self._overlapped(change)) is not None:
            self._drop(found)
        self._blocks[change.address] = change
        insort(self._addresses, change.address)
        self._count(change, change.bytes)

    def forget(self, since: int, until: int) -> None:
        """Drop the blocks that were made between two instants and that nobody is seen to free later."""
        for block in [b for b in self._blocks.values() if since <= b.time < until and not b.freed]:
            self._drop(block.address)

    def _overlapped(self, change: Change) -> int | None:
        """Return the address of a block that lies where a new one was made."""
        before = bisect_right(self._addresses, change.address + change.bytes - 1) - 1
        if before < 0:
            return None
        block = self._blocks[self._addresses[before]]
        return block.address if block.address + block.bytes > change.address else None

    def _drop(self, address: int) -> None:
        block = self._blocks.pop(address, None)
        if block is not None:
            del self._addresses[bisect_left(self._addresses, address)]
            self._count(block, -block.bytes)

    def _count(self, block: Change, size: int) -> None:
        if block.gloo:
            self.gloo += size
        else:
            self.own += size


def highest(changes: Iterable[Change], begun: Sequence[int]) -> list[tuple[int, int]]:
    """Return the bytes without gloo's, and gloo's, at the instant of each update when most others were alive.

    `begun`: when the updates began, and when the last one ended. What lives from one to the next was there before the
    first of them, or is freed in the next: what else is left of an update was freed unseen.
    """
    alive, current = Alive(), 0
    best = [(0, 0)] * (len(begun) - 1)
    for change in changes:
        update = bisect_right(begun, change.time) - 1
        if update > current:
            alive.forget(begun[0], begun[update])
            current = update
        alive.apply(change)
        if 0 <= update < len(best) and alive.own > best[update][0]:
            best[update] = alive.own, alive.gloo
    return best
