"""Clocks and rates: seconds of an update, and the figures that follow from a job's result."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping

import torch

from trainers.batch import Counts
from trainers.ranks import World
from trainers.result import GIB, Accounts, Speed, TrialResult

# Updates at the start of training whose time is not used: the rehearsal has warmed kernels up, but not yet the input.
WARM_UP = 1


class Stopwatch:
    """Seconds between start() and stop() of this rank, device work included: CUDA events, or the wall clock."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._start = 0.0
        self._event: torch.cuda.Event | None = None

    def start(self) -> None:
        if self._world.device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:
            self._start = time.perf_counter()

    def stop(self) -> float:
        if self._event is not None:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            end.synchronize()
            return float(self._event.elapsed_time(end)) / 1000.0  # events count milliseconds
        return time.perf_counter() - self._start


def summarize(result: TrialResult) -> dict[str, float]:
    """Return the job's figures under the field's names, units as suffixes. Figures without a value are absent."""
    figures: dict[str, float] = {}
    timed = result.updates[WARM_UP:] or result.updates
    if result.speed is not None:
        figures |= _speed_figures(result.speed, result.num_workers)
    elif timed:
        seconds = sum(u.step_time_s for u in timed)
        figures["step_time_s"] = statistics.median(u.step_time_s for u in timed)
        figures["tokens_per_second"] = sum(u.tokens for u in timed) / seconds
        figures["target_tokens_per_second"] = sum(u.targets for u in timed) / seconds
        figures["tokens_per_second_per_device"] = figures["tokens_per_second"] / result.num_workers
        figures["padding_share"] = Counts(sum(u.slots for u in timed), sum(u.tokens for u in timed)).padding
    if timed:
        figures["train_loss"] = result.updates[-1].loss
        figures["updates"] = len(result.updates)
        figures["consumed_tokens"] = result.updates[-1].consumed_tokens
    if result.memory:
        figures["peak_memory_allocated_gib"] = max(m.allocated for m in result.memory.values()) / GIB
        figures["peak_memory_reserved_gib"] = max(m.reserved for m in result.memory.values()) / GIB
        figures["peak_memory_gib"] = figures["peak_memory_reserved_gib"]
        peak = max(result.memory.values(), key=lambda m: m.allocated).worst
        figures |= {f"{name}_gib": getattr(peak.accounts, name) / GIB for name in Accounts.names()}
    figures["host_peak_memory_gib"] = result.host_peak_bytes / GIB
    if result.evaluations:
        figures["eval_loss"] = result.evaluations[-1].loss
        figures["eval_loss_start"] = result.evaluations[0].loss
        figures["eval_time_s"] = statistics.median(e.seconds for e in result.evaluations)
    if result.saves:
        figures["save_time_s"] = statistics.median(s.seconds for s in result.saves)
        figures["save_gib"] = result.saves[-1].bytes / GIB
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def _speed_figures(speed: Speed, num_workers: int) -> dict[str, float]:
    seconds = speed.window_seconds
    total = sum(seconds)
    figures = {
        "step_time_s": total / len(seconds),
        "step_time_precision": speed.precision,
        "tokens_per_second": speed.tokens / total,
        "target_tokens_per_second": speed.targets / total,
        "tokens_per_second_per_device": speed.tokens / total / num_workers,
        "padding_share": Counts(speed.slots, speed.tokens).padding,
    }
    if not speed.dominated:
        figures["straggler_spread"] = (max(speed.busy_s) - min(speed.busy_s)) / max(speed.busy_s)
        figures["profiled_step_time_s"] = speed.profiled_step_s
    if speed.peak_flops and speed.model_flops:
        figures["mfu"] = speed.model_flops / total / speed.peak_flops
        figures["hfu"] = speed.hardware_flops / total / speed.peak_flops
    return figures | {f"{part}_share": s / speed.profiled_step_s for part, s in speed.parts.items()}


def doubts(result: TrialResult, precision: float) -> list[str]:
    """Return what speaks against a job's figures, a phrase each. `precision`: what was asked of the step time."""
    found = []
    speed = result.speed
    if speed is not None and speed.precision > precision and not speed.dominated:
        known = f"± {speed.precision:.0%}" if math.isfinite(speed.precision) else "not at all"
        found.append(f"its step time is known to {known}, {precision:.0%} was asked for (measure_seconds=… for longer)")
    if speed is not None and speed.noisy_rounds:
        found.append(f"{len(speed.noisy_rounds)} of {len(speed.rounds)} timed rounds were disturbed, and left out")
    found += speed.disturbances if speed is not None else ()
    for name, phase in result.memory.items():
        for rank, m in enumerate(phase.ranks):
            if m.allocated > m.reserved or (m.device_used and m.reserved > m.device_used):
                order = f"allocated {m.allocated}, reserved {m.reserved}, in use {m.device_used or m.reserved} bytes"
                found.append(f"memory of {name} on rank {rank} is out of order: {order}")
            if m.retries:
                found.append(
                    f"the allocator gave memory back {m.retries} times in {name} on rank {rank}: it barely fits"
                )
    return found


def impossible(figures: Mapping[str, float]) -> str:
    """Say that a device was faster than it can be: then a figure is wrong; empty where none is."""
    return next(
        (f"{n} {figures[n]:.2f} is above 1: a measurement is wrong" for n in ("mfu", "hfu") if figures.get(n, 0) > 1),
        "",
    )


def peak_phase(result: TrialResult) -> tuple[str, int] | None:
    """Return the phase with the highest peak and the rank that had it."""
    if not result.memory:
        return None
    name = max(result.memory, key=lambda n: result.memory[n].allocated)
    return name, result.memory[name].worst_rank
