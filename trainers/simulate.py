"""A step of the real code on fake tensors: what a rank of any world would allocate, without memory, weights or GPU.

The model, its adapter, the way it is divided, the engine and the loss are those that train; tensors have shapes and no
data, and the process group sends nothing. On the CPU, whatever the device: there torch's attention keeps what the
kernels of CUDA keep, and fake tensors of CUDA need CUDA. What is not seen: the CUDA context, the workspaces of
libraries, the buffers of NCCL.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainers import depth
from trainers.allocator import GRANULE, Allocator
from trainers.engine import Engine
from trainers.gradients import local
from trainers.layout import Layout
from trainers.ledger import MicroBatch
from trainers.memory import MemoryMeter
from trainers.memory_trace import MemoryTrace
from trainers.ranks import World
from trainers.result import RankMemory
from trainers.shape import ModelShape
from trainers.strategies import STRATEGIES, Setting
from trainers.strategies.pipeline import number_of_stages
from trainers.task import Simulated, Task
from trainers.token_loss import Batch, keeps_heads
from trainers.weights import Weights

CPU = torch.device("cpu")


class CannotSimulate(Exception):
    """This setting has a part that does not run on fake tensors."""


def simulate(shape: ModelShape, setting: Setting, batch: MicroBatch, rank: int = 0) -> dict[str, RankMemory]:
    """Return the peak of each phase on one rank, in two updates whose micro batches are all `batch`.

    On CUDA `reserved` is what the caching allocator would hold. For a process of its own: it joins a fake process
    group, of which there must be none, and leaves it again. Raises CannotSimulate.
    """
    loading, steps = _traced(shape, setting, batch, rank)
    peaks = {name: peak.accounts for trace in (loading, steps) for name, peak in trace.peaks().items()}
    reserved = _reserved(steps) if setting.device == "cuda" else {}
    return {name: RankMemory(a.total, max(a.total, reserved.get(name, 0)), a) for name, a in peaks.items()}


def extrapolate(shape: ModelShape, setting: Setting, batch: MicroBatch, rank: int = 0) -> dict[str, RankMemory]:
    """Return the peaks that `simulate` returns, from two models of fewer blocks; what is reserved is not told.

    Raises CannotSimulate where blocks are not the same on all ranks, or where the two ran differently.
    """
    stages = number_of_stages(setting)
    if shape.num_hidden_layers % stages or shape.num_hidden_layers // stages <= depth.DEEP:
        return simulate(shape, setting, batch, rank)

    def of(blocks: int) -> depth.Traced:
        small = dataclasses.replace(shape, num_hidden_layers=blocks * stages)
        loading, steps = _traced(small, dataclasses.replace(setting, shape=small), batch, rank)
        return depth.Traced(blocks, {**loading.parts(), **steps.parts()})

    try:
        found = depth.extrapolated(of(depth.SHALLOW), of(depth.DEEP), shape.num_hidden_layers // stages)
    except ValueError as error:
        raise CannotSimulate(f"two depths do not run alike: {error}") from error
    return {name: RankMemory(a.total, a.total, a) for name, a in found.items()}


def _reserved(trace: MemoryTrace) -> dict[str, int]:
    """Return the bytes that CUDA's caching allocator would have reserved by the end of each phase's last run."""
    allocator = Allocator()
    return {phase: allocator.replay(requests) for phase, requests in trace.requests()}


def _traced(shape: ModelShape, setting: Setting, batch: MicroBatch, rank: int) -> list[MemoryTrace]:
    """Return the trace of loading, and that of two updates and an evaluation."""
    if setting.device == "cuda" and (setting.system.offload_activations or _offloads(setting)):
        raise CannotSimulate("what is offloaded from CUDA to host memory cannot be told apart on fake tensors")
    meter = MemoryMeter(CPU, granule=GRANULE if setting.device == "cuda" else None)
    with fake_group(rank, setting.plan.world), tempfile.TemporaryDirectory(prefix="simulated-") as folder:
        Path(folder, "config.json").write_text(json.dumps(shape.to_hf_config()))
        layout = Layout(setting.plan, World(rank, setting.plan.world, CPU))
        _ = layout.mesh, layout.data, layout.shard  # a mesh is made of real tensors
        with pretended(), agreed(setting):
            return _stepped(folder, setting, layout, batch, meter)


def _stepped(folder: str, setting: Setting, layout: Layout, batch: MicroBatch, meter: MemoryMeter) -> list[MemoryTrace]:
    traces: list[MemoryTrace] = []
    meter.keep = traces.append
    made: list[Engine] = []
    with ExitStack() as fake, ExitStack() as loading:

        def begin() -> None:  # before, all is on the meta device, and adapters could not be put on fake tensors
            fake.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            fake.enter_context(Scalars())
            loading.enter_context(meter.tracing(lambda: made[0].owned() if made else ()))
            loading.enter_context(meter.phase("load"))

        strategy = STRATEGIES[setting.system.strategy]
        made.append(strategy.make_engine(folder, None, setting, layout, 2, weights=Imagined(begin)))
        loading.close()
        for i, part in enumerate(getattr(made[0], "parts", (made[0].module,))):
            depth.mark(part, str(i), meter)
        with meter.tracing(made[0].owned):
            for steps in (1, min(2, setting.micro_batches)):
                made[0].step([imagined(batch, setting) for _ in range(steps)], 1, meter)
            with meter.phase("eval"):
                made[0].evaluate([imagined(batch, setting)])
        made.pop().close()
    return traces


def imagined(batch: MicroBatch, setting: Setting) -> Batch:
    """Return a micro batch without content, as the feed gives it."""
    tokens = {name: torch.zeros(batch.rows, batch.tokens, dtype=torch.int64) for name in ("input_ids", "labels")}
    if not keeps_heads(setting):
        return tokens
    return {**tokens, "head_columns": torch.zeros(batch.heads, dtype=torch.int64)}


class Imagined(Weights):
    """Weights of any name and shape; `begin` is called before the first of them."""

    def __init__(self, begin: Callable[[], None]) -> None:
        super().__init__({}, "a simulation")
        self._begin: Callable[[], None] | None = begin

    def begin(self) -> None:
        if self._begin is not None:
            self._begin()
            self._begin = None

    def piece(self, name: str, offset: Any, size: Any) -> torch.Tensor:
        return torch.empty(tuple(size))


class Scalars(TorchDispatchMode):
    """Answers what a fake tensor's number is: one, or for a flag no; no branch of a step depends on more."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return 1.0 if dtype.is_floating_point else False if dtype in (torch.bool, torch.uint8) else 1
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_group(rank: int, size: int) -> Iterator[None]:
    """Join a process group in which nothing is sent and every collective is done at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def pretended() -> Iterator[None]:
    """Exchange what looks at the content of tensors, or needs their memory."""
    with (
        # It looks whether positions start anew within a row. Ours do not.
        mock.patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None),
        mock.patch("torch.nn.parallel.DistributedDataParallel", Buckets),
        mock.patch("torch.nn.Module._apply", _applied),
        mock.patch("trainers.weights.held", _held),
    ):
        yield


@contextmanager
def agreed(setting: Setting) -> Iterator[None]:
    """Let DeepSpeed's stage 3 not compare what other ranks hold, as they are not there; and forget the group after."""
    if setting.options.get("zero_engine") != "deepspeed":
        yield
        return
    from trainers.deepspeed_engine import imported, released

    imported(CPU)
    from deepspeed.comm import comm

    zero = "deepspeed.runtime.zero"
    with (
        mock.patch(f"{zero}.utils.assert_lst_len_same_as_other_ranks"),
        mock.patch(f"{zero}.utils.assert_ints_same_as_other_ranks"),
        mock.patch(f"{zero}.partitioned_param_coordinator.assert_ints_same_as_other_ranks"),
        mock.patch.object(comm, "cdb", None),
    ):
        try:
            yield
        finally:
            released()


def _held(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the size of what this rank holds; where that begins a mesh would read from a tensor."""
    return (0,) * parameter.ndim, tuple(local(parameter).shape)


@torch.no_grad()
def _applied(module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Convert a module's tensors in place, as `Module.to` does; its own way cannot exchange fake ones."""
    for part in module.modules() if recurse else [module]:
        for p in part.parameters(recurse=False):
            p.data = convert(p.data)
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = convert(buffer)
    return module


class Buckets(nn.Module):
    """Stands for DistributedDataParallel with buckets as gradients: one copy of all gradients, there from the start."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.module = module
        trained = [p for p in module.parameters() if p.requires_grad]
        flat = torch.zeros(sum(p.numel() for p in trained), dtype=trained[0].dtype)
        for p, part in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
            p.grad = part.view_as(p)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


def _offloads(setting: Setting) -> bool:
    return setting.options.get("offload") not in (None, "none")


class Simulator:
    """Processes of their own that simulate; a context manager. What ends one costs its task alone."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._pool = self._new()

    def _new(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "transformers.models.llama.modeling_llama", "peft"])
        return ProcessPoolExecutor(self._processes, mp_context=context, initializer=_alone)

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, *_: Any) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(self, tasks: Sequence[Task]) -> list[Simulated]:
        """Return what each task came to, in order."""
        return list(self.each(tasks))

    def each(self, tasks: Sequence[Task]) -> Iterator[Simulated]:
        """Yield what each task came to, in order, as soon as it is known."""
        running = [self._pool.submit(attempt, task) for task in tasks]
        for i, simulated in enumerate(running):
            try:
                found = simulated.result()
            except BrokenProcessPool:  # one process ended, by which all tasks are lost
                self._pool = self._new()
                yield from map(self._by_itself, tasks[i:])
                return
            yield found

    def _by_itself(self, task: Task) -> Simulated:
        try:
            return self._pool.submit(attempt, task).result()
        except BrokenProcessPool:
            self._pool = self._new()
            return "the process that simulated it was ended, as by a machine that is short of memory"


def _alone() -> None:
    """Prepare a process that simulates: what libraries print there is about devices that are not there."""
    torch.set_num_threads(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def attempt(task: Task) -> Simulated:
    """Simulate a task; return why it failed where it does."""
    try:
        return (simulate if task.whole else extrapolate)(task.shape, task.setting, task.batch, task.rank)
    except CannotSimulate as error:
        return str(error)
    except Exception as error:  # libraries on fake tensors raise anything; the closed form answers then
        return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
