"""Bytes of live tensors, counted by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from trainers.activation_checkpointing import contexts
from trainers.memory import MemoryMeter
from trainers.memory_trace import Limit, MemoryTrace, Owned
from trainers.ranks import World
from trainers.regions import LOSS, region
from trainers.result import Account, Accounts, PhaseMemory, RankMemory

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
KB = 1000
SCALARS = 8  # bytes: a loss that waits for its backward pass, and the 1 that this begins with


def floats(count: int) -> torch.Tensor:
    return torch.ones(count)


def trace(*weights: torch.Tensor, owned: Owned | None = None) -> MemoryTrace:
    return MemoryTrace(CPU, owned or (lambda: [("weights", w) for w in weights]))


def peak(found: MemoryTrace, phase: str = "all") -> Accounts:
    return found.peaks()[phase].accounts


def test_allocations_frees_views_and_in_place_operations() -> None:
    with trace() as live:
        live.start("all")
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
        live.stop()
    assert peak(live) == Accounts(temporary=3 * KB)


def test_what_exists_counts_once_and_what_it_holds_is_not_seen_again() -> None:
    weight = floats(250)
    with trace(weight, weight[5:], floats(0)) as live:
        assert live.bytes == KB
        held = [weight.view(5, 50), weight.mul_(1)]
        assert live.bytes == KB
        held.append(torch.zeros(250, dtype=torch.int8))
        assert live.bytes == KB + 250


def test_existing_tensors_that_are_freed_are_taken_off() -> None:
    existing = [floats(250), floats(500)]
    with trace(owned=lambda: [("weights", t) for t in existing]) as live:
        live.start("all")
        assert live.bytes == 3 * KB
        existing.pop()
        assert live.bytes == KB
        torch.ones(1)
        live.stop()
    assert peak(live).total == 3 * KB


def test_forward_and_backward() -> None:
    """y = x · c keeps c only; backward makes one gradient of x's size, which becomes x.grad without a copy."""
    x, c, gradient = floats(250).requires_grad_(), floats(250), floats(250)
    with trace(x, c, gradient) as live:
        y = x * c
        assert live.bytes == 4 * KB
        y.backward(gradient)
        assert live.bytes == 5 * KB
        del y
        assert live.bytes == 4 * KB
        x.grad = None
        assert live.bytes == 3 * KB


def test_activations_that_backward_needs_are_alive_until_then() -> None:
    """exp saves its result: three in a row keep three results, dropped one by one as backward passes them."""
    x = floats(250).requires_grad_()
    with trace(x) as live:
        y = x.exp().exp().exp()
        assert live.bytes == 4 * KB
        z = y.sum()
        del y
        assert live.bytes == 4 * KB + 4
        z.backward()
        del z
        assert live.bytes == 2 * KB  # x and its gradient


def test_each_account_at_the_instant_of_its_phases_peak() -> None:
    """A step worked by hand: w (1 KB) → e = exp(w), saved → t = e · 2, which nothing needs → sum."""
    w, state = floats(250).requires_grad_(), list[torch.Tensor]()

    def owned() -> Iterator[tuple[Account, torch.Tensor]]:
        yield "weights", w
        if w.grad is not None:
            yield "gradients", w.grad
        yield from (("optimizer_state", s) for s in state)

    with trace(owned=owned) as live:
        live.start("forward")
        loss = (w.exp() * 2).sum()
        live.stop()
        live.start("backward")
        loss.backward()
        del loss
        live.stop()
        live.start("first_optimizer_step")
        state.append(torch.zeros(250))
        assert w.grad is not None
        with torch.no_grad():
            w.sub_(w.grad * 0.1)
        w.grad = None
        live.stop()
        live.start("optimizer")
        live.stop()
    assert peak(live, "forward") == Accounts(weights=KB, activations=KB + 4, temporary=KB)  # 4: the sum
    # Of the sum's gradient nothing is made but a view; then d(e · 2) and d(exp): the one is freed for the other.
    backward = peak(live, "backward")
    assert (backward.weights, backward.activations, backward.optimizer_state) == (KB, KB + SCALARS, 0)
    assert backward.gradients + backward.temporary in (2 * KB, 2 * KB + 4)
    assert peak(live, "first_optimizer_step") == Accounts(KB, KB, KB, 0, KB)
    assert peak(live, "optimizer") == Accounts(weights=KB, optimizer_state=KB)


def test_gradients_that_wait_for_their_reduction_are_gradients() -> None:
    """What a backward pass leaves behind, though its owner does not say so."""
    w, kept = floats(250).requires_grad_(), list[torch.Tensor]()
    with trace(w) as live:
        live.start("backward")
        y = w * 1
        y.register_hook(lambda gradient: kept.append(gradient * 2))
        y.sum().backward()
        w.grad = None
        del y
        live.stop()
        live.start("after")
        live.stop()
    assert peak(live, "after") == Accounts(weights=KB, gradients=KB)


def test_logits_and_loss_are_temporary() -> None:
    """They live until the backward pass, as activations do; but it is not the blocks that they are for."""
    w = floats(250).requires_grad_()
    with trace(w) as live:
        live.start("forward")
        logits = w.exp()
        with region(LOSS):
            loss = logits.exp().sum()
        live.stop()
        live.start("backward")
        loss.backward()
        live.stop()
    assert peak(live, "forward") == Accounts(weights=KB, temporary=2 * KB + 4)


def test_what_is_computed_again_is_activations_while_it_is_needed() -> None:
    x = floats(250).requires_grad_()

    def block(t: torch.Tensor) -> torch.Tensor:
        return t.exp().exp()

    with trace(x) as live:
        live.start("forward")
        loss = checkpoint(block, x, use_reentrant=False, context_fn=lambda: contexts("full")).sum()
        live.stop()
        live.start("backward")
        loss.backward()
        live.stop()
    assert peak(live, "forward").activations == 0
    backward = peak(live, "backward")
    assert backward.activations == 2 * KB + SCALARS  # both results of exp, made anew
    assert peak(live, "forward").total == 3 * KB  # x, and two results at a time


def test_a_storage_that_changes_its_size_is_a_buffer() -> None:
    """FSDP2 frees what it gathered by making the storage empty, and gathers again into it; no dispatcher sees that."""
    buffer = floats(0)
    with trace() as live:
        live.start("forward")
        buffer.untyped_storage().resize_(1000)
        assert live.bytes == KB
        buffer.untyped_storage().resize_(0)
        assert live.bytes == 0
        live.stop()
        live.start("backward")
        buffer.untyped_storage().resize_(2000)
        live.stop()
    assert peak(live, "forward") == Accounts(temporary=KB)
    assert peak(live, "backward") == Accounts(temporary=2 * KB)


def test_phases_have_their_own_peaks_and_a_repeated_phase_its_largest() -> None:
    meter = MemoryMeter(CPU)
    weight = floats(250)
    with meter.phase("load"):
        floats(10_000)
    with meter.tracing(lambda: [("weights", weight)]):
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
    assert peaks["forward"].worst.accounts == Accounts(weights=KB, temporary=6 * KB)
    assert all(p.worst.accounts.total == p.allocated for p in peaks.values())


def test_the_worst_rank_is_that_with_the_most_allocated() -> None:
    ranks = [RankMemory(a, r, Accounts(temporary=a)) for a, r in ((10, 30), (20, 25), (20, 40))]
    found = PhaseMemory(tuple(ranks))
    assert (found.worst_rank, found.allocated, found.reserved) == (1, 20, 40)
    assert PhaseMemory.from_json(dataclasses.asdict(found)) == found


def test_the_phase_that_failed_stays_named() -> None:
    meter = MemoryMeter(CPU)

    def fail() -> None:
        with meter.tracing(lambda: []), meter.phase("forward"):
            raise RuntimeError("out of memory")

    with meter.phase("load"):
        pass
    with pytest.raises(RuntimeError):
        fail()
    assert meter.current == "forward"
    with meter.phase("eval"):  # tracing has ended with the failure
        floats(250)
    assert "eval" not in meter.peaks(ALONE)


def test_where_memory_runs_out_it_is_known_what_was_in_use() -> None:
    """A limit of 40 kB: 8 of a weight, 16 of activations, then 24 are asked for, and a backward pass never comes."""
    weight = floats(2 * KB).requires_grad_()
    meter, kept = MemoryMeter(CPU, Limit(40 * KB)), []
    meter.keep = lambda trace: kept.append(len(trace.timeline()["bytes"]))

    def fail() -> None:
        with meter.tracing(lambda: [("weights", weight)]), meter.phase("forward"):
            hidden = weight.exp()
            hidden = hidden.exp()
            torch.cat([hidden, hidden, hidden])

    with pytest.raises(RuntimeError, match="you tried to allocate 24000 bytes"):
        fail()
    assert meter.failed == Accounts(weights=8 * KB, activations=16 * KB)
    assert kept  # what was traced until then


def test_an_error_that_is_not_of_memory_notes_nothing() -> None:
    meter = MemoryMeter(CPU)

    def fail() -> None:
        with meter.tracing(lambda: []), meter.phase("forward"):
            torch.ones(2) @ torch.ones(3)

    with pytest.raises(RuntimeError):
        fail()
    assert meter.failed is None
