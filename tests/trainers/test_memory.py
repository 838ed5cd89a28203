"""Bytes of live tensors, counted by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from trainers.memory import LiveBytes, MemoryMeter
from trainers.ranks import World

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
KB = 1000


def floats(count: int) -> torch.Tensor:
    return torch.ones(count)


def none() -> Iterator[torch.Tensor]:
    return iter(())


def test_allocations_frees_views_and_in_place_operations() -> None:
    with LiveBytes(none()) as live:
        a = torch.ones(250)  # 4 bytes each
        assert live.bytes == KB
        b = torch.ones(125, dtype=torch.float64)
        assert live.bytes == 2 * KB
        views = [a[10:20], a.view(25, 10).t(), a.detach(), a.expand(3, 250)]
        a.mul_(2).add_(a)
        a[3] = 7
        assert live.bytes == 2 * KB
        c = a + 1
        assert live.bytes == 3 * KB
        del c, b
        assert live.bytes == KB
        del a
        assert live.bytes == KB  # a view keeps the storage
        del views
        assert live.bytes == 0
        assert live.peak == 3 * KB


def test_what_exists_counts_once_and_what_it_holds_is_not_seen_again() -> None:
    weight = floats(250)
    with LiveBytes(iter([weight, weight[5:], floats(0)])) as live:
        assert (live.bytes, live.peak) == (KB, KB)
        held = [weight.view(5, 50), weight.mul_(1)]
        assert live.bytes == KB
        held.append(torch.zeros(250, dtype=torch.int8))
        assert live.bytes == KB + 250


def test_existing_tensors_that_are_freed_are_taken_off() -> None:
    existing = [floats(250), floats(500)]
    with LiveBytes(iter(existing)) as live:
        assert live.bytes == 3 * KB
        existing.pop()
        assert live.bytes == KB
        torch.ones(1)
        assert live.peak == 3 * KB


def test_forward_and_backward() -> None:
    """y = x · c keeps c only; backward makes one gradient of x's size, which becomes x.grad without a copy."""
    x, c, gradient = floats(250).requires_grad_(), floats(250), floats(250)
    with LiveBytes(iter([x, c, gradient])) as live:
        y = x * c
        assert live.bytes == 4 * KB
        y.backward(gradient)
        assert (live.bytes, live.peak) == (5 * KB, 5 * KB)
        del y
        assert live.bytes == 4 * KB
        x.grad = None
        assert (live.bytes, live.peak) == (3 * KB, 5 * KB)


def test_activations_that_backward_needs_are_alive_until_then() -> None:
    """exp saves its result: three in a row keep three results, dropped one by one as backward passes them."""
    x = floats(250).requires_grad_()
    with LiveBytes(iter([x])) as live:
        y = x.exp().exp().exp()
        assert live.bytes == 4 * KB
        z = y.sum()
        del y
        assert live.bytes == 4 * KB + 4
        z.backward()
        del z
        assert live.bytes == 2 * KB  # x and its gradient


def test_phases_have_their_own_peaks_and_a_repeated_phase_its_largest() -> None:
    meter = MemoryMeter(CPU)
    weight = floats(250)
    with meter.phase("load"):
        floats(10_000)
    with meter.tracing(iter([weight])):
        with meter.phase("forward"):
            kept = floats(500)
            floats(1000)
        with meter.phase("backward"):
            del kept
            floats(250)
        with meter.phase("forward"):
            floats(250)
        with meter.phase("optimizer"):
            pass
    with meter.phase("backward"):
        floats(10_000)
    peaks = meter.peaks(ALONE)
    assert {name: peak.allocated for name, peak in peaks.items()} == {
        "forward": 7 * KB,  # weight 1, kept 2, a temporary of 4
        "backward": 3 * KB,  # it begins with kept alive
        "optimizer": KB,
    }
    assert all(peak.reserved == peak.allocated and peak.worst_rank == 0 for peak in peaks.values())


def test_the_phase_that_failed_stays_named() -> None:
    meter = MemoryMeter(CPU)

    def fail() -> None:
        with meter.tracing(none()), meter.phase("forward"):
            raise RuntimeError("out of memory")

    with meter.phase("load"):
        pass
    with pytest.raises(RuntimeError):
        fail()
    assert meter.current == "forward"
    with meter.phase("eval"):  # tracing has ended with the failure
        floats(250)
    assert "eval" not in meter.peaks(ALONE)
