"""Timing: what is counted, when it stops, what is flagged; figures by hand."""

from __future__ import annotations

import dataclasses
import math
import statistics
import subprocess
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from tests.rank_pool import RankPool
from tests.trainers.tiny import config, data, train_here
from trainers import batch
from trainers.batch import Samples
from trainers.noise import Machine, disturbances
from trainers.prepare import TrialData
from trainers.ranks import World
from trainers.result import Accounts, PhaseMemory, RankMemory, Speed, TrialResult
from trainers.speed import half_width, noisy, quiet, surely_longer
from trainers.split import PARTS
from trainers.timing import Stopwatch, doubts, impossible, summarize

SPEED = Speed(
    rounds=((1.0, 3.0), (1.0, 3.0), (2.0, 8.0)),
    tokens=1200,
    targets=400,
    slots=1600,
    model_flops=4e9,
    hardware_flops=6e9,
    peak_flops=4e9,
    precision=0.02,
    parts={**dict.fromkeys(PARTS, 0.0), "forward": 0.5, "backward": 1.0, "collective": 0.5},
    profiled_step_s=2.0,
    busy_s=(1.5, 1.2),
    noisy_rounds=(2,),
    disturbances=(),
    timed_s=30.0,
    profiled_s=5.0,
)


@pytest.fixture(scope="module")
def tokens() -> TrialData:
    return data(12, 5)


def test_a_job_that_is_dominated_for_certain_is_measured_no_longer(tokens: TrialData) -> None:
    """Any step takes longer than 1 µs and any job more than 1 B: it ends with its memory and time, untrained."""
    found = train_here(config(run={"measure_seconds": 60.0, "dominated_by": "100:1e-6,1e-9:1e-6"}), tokens)
    assert found.stop_reason == "dominated"
    assert found.speed is not None
    assert (len(found.speed.rounds), found.updates, found.evaluations, found.saves) == (3, (), (), ())
    figures = summarize(found)
    assert figures["step_time_s"] > 0
    assert figures["peak_memory_gib"] > 0
    assert TrialResult.from_json(found.to_json()).speed == found.speed
    # Nobody takes less memory: it is measured whole.
    whole = train_here(config(run={"measure_seconds": 0.01, "dominated_by": "1e-9:1e6,100:1e-6"}), tokens)
    assert whole.stop_reason == "budget"
    assert whole.speed is not None
    assert whole.speed.parts.keys() == set(PARTS)


def test_longer_for_certain_is_longer_by_all_of_the_interval() -> None:
    """Means 9, 10, 11 s: 10 ± 4.303 · 1/√3 = 7.52 to 12.48."""
    rounds = [(8.0, 10.0), (9.0, 11.0), (10.0, 12.0)]
    assert surely_longer(rounds, 7.51)
    assert not surely_longer(rounds, 7.52)
    assert not surely_longer(rounds[:1], 0.1)


def test_figures_by_hand() -> None:
    result = TrialResult("budget", (), (), (), {}, 0, (), {}, 2, {}, speed=SPEED)
    figures = summarize(result)
    assert figures["step_time_s"] == 2.0  # medians 1 and 3
    assert figures["tokens_per_second"] == 300
    assert figures["tokens_per_second_per_device"] == 150
    assert figures["target_tokens_per_second"] == 100
    assert figures["padding_share"] == 0.25
    assert figures["mfu"] == 0.25
    assert figures["hfu"] == 0.375
    assert figures["straggler_spread"] == pytest.approx(0.2)
    assert (figures["forward_share"], figures["backward_share"], figures["collective_share"]) == (0.25, 0.5, 0.25)
    assert TrialResult.from_json(result.to_json()) == result


def test_the_confidence_interval() -> None:
    """Three values 9, 10, 11: s = 1, t(2) = 4.303, 4.303 / √3 / 10 = 0.2484."""
    assert half_width([9, 10, 11]) == pytest.approx(0.24843, abs=1e-5)
    assert half_width([10, 10]) == 0
    assert half_width([10]) == math.inf
    many = [1.0, 2.0] * 50
    assert half_width(many) == pytest.approx(1.96 * statistics.stdev(many) / 10 / 1.5)


def test_a_round_far_above_the_median_is_flagged_and_left_out() -> None:
    assert noisy([1.0, 1.1, 1.0, 1.5]) == [3]
    assert quiet([1.0, 1.1, 1.0, 1.5]) == [1.0, 1.1, 1.0]


def test_a_stratified_draw_has_the_middle_of_equal_shares() -> None:
    samples = Samples([10 * i for i in range(1, 9)], [1] * 8)  # 10 to 80
    (window,) = batch.stratified(samples, 4, 1, seed=0)
    assert sorted(samples.lengths[i] for i in window.sample_ids) == [20, 40, 60, 80]
    one, two = batch.stratified(samples, 2, 2, seed=0)
    assert sorted((*one.sample_ids, *two.sample_ids)) == sorted(window.sample_ids)
    assert batch.stratified(samples, 4, 1, seed=0) == [window]  # the same for every candidate


def test_few_samples_are_repeated() -> None:
    (window,) = batch.stratified(Samples([5, 7], [1, 1]), 4, 1, seed=0)
    assert sorted(window.sample_ids) == [0, 0, 1, 1]


def test_by_length_the_longest_come_first() -> None:
    samples = Samples([3, 9, 3, 7], [1] * 4)
    assert batch.by_length(batch.Window(0, 0, (0, 1, 2, 3)), samples).sample_ids == (1, 3, 0, 2)


def test_arranging_by_length_changes_no_loss_and_saves_padding(tokens: TrialData) -> None:
    job = config(1, 2)
    drawn, sorted_ = (
        train_here(dataclasses.replace(job, system=dataclasses.replace(job.system, arrangement=how)), tokens)
        for how in ("drawn", "length")
    )
    assert [u.loss for u in sorted_.updates] == pytest.approx([u.loss for u in drawn.updates], rel=1e-5)
    assert [u.grad_norm for u in sorted_.updates] == pytest.approx([u.grad_norm for u in drawn.updates], rel=1e-4)
    assert sorted_.fingerprints == drawn.fingerprints
    assert sum(u.slots for u in sorted_.updates) < sum(u.slots for u in drawn.updates)


def test_what_speaks_against_a_figure() -> None:
    result = TrialResult("budget", (), (), (), {}, 0, (), {}, 2, {}, speed=SPEED)
    assert doubts(result, 0.03) == ["1 of 3 timed rounds were disturbed, and left out"]
    told = doubts(dataclasses.replace(result, speed=dataclasses.replace(SPEED, precision=0.5)), 0.03)
    assert told[0].startswith("its step time is known to ± 50%, 3% was asked for")
    out_of_order = PhaseMemory((RankMemory(20, 10, Accounts(temporary=20)),))
    (told_1,) = doubts(dataclasses.replace(result, speed=None, memory={"forward": out_of_order}), 0.03)
    assert told_1.startswith("memory of forward on rank 0 is out of order: allocated 20, reserved 10")


def test_above_the_peak_is_an_error() -> None:
    assert impossible({"mfu": 0.4, "hfu": 0.5}) == ""
    assert impossible({"mfu": 0.9, "hfu": 1.2}) == "hfu 1.20 is above 1: a measurement is wrong"


def test_ranks_wait_for_each_other(tokens: TrialData, ranks: Callable[[int], RankPool]) -> None:
    results = ranks(2).run(train_here, config(2, 2, run={"measure_seconds": 0.01}), tokens)
    first, second = (r.speed for r in results)
    assert first == second
    assert first is not None
    assert first.parts["collective"] > 0
    assert sum(first.parts.values()) == pytest.approx(first.profiled_step_s)
    assert len(first.busy_s) == 2
    assert max(first.busy_s) < first.profiled_step_s


def test_measuring_changes_nothing_of_what_is_learned(tokens: TrialData) -> None:
    plain = train_here(config(), tokens)
    measured = train_here(config(run={"measure_seconds": 0.01}), tokens)
    assert [u.loss for u in measured.updates] == [u.loss for u in plain.updates]
    speed = measured.speed
    assert speed is not None
    assert len(speed.rounds) == 3  # the time is over before, but fewer would tell nothing
    assert sum(speed.parts.values()) == pytest.approx(speed.profiled_step_s)
    assert 0 < summarize(measured)["mfu"] <= summarize(measured)["hfu"] < 1
    windows = batch.stratified(tokens.train.samples(), 4, 2, seed=0)
    lengths = tokens.train.samples().lengths
    assert speed.tokens == sum(lengths[i] for w in windows for i in w.sample_ids)


def test_a_little_stolen_time_is_no_disturbance() -> None:
    """Ticks of processors that had work: of 1,000, ten are 1 %, and usual; eleven are told."""
    cpu, before = torch.device("cpu"), Machine(throttled=3, stolen=40, busy=5_000)
    assert disturbances(before, Machine(3, 50, 6_000), cpu) == []
    assert disturbances(before, Machine(3, 51, 6_000), cpu) == ["a hypervisor took 1% of the CPU time"]
    assert disturbances(before, Machine(5, 40, 6_000), cpu) == ["the cgroup's CPU limit was reached 2 times"]


def test_a_device_that_slows_itself_down_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi's mask of reasons: 0x4 is the power cap, 0x20 a thermal one, 0x1 that nothing runs."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="8c5e"))
    asked: list[list[str]] = []

    def smi(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout="0x0000000000000025\n")

    monkeypatch.setattr(subprocess, "run", smi)
    told = disturbances(Machine(), Machine(), torch.device("cuda", 0))
    assert told == ["the GPU is slowed by its power limit", "the GPU is slowed by software thermal slowdown"]
    assert asked[0][-1] == "GPU-8c5e"


def test_the_clock_of_a_device_waits_for_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """petals#456: without waiting, a step of 50 ms takes no time. A device whose work ends 50 ms after its launch."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.done = time.perf_counter() + 0.05 * Event.launched

        def synchronize(self) -> None:
            time.sleep(max(0.0, self.done - time.perf_counter()))
            self.waited = True

        def elapsed_time(self, end: Event) -> float:
            assert end.waited
            return (end.done - self.done) * 1000

        launched, waited = 0, False

    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = Stopwatch(World(0, 1, torch.device("cuda")))
    watch.start()
    Event.launched = 1
    assert watch.stop() >= 0.05
