"""Traces that a person asked for: of time for Perfetto, of memory for torch's viewer or a plot."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trainers.config import RunConfig, TrialConfig
from trainers.memory import MemoryMeter
from trainers.memory_trace import MemoryTrace
from trainers.ranks import World

SHOWN_BY = {"time": "; open them at https://ui.perfetto.dev"}
MOST_EVENTS = 200_000  # of the allocator's history on CUDA


class Traces:
    """Writes what `run.trace` asks for, a file a rank: time-<rank>.json.gz, memory-<rank>.json.gz or .pickle."""

    def __init__(self, config: TrialConfig, world: World) -> None:
        self._wanted, self._world = config.run.trace, world
        self._folder = folder_of(config.run)

    def time(self, profiler: Any) -> None:
        """Write a profile of time, to be opened in Perfetto."""
        if self._wanted == "time":
            profiler.export_chrome_trace(str(self._path("time", "json.gz")))

    @contextmanager
    def memory(self, meter: MemoryMeter) -> Iterator[None]:
        """Write what happens inside to memory: on CUDA the allocator's snapshot, on CPU the accounts by event."""
        if self._wanted != "memory":
            yield
        elif self._world.device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
            try:
                yield
                torch.cuda.memory._dump_snapshot(str(self._path("memory", "pickle")))
            finally:
                torch.cuda.memory._record_memory_history(enabled=None)
        else:
            meter.keep, before = self._write, meter.keep
            try:
                yield
            finally:
                meter.keep = before

    def _write(self, trace: MemoryTrace) -> None:
        with gzip.open(self._path("memory", "json.gz"), "wt") as file:
            json.dump(trace.timeline(), file)

    def _path(self, kind: str, ending: str) -> Path:
        assert self._folder is not None, "a trace has a place: see `faults`"
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"{kind}-{self._world.rank}.{ending}"


def folder_of(run: RunConfig) -> Path | None:
    """Return where the traces of a job go, if anywhere."""
    folder = run.trace_dir or run.output_dir
    return Path(folder) if folder is not None and run.trace != "none" else None


def faults(run: RunConfig) -> list[str]:
    """Return what is wrong with what is asked for."""
    folder = folder_of(run)
    if folder is None:
        return [] if run.trace == "none" else [f"run.trace={run.trace} needs a place: run.output_dir, or run.trace_dir"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        key = "trace_dir" if run.trace_dir else "output_dir"
        return [f"run.{key}={folder}: traces cannot be written there: {error.strerror}"]
    return []


def kept(run: RunConfig, rank: int) -> str:
    """Say where a rank's trace is; empty where there is none."""
    folder = folder_of(run)
    if folder is None or not list(folder.glob(f"{run.trace}-{rank}.*")):
        return ""
    return f"traces of {run.trace} are in {folder}{SHOWN_BY.get(run.trace, '')}"
