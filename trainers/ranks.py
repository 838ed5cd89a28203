"""The ranks of one job: their number, this one's place and device, and the few reductions that the loop needs.

The same code runs with torch.distributed initialised (by Ray Train or torchrun) and in one process without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from trainers.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among the ranks of its job."""

    rank: int
    size: int
    device: torch.device

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sum over ranks of each value, in float64, on every rank."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Return the maximum over ranks of each value, in float64, on every rank."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def broadcast(self, make: Callable[[], T]) -> T:
        """Return on every rank what rank 0 makes; a UserError there is raised on every rank."""
        if self.size == 1:
            return make()
        made: list[Any] = [None, None]
        if self.rank == 0:
            try:
                made[0] = make()
            except UserError as error:
                made[1] = error
        dist.broadcast_object_list(made, src=0, device=self.device)
        if made[1] is not None:
            raise made[1]
        value: T = made[0]
        return value

    def gather(self, value: T) -> list[T]:
        """Return what each rank brings, on every rank."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def synchronize(self) -> None:
        """Wait until this rank's device has finished what was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return [float(v) for v in values]
        on_device = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(on_device, op=op)
        return [float(v) for v in on_device.tolist()]


def resolve_device(name: str) -> Literal["cpu", "cuda"]:
    """Return "cuda" or "cpu" for auto, cuda or cpu; of this process."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda" if name == "cuda" else "cpu"


def current(device: str) -> World:
    """Return the world that torch.distributed is initialised with, or a world of one."""
    name = resolve_device(device)
    on = torch.device("cpu")
    if name == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        on = torch.device("cuda", torch.cuda.current_device() if dist.is_initialized() else local)
        torch.cuda.set_device(on)  # also initialises CUDA, without which its memory statistics cannot be reset
    if dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size(), on)
    return World(0, 1, on)


def ensure_group(world: World) -> None:
    """Make a process group of this one process where none was joined: meshes need one, also of size 1."""
    if not dist.is_initialized():
        assert world.size == 1, "a world of several ranks has joined its group"
        dist.init_process_group(
            "nccl" if world.device.type == "cuda" else "gloo",
            store=dist.HashStore(),  # type: ignore[attr-defined]  # not in its stubs
            rank=0,
            world_size=1,
        )


@contextmanager
def joined(device: str, timeout_s: float = 1800.0) -> Iterator[World]:
    """Join the world that torchrun's environment names (a world of one without it), and leave it at the end."""
    name = resolve_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield current(name)
        return
    if name == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if name == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s))
    try:
        yield current(name)
    finally:
        dist.destroy_process_group()
