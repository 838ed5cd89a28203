"""Whole jobs in this process and on two ranks: equal learning, evaluation, rehearsal, and why a job stops."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.rank_pool import RankPool
from tests.trainers.tiny import changed, config, data, train_here
from trainers import batch, model
from trainers.adapter import apply_adapter
from trainers.config import TrialConfig
from trainers.data import IGNORED, TokenizedDataset
from trainers.embedded import model as embedded
from trainers.engine import NativeEngine
from trainers.layout import Layout
from trainers.loop import Feed, Hooks, evaluation_due, rehearse, verdict
from trainers.memory import MemoryMeter
from trainers.memory_trace import MemoryTrace
from trainers.prepare import TrialData
from trainers.ranks import current
from trainers.result import Evaluation, History, TrialResult, Update
from trainers.strategies import STRATEGIES, Setting
from trainers.token_loss import Batch
from trainers.weights import fill

Ranks = Callable[[int], RankPool]

ROUNDING = 1e-5  # relative, float32


@pytest.fixture(scope="module")
def tokens() -> TrialData:
    return data(12, 5)


@pytest.fixture(scope="module")
def plain(tokens: TrialData) -> TrialResult:
    """3 updates of 4 samples in one process, a micro batch of 2."""
    return train_here(config(), tokens)


# AdamW's steps make of the rounding of small gradients more than rounding, the more the longer they are.
GENTLE = {"learning_rate": 1e-4}


@pytest.fixture(scope="module")
def gentle(tokens: TrialData) -> TrialResult:
    return train_here(config(**GENTLE), tokens)


def losses(result: TrialResult) -> list[float]:
    return [value for u in result.updates for value in (u.loss, u.grad_norm)] + [e.loss for e in result.evaluations]


PHASES = {"forward", "backward", "first_optimizer_step", "optimizer", "eval"}


def test_the_record_of_a_job_against_its_data(plain: TrialResult, tokens: TrialData) -> None:
    samples = tokens.train.samples()
    windows = batch.plan_updates(samples, 4, seed=0, max_tokens=None, epochs=1)
    assert plain.stop_reason == "budget"
    assert [u.tokens for u in plain.updates] == [sum(samples.lengths[i] for i in w.sample_ids) for w in windows]
    assert [u.targets for u in plain.updates] == [sum(samples.targets[i] for i in w.sample_ids) for w in windows]
    assert plain.updates[-1].consumed_tokens == sum(samples.lengths)
    assert [u.learning_rate for u in plain.updates] == pytest.approx([1e-2, 1e-2 * 2 / 3, 1e-2 / 3])
    assert [(e.update, e.consumed_tokens) for e in plain.evaluations] == [(0, 0), (3, sum(samples.lengths))]
    assert set(plain.memory) == PHASES | {"load", "save"}
    assert plain.evaluations[-1].loss < plain.evaluations[0].loss
    assert TrialResult.from_json(plain.to_json()) == plain


@pytest.mark.parametrize(("num_workers", "micro_batch_size"), [(1, 1), (1, 4), (2, 1), (2, 2)])
def test_the_system_configuration_changes_nothing_of_what_is_learned(
    num_workers: int, micro_batch_size: int, gentle: TrialResult, tokens: TrialData, ranks: Ranks
) -> None:
    job = config(num_workers, micro_batch_size, **GENTLE)
    results = [train_here(job, tokens)] if num_workers == 1 else ranks(num_workers).run(train_here, job, tokens)
    for result in results:
        assert losses(result) == pytest.approx(losses(gentle), rel=ROUNDING)
        assert result.fingerprints == gentle.fingerprints
        assert [(u.tokens, u.targets) for u in result.updates] == [(u.tokens, u.targets) for u in gentle.updates]
    assert len({(tuple(losses(r)), tuple(r.updates), tuple(r.memory.items())) for r in results}) == 1


def mean_loss(base: nn.Module, dataset: TokenizedDataset, ids: Iterable[int]) -> torch.Tensor:
    """Return the mean loss over the target tokens of these samples, row by row, without padding."""
    losses = []
    for i in ids:
        row, targets = (torch.from_numpy(array) for array in dataset.sample(i))
        log_p = torch.log_softmax(base(input_ids=row[None].long()).logits[0], dim=-1)
        losses += [-log_p[t - 1, row[t]] for t in range(1, len(row)) if targets[t]]
    return torch.stack(losses).mean()


def test_losses_and_the_gradient_against_a_direct_computation(plain: TrialResult, tokens: TrialData) -> None:
    """The first evaluation and the first update; a LoRA adapter starts as nothing, so that is the base model's loss."""
    base = embedded.load(torch.float32, "sdpa")
    with torch.no_grad():
        right = mean_loss(base, tokens.eval, range(len(tokens.eval))).item()
    assert plain.evaluations[0].loss == pytest.approx(right, rel=ROUNDING)
    adapted = apply_adapter(base, config().learning)
    fill(adapted, None, seed=0)
    loss = mean_loss(adapted, tokens.train, batch.sample_order(12, seed=0, epoch=0)[:4])
    loss.backward()
    norm = sum(p.grad.pow(2).sum().item() for p in adapted.parameters() if p.requires_grad) ** 0.5
    assert plain.updates[0].loss == pytest.approx(loss.item(), rel=ROUNDING)
    assert plain.updates[0].grad_norm == pytest.approx(norm, rel=1e-4)


def job_up_to_the_rehearsal(job: TrialConfig, tokens: TrialData) -> tuple[NativeEngine, Feed, list[batch.Window]]:
    world = current("cpu")
    strategy = STRATEGIES["ddp"]
    plan = strategy.plan(job.system)
    setting = Setting(job.learning, job.system, plan, model.shape("embedded"), "cpu")
    engine = strategy.make_engine("embedded", None, setting, Layout(plan, world), 3)
    assert isinstance(engine, NativeEngine)
    updates = batch.plan_updates(tokens.train.samples(), 4, 0, max_tokens=None, epochs=1)
    return engine, Feed(tokens, plan.dp, plan.dp_rank(world.rank), 2, world.device), updates


def rehearsed(job: TrialConfig, tokens: TrialData) -> dict[str, bool]:
    """Return what the rehearsal left as it was, to the bit."""
    world = current("cpu")
    engine, feed, updates = job_up_to_the_rehearsal(job, tokens)
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    optimizer, schedule = repr(engine.optimizer.state_dict()), repr(engine.scheduler.state_dict())
    states = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    meter = MemoryMeter(world.device)
    with engine.undone():
        rehearse(engine, feed, updates, 2, meter)
    found = {
        "weights": all(torch.equal(p, weights[name]) for name, p in engine.module.named_parameters()),
        "gradients": all(p.grad is None for p in engine.module.parameters()),
        "optimizer": repr(engine.optimizer.state_dict()) == optimizer and not engine.optimizer.state,
        "schedule": repr(engine.scheduler.state_dict()) == schedule,
        "torch": torch.equal(torch.get_rng_state(), states[0]),
        "python": random.getstate() == states[1],
        "numpy": repr(np.random.get_state()) == states[2],
        "measured": set(meter.peaks(world)) == PHASES,
    }
    engine.close()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_the_rehearsal_changes_nothing(world: int, tokens: TrialData, ranks: Ranks) -> None:
    job = config(world, lora_dropout=0.1)
    for found in [rehearsed(job, tokens)] if world == 1 else ranks(world).run(rehearsed, job, tokens):
        assert all(found.values()), found


@pytest.mark.parametrize("accumulation", [1, 2, 5])
def test_the_rehearsal_measures_what_an_accumulated_update_needs(accumulation: int, tokens: TrialData) -> None:
    """Two micro batches stand for any number: from the second on, a forward pass runs beside the gradients.

    What more of them take is their own tokens: two tensors of int64 each.
    """
    world = current("cpu")
    peaks = []
    for real in (False, True):
        engine, feed, updates = job_up_to_the_rehearsal(config(adapter="full", learning_rate=1e-4), tokens)
        meter = MemoryMeter(world.device)
        if real:
            engine.step(*window_of(feed, updates, accumulation), meter)
            with meter.tracing(engine.owned):
                engine.step(*window_of(feed, updates, accumulation), meter)
        else:
            rehearse(engine, feed, updates, accumulation, meter)
        names = ("forward", "backward", "optimizer")
        peaks.append({name: meter.peaks(world)[name].worst for name in names})
        engine.close()
    rehearsed, measured = peaks
    inputs = 2 * 8 * slots_of_the_smallest(feed, updates) * max(0, accumulation - 2)
    for name, peak in rehearsed.items():
        assert peak.accounts.total + inputs == measured[name].accounts.total
        states = ("weights", "gradients", "optimizer_state")
        assert all(getattr(peak.accounts, s) == getattr(measured[name].accounts, s) for s in states)


def window_of(feed: Feed, updates: list[batch.Window], accumulation: int) -> tuple[list[Batch], int]:
    """Return a window that ends with the largest micro batch; those before are the smallest."""
    (small, few), (last, many) = feed.extremes(updates, accumulation)
    more = max(0, accumulation - 2)
    copies = [{k: v.clone() for k, v in small[0].items()} for _ in range(more)]
    return [*copies, *last], few * more + many


def slots_of_the_smallest(feed: Feed, updates: list[batch.Window]) -> int:
    return min(b["input_ids"].numel() for w in updates for b in feed.window(w)[0])


def test_the_rehearsal_takes_the_largest_batch_of_the_run(tokens: TrialData) -> None:
    _, feed, updates = job_up_to_the_rehearsal(config(), tokens)
    slots = [b["input_ids"].numel() for w in updates for b in feed.window(w)[0]]
    (first, small_targets), (second, targets) = feed.extremes(updates, accumulation=3)
    assert [b["input_ids"].numel() for b in first] == [min(slots)]
    assert [b["input_ids"].numel() for b in second] == [min(slots), max(slots)]
    assert small_targets == int((first[0]["labels"] != IGNORED).sum())
    assert targets == sum(int((b["labels"] != IGNORED).sum()) for b in second)
    assert len(list(feed.extremes(updates, accumulation=1))[1][0]) == 1


def test_an_evaluation_leaves_nothing_behind(tokens: TrialData) -> None:
    """litgpt#592: buffers that an evaluation kept let the next step run out of memory."""
    engine, feed, updates = job_up_to_the_rehearsal(config(adapter="full", learning_rate=1e-4), tokens)
    peaks = []
    for evaluated in (False, False, True):  # the first step makes the optimizer's state
        if evaluated:
            engine.evaluate(feed.evaluation())
        micro_batches, counts = feed.window(updates[0])
        meter = MemoryMeter(torch.device("cpu"))
        with meter.tracing(engine.owned):
            engine.step(micro_batches, counts.targets, meter)
        peaks.append({name: meter.peaks(current("cpu"))[name].worst for name in ("forward", "backward")})
    engine.close()
    assert peaks[2] == peaks[1]


def test_saves_leave_nothing_behind(tokens: TrialData, tmp_path: Path) -> None:
    """pytorch#104143: copies of every save stayed in host memory until there was none."""
    engine, feed, updates = job_up_to_the_rehearsal(config(adapter="full", learning_rate=1e-4), tokens)
    micro_batches, counts = feed.window(updates[0])
    engine.step(micro_batches, counts.targets, MemoryMeter(torch.device("cpu")))
    with MemoryTrace(torch.device("cpu"), engine.owned) as trace:
        engine.save(tmp_path / "0")
        held = trace.bytes
        for n in range(1, 20):
            engine.save(tmp_path / str(n))
            shutil.rmtree(tmp_path / str(n - 1))
        assert trace.bytes == held
    engine.close()


# Why a job stops


def test_it_stops_at_the_target(plain: TrialResult, tokens: TrialData) -> None:
    start, end = (e.loss for e in plain.evaluations)
    run = {"eval_every_tokens": 1, "target_eval_loss": (start + end) / 2}
    result = train_here(config(run=run), tokens)
    assert result.stop_reason == "target"
    found = [e.loss for e in result.evaluations]
    assert found[-1] <= run["target_eval_loss"] < min(found[:-1])
    assert len(result.updates) == len(found) - 1 < 4


def test_a_target_that_the_base_meets_costs_no_update(tokens: TrialData) -> None:
    result = train_here(config(run={"target_eval_loss": 100.0}), tokens)
    assert (result.stop_reason, result.updates, len(result.evaluations)) == ("target", (), 1)


def test_it_stops_at_nan_without_a_save(tokens: TrialData) -> None:
    result = train_here(config(learning_rate=1e30, max_grad_norm=0), tokens)
    assert (result.stop_reason, result.saves) == ("nan", ())
    assert len(result.updates) < 3


def after(losses: list[float], tokens: list[int]) -> History:
    """Return a run with these evaluations and updates."""
    consumed = list(accumulate(tokens))
    updates = [Update(k, c, n, 1, n, 1.0, 1.0, 1.0, 1.0) for k, (c, n) in enumerate(zip(consumed, tokens, strict=True))]
    return History(updates, [Evaluation(k, k, loss, 0.0) for k, loss in enumerate(losses)])


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        ([2.0, 1.6], None),
        ([2.0, 1.5], "target"),
        ([1.0], "target"),
        ([2.0, 3.0], None),  # the limit is 1.5 times the first evaluation
        ([2.0, 3.01], "diverged"),
        ([2.0, 5.0, 2.9], None),
        ([2.0, float("nan")], "nan"),
        ([2.0, float("inf")], "nan"),
    ],
)
def test_verdicts_on_the_last_evaluation(losses: list[float], reason: str | None) -> None:
    assert verdict(after(losses, []), config(run={"target_eval_loss": 1.5})) == reason
    if reason == "target":
        assert verdict(after(losses, []), config()) is None


@pytest.mark.parametrize(
    ("tokens", "due"),
    [([99], False), ([100], True), ([60, 30], False), ([60, 40], True), ([60, 250], True), ([150, 40], False)],
)
def test_an_evaluation_is_due_when_an_update_reaches_a_multiple(tokens: list[int], due: bool) -> None:
    assert evaluation_due(after([], tokens), config(run={"eval_every_tokens": 100})) is due
    assert evaluation_due(after([], tokens), config()) is False


def stopped_from_outside(job: TrialConfig, tokens: TrialData) -> tuple[TrialResult, list[Any]]:
    told: list[Any] = []
    hooks = Hooks(told.append, lambda: True) if current("cpu").rank == 0 else None
    return train_here(job, tokens, hooks), told


def test_rank_0_hears_progress_and_can_stop_all(tokens: TrialData, ranks: Ranks) -> None:
    job = changed(config(2), eval_every_tokens=1)
    (first, told), (second, silent) = ranks(2).run(stopped_from_outside, job, tokens)
    assert first.stop_reason == second.stop_reason == "requested"
    assert len(first.updates) == 1
    assert [facts["phase"] for facts in told] == ["evaluate", "train"]
    assert silent == []
