"""Where the time of a step goes: what torch's profiler saw, told apart without counting anything twice."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from trainers.intervals import Intervals, common, length, union, without
from trainers.regions import DATA, RECOMPUTE, STEP, region

PARTS = (
    "forward", "backward", "recompute", "collective", "transfer", "data", "pipeline_idle", "optimizer", "other",
)  # fmt: skip
# Of these, an instant belongs to the first that is running: data inside a forward pass does not occur.
_PHASES = (RECOMPUTE, "backward", "first_optimizer_step", "optimizer", DATA, "forward")
_PART_OF_PHASE = {"first_optimizer_step": "optimizer"}
# Of torch's own on the CPU: what only waits, or only wraps others, does no work.
_NO_WORK = re.compile(r"^(?:autograd::|c10d::|_c10d_functional::wait_tensor|record_param_comms)")
_POINT_TO_POINT = re.compile(r"gloo:(?:send|recv)|ncclDevKernel_SendRecv", re.IGNORECASE)
_COLLECTIVE = re.compile(r"^gloo:|nccl", re.IGNORECASE)


@dataclass(frozen=True)
class Seen:
    """What the profiler saw of one step, as stretches of seconds."""

    step: tuple[float, float]
    compute: Intervals
    collectives: Intervals
    between_stages: Intervals  # sends and receives of a pipeline
    transfers: Intervals  # between host and device
    phases: dict[str, Intervals]  # by the name of the region

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part; together they are the step.

        A collective, a transfer or a wait for another stage counts only while nothing is computed: it is exposed.
        """
        left = [self.step]
        found = dict.fromkeys(PARTS, 0.0)

        def take(part: str, stretches: Intervals) -> None:
            nonlocal left
            found[part] += length(common(left, stretches))
            left = without(left, stretches)

        take("collective", without(self.collectives, self.compute))
        take("pipeline_idle", without(self.between_stages, self.compute))
        take("transfer", without(self.transfers, self.compute))
        for name in _PHASES:
            take(_PART_OF_PHASE.get(name, name), self.phases.get(name, []))
        found["other"] = length(left)
        return found


@contextmanager
def profiled(device: torch.device) -> Iterator[Any]:
    """Run torch's profiler over what is inside; `steps_of` reads it afterwards."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    profiler = profile(activities=activities)
    with muted():
        profiler.start()
    try:
        yield profiler
    finally:
        with muted():
            profiler.stop()


@contextmanager
def muted() -> Iterator[None]:
    """Drop what is written on standard error: of starting and stopping, torch's core tells with no way to say no."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def step() -> Iterator[None]:
    """Mark what is inside as a step of its own."""
    with region(STEP):
        yield


def steps_of(profiler: Any) -> list[Seen]:
    """Return what a profiler saw of each marked step."""
    events = [Event.of(e) for e in profiler.profiler.kineto_results.events()]
    steps = sorted((e for e in events if e.name == STEP and not e.on_gpu), key=lambda e: e.start)
    main = {e.thread for e in steps}
    on_gpu = any(e.on_gpu for e in events)
    return [_seen(s, events, main, on_gpu) for s in steps]


@dataclass(frozen=True)
class Event:
    """One event of the profiler, in seconds."""

    name: str
    kind: str  # the profiler's: cpu_op, user_annotation, kernel, gpu_memcpy, gpu_memset, gpu_user_annotation
    start: float
    end: float
    thread: int
    on_gpu: bool

    @staticmethod
    def of(event: Any) -> Event:
        start = event.start_ns() / 1e9
        on_gpu = not str(event.device_type()).endswith("CPU")
        kind = event.activity_type()
        return Event(event.name(), kind, start, start + event.duration_ns() / 1e9, event.start_thread_id(), on_gpu)

    @property
    def stretch(self) -> tuple[float, float]:
        return self.start, self.end


def _seen(step: Event, events: Sequence[Event], main: set[int], on_gpu: bool) -> Seen:
    inside = [e for e in events if e.end > step.start and e.start < step.end]
    travelling = [e for e in inside if _COLLECTIVE.search(e.name) and e.on_gpu == on_gpu]
    kernels = [e for e in inside if e.on_gpu and e.kind == "kernel" and e not in travelling] if on_gpu else []
    worked = kernels or [e for e in inside if e.kind == "cpu_op" and "::" in e.name and not _NO_WORK.match(e.name)]
    return Seen(
        step.stretch,
        _all(worked, lambda e: e.on_gpu or e.thread in main),
        _all(travelling, lambda e: not _POINT_TO_POINT.search(e.name)),
        _all(travelling, lambda e: _POINT_TO_POINT.search(e.name) is not None),
        _all(inside, lambda e: e.kind == "gpu_memcpy" and "Device -> Device" not in e.name and "DtoD" not in e.name),
        {name: _phase(name, inside, on_gpu) for name in _PHASES},
    )


def _phase(name: str, events: Iterable[Event], on_gpu: bool) -> Intervals:
    """Return when a region ran: on a GPU when what it launched did, but for data, which the host waits for."""
    there = on_gpu and name != DATA
    found = _all(events, lambda e: e.name == name and e.on_gpu == there)
    if name == "backward":  # a pipeline's passes take turns within its schedule
        found = union([*found, *_all(events, lambda e: e.name.startswith("autograd::engine::evaluate_function"))])
    return found


def _all(events: Iterable[Event], wanted: Callable[[Event], bool]) -> Intervals:
    return union(e.stretch for e in events if wanted(e))
