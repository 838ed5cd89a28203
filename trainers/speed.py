"""How fast a job trains, and where the time goes: measured on windows that stand for the data, and not by training."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainers import batch as batching
from trainers import flops, hardware, split
from trainers.batch import Counts, Window
from trainers.config import TrialConfig
from trainers.engine import Engine
from trainers.feed import Feed
from trainers.memory import MemoryMeter
from trainers.noise import Machine, disturbances
from trainers.ranks import World
from trainers.result import GIB, Speed
from trainers.strategies import Setting
from trainers.timing import Stopwatch
from trainers.token_loss import keeps_heads

WINDOWS = 2  # two optimizer steps at least, on different batches
# Few values scatter little by chance: none is believed to be precise that rests on fewer than five.
LEAST_ROUNDS, LEAST_IN_TIME, MOST_ROUNDS = 5, 3, 50
NOISY = 1.2  # a window that takes so many times its median was disturbed
# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond, the normal distribution's.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
        2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045)  # fmt: skip


@dataclass(frozen=True)
class Probe:
    """What a measurement needs: an engine that is warm, its data, and the ranks."""

    engine: Engine
    feed: Feed
    config: TrialConfig
    setting: Setting
    meter: MemoryMeter
    world: World

    def run(self, keep: Callable[[Any], None] | None = None) -> Speed:
        """Time rounds over the same windows until the step time is known, then profile one window.

        `keep` is given the profiler. The engine trains on: to be called where that is undone. Every rank must call it.
        """
        learning = self.setting.learning
        windows = batching.stratified(self.feed.samples, learning.global_batch_size, WINDOWS, learning.seed)
        windows = [self.feed.arranged(w) for w in windows]
        started = time.perf_counter()
        self._round(windows)  # warm-up: shapes that were not met before
        before = Machine.now()
        beaten_at = self._beaten_at()
        rounds = self._rounds(windows, beaten_at)
        disturbed = self.world.gather(disturbances(before, Machine.now(), self.world.device))
        timed_s = time.perf_counter() - started
        dominated = surely_longer(rounds, beaten_at)
        # One window stands for the data, too; reading a profile takes longer than the steps in it.
        parts, wall, busy = self._profiled(windows[:1], keep) if not dominated else ({}, 0.0, ())
        profiled_s = time.perf_counter() - started - timed_s
        timed_s, profiled_s = self.world.max([timed_s, profiled_s])
        counts = [self.feed.count(w) for w in windows]
        done = [self._flops(w) for w in windows]
        total = sum(counts, Counts())
        return Speed(
            rounds=tuple(rounds),
            tokens=total.tokens,
            targets=total.targets,
            slots=total.slots,
            model_flops=sum(f.model for f in done),
            hardware_flops=sum(f.hardware for f in done),
            peak_flops=self._peak(),
            precision=half_width(quiet([sum(r) for r in rounds])),
            parts=parts,
            profiled_step_s=wall,
            busy_s=busy,
            noisy_rounds=tuple(noisy([sum(r) for r in rounds])),
            disturbances=tuple(dict.fromkeys(text for texts in disturbed for text in texts)),
            timed_s=timed_s,
            profiled_s=profiled_s,
            dominated=dominated,
        )

    def _beaten_at(self) -> float:
        """Return the seconds of a step above which another is better for certain, by the memory that this job takes."""
        peak = max((phase.reserved for phase in self.meter.peaks(self.world).values()), default=0) / GIB
        return min((seconds for gib, seconds in self.config.run.rivals if gib <= peak), default=math.inf)

    def _rounds(self, windows: Sequence[Window], beaten_at: float) -> list[tuple[float, ...]]:
        """Return the seconds of each window, on the slowest rank, round after round."""
        run, rounds = self.config.run, list[tuple[float, ...]]()
        spent = 0.0
        while len(rounds) < MOST_ROUNDS:
            rounds.append(tuple(self.world.max(self._round(windows))))  # the same on all ranks, and so is what follows
            spent += sum(rounds[-1])
            known = len(rounds) >= LEAST_ROUNDS and half_width(quiet([sum(r) for r in rounds])) <= run.precision
            enough = spent >= run.measure_seconds or surely_longer(rounds, beaten_at)
            if known or (len(rounds) >= LEAST_IN_TIME and enough):
                break
        return rounds

    def _round(self, windows: Sequence[Window]) -> list[float]:
        clock, seconds = Stopwatch(self.world), []
        for window in windows:
            self.world.barrier()
            clock.start()
            self._update(window)
            seconds.append(clock.stop())
        return seconds

    def _update(self, window: Window) -> None:
        micro_batches, counts = self.feed.window(window)
        self.engine.step(micro_batches, counts.targets, self.meter)

    def _profiled(
        self, windows: Sequence[Window], keep: Callable[[Any], None] | None
    ) -> tuple[dict[str, float], float, tuple[float, ...]]:
        """Return seconds of a step by part, mean over ranks; of the whole step; and what each rank was busy."""
        with split.profiled(self.world.device) as profiler:
            for window in windows:
                self.world.barrier()
                with split.step():
                    self._update(window)
                    self.world.synchronize()
        if keep is not None:
            keep(profiler)
        seen = split.steps_of(profiler)
        mine = {part: sum(s.parts()[part] for s in seen) / len(seen) for part in split.PARTS}
        by_rank = self.world.gather(mine)
        parts = {part: statistics.fmean(p[part] for p in by_rank) for part in split.PARTS}
        waits = ("collective", "pipeline_idle")
        busy = tuple(sum(s for part, s in p.items() if part not in waits) for p in by_rank)
        return parts, sum(parts.values()), busy

    def _flops(self, window: Window) -> flops.Flops:
        shape, system = self.setting.shape, self.setting.system
        if shape is None:
            return flops.Flops()
        shares = batching.split(window, self.setting.plan.dp, self.feed.micro)
        rows = (self._rows(ids, share) for share in shares for ids in share)
        done = (flops.of_rows(r, shape, self.setting.learning, system.activation_checkpointing) for r in rows)
        return sum(done, flops.Flops())

    def _rows(self, ids: Sequence[int], share: Sequence[Sequence[int]]) -> flops.Rows:
        samples = self.feed.samples
        lengths, targets = [samples.lengths[i] for i in ids], sum(samples.targets[i] for i in ids)
        if keeps_heads(self.setting):
            return flops.Rows(lengths, targets, self.feed.heads(ids, only_targets=True))
        longest = batching.longest(share, samples) if self.feed.alike else max(lengths, default=0)
        return flops.Rows(lengths, targets, longest * len(ids), longest)

    def _peak(self) -> float | None:
        """Return what the devices reach at most, all together."""
        by_rank = self.world.gather(hardware.peak_flops(self.world.device, self.setting.compute_dtype))
        return None if None in by_rank else math.fsum(p for p in by_rank if p is not None)


def surely_longer(rounds: Sequence[Sequence[float]], seconds: float) -> bool:
    """Tell whether a step takes longer than that, by all of the 95 % confidence interval of its mean over the rounds.

    `rounds`: seconds of each window, round after round.
    """
    steps = quiet([statistics.fmean(r) for r in rounds])
    return statistics.fmean(steps) * (1 - half_width(steps)) > seconds


def half_width(values: Sequence[float]) -> float:
    """Return the half-width of the 95 % confidence interval of a mean, relative to it; infinite for fewer than two."""
    n = len(values)
    if n < 2:
        return math.inf
    t = _T95[n - 2] if n - 2 < len(_T95) else 1.96
    return t * statistics.stdev(values) / math.sqrt(n) / statistics.fmean(values)


def quiet(rounds: Sequence[float]) -> list[float]:
    """Return the rounds that were not disturbed."""
    disturbed = noisy(rounds)
    return [seconds for i, seconds in enumerate(rounds) if i not in disturbed]


def noisy(rounds: Sequence[float]) -> list[int]:
    """Return which rounds took much longer than their median."""
    usual = statistics.median(rounds)
    return [i for i, seconds in enumerate(rounds) if seconds > NOISY * usual]
