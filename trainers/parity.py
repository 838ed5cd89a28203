"""Proof, within a trial, that its strategy takes the steps that one process alone would take.

The losses and gradient norms of its first updates, dropout off, are compared with those of one process that trains on
the same windows. How much of a difference is rounding is measured: the same process, the samples in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from trainers import miniature
from trainers.batch import Window
from trainers.config import SystemConfig, TrialConfig
from trainers.diagnose import OUT_OF_MEMORY, classify
from trainers.engine import Engine
from trainers.feed import Feed
from trainers.layout import Layout
from trainers.memory import MemoryMeter, reset_host_peak, return_memory
from trainers.prepare import TrialData
from trainers.ranks import World
from trainers.result import FirstUpdates, History, Miniature, Proof, Reference
from trainers.strategies import STRATEGIES, Setting

UPDATES = 2  # the second one has gone through the optimizer


class Prover:
    """Collects the proof of one trial. Every rank calls the methods in this order, all of them."""

    def __init__(self, wanted: Literal["none", "steps", "reference"], setting: Setting, layout: Layout) -> None:
        self._wanted, self._setting, self._layout = wanted, setting, layout
        self._small: Miniature | None = None
        self._reference: Reference | None = None
        self._first: FirstUpdates | None = None

    def alone(self, config: TrialConfig, data: TrialData, updates: Sequence[Window]) -> None:
        """Do what needs the device's memory, before any rank holds a model."""
        if self._wanted != "none":
            self._small = miniature.compared(config.model, config.model_revision, self._setting, self._layout)
        if self._wanted == "reference":
            self._reference = one_process(config, data, updates, self._setting, self._layout.world)
        return_memory()  # it would count as the trial's
        reset_host_peak()

    def together(self, engine: Engine, feed: Feed, updates: Sequence[Window]) -> None:
        """Do what needs the trial's own engine, which is left as it was."""
        if self._wanted != "none" and has_dropout(engine.module):
            self._first = first_updates(engine, feed, updates)
        if self._wanted == "reference" and self._reference is None:
            self._reference = own(engine, feed, updates, self._setting.compute_dtype)

    def result(self, history: History) -> Proof | None:
        """Return the proof; without dropout the first updates are those of the run."""
        if self._wanted == "none":
            return None
        done = history.updates[:UPDATES]
        first = FirstUpdates(tuple(u.loss for u in done), tuple(u.grad_norm for u in done))
        return Proof(self._first or first, self._small, self._reference)


def one_process(
    config: TrialConfig, data: TrialData, updates: Sequence[Window], setting: Setting, world: World
) -> Reference | None:
    """Return what one process does in the first updates, or None where the job does not fit into it.

    Rank 0 does it, before any rank holds a model; every rank must call this.
    """
    layout = Layout.alone(world)
    found, fault = world.broadcast(lambda: _tried(config, data, updates, setting, layout))
    if fault:
        raise RuntimeError(f"the run of one process, to compare with, fails: {fault}")  # on every rank: none waits
    return found


def _tried(
    config: TrialConfig, data: TrialData, updates: Sequence[Window], setting: Setting, layout: Layout
) -> tuple[Reference | None, str]:
    """Return what one process does, and a fault that is not a lack of memory."""
    try:
        return _one_process(config, data, updates, setting, layout), ""
    except Exception as error:  # whatever it is, the other ranks must hear of it
        if classify(error) in OUT_OF_MEMORY:
            return None, ""
        return None, f"{type(error).__name__}: {error}"[:1000]


def _one_process(
    config: TrialConfig, data: TrialData, updates: Sequence[Window], setting: Setting, layout: Layout
) -> Reference:
    # As little memory as one process can do with; models of an unknown kind may not be able to recompute.
    mode: Literal["none", "full"] = "full" if setting.shape is not None else "none"
    system = SystemConfig(activation_checkpointing=mode, attn_implementation=config.system.attn_implementation)
    setting = replace(setting, system=system, plan=layout.plan)
    engine: Engine | None = None
    try:
        strategy = STRATEGIES[system.strategy]
        engine = strategy.make_engine(config.model, config.model_revision, setting, layout, len(updates))
        one_row = Feed(data, 1, 0, 1, layout.device)
        first, noise = ordered_twice(engine, one_row, Feed(data, 1, 0, 2, layout.device), updates)
        return Reference("one process", first, noise, setting.compute_dtype)
    finally:
        if engine is not None:
            engine.close()


def own(engine: Engine, feed: Feed, updates: Sequence[Window], dtype: str) -> Reference:
    """Return what this trial itself does, in two orders: the reference of others where one process is too small."""
    first, noise = ordered_twice(engine, feed, feed, updates)
    return Reference("this trial", first, noise, dtype)


def ordered_twice(engine: Engine, feed: Feed, other: Feed, updates: Sequence[Window]) -> tuple[FirstUpdates, float]:
    """Return the first updates, and how far they move, relatively, when each window's samples come in reverse order.

    `other` makes the micro batches of the second time.
    """
    backwards = [replace(w, sample_ids=w.sample_ids[::-1]) for w in updates[:UPDATES]]
    first, second = first_updates(engine, feed, updates), first_updates(engine, other, backwards)
    return first, first.difference(second)


def first_updates(engine: Engine, feed: Feed, updates: Sequence[Window]) -> FirstUpdates:
    """Do the first updates without dropout, undo them, and return their losses and gradient norms."""
    meter = MemoryMeter(torch.device("cpu"))
    losses, norms = [], []
    with engine.undone(), without_dropout(engine.module):
        for window in updates[:UPDATES]:
            micro_batches, counts = feed.window(window)
            step = engine.step(micro_batches, counts.targets, meter)
            losses.append(step.loss_sum / max(counts.targets, 1))
            norms.append(step.grad_norm)
    return FirstUpdates(tuple(losses), tuple(norms))


def has_dropout(model: nn.Module) -> bool:
    """Tell whether any dropout of a model is on in training."""
    return any(getattr(m, name) > 0 for m, name in _dropouts(model))


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Switch every dropout of a model off."""
    found = [(m, name, getattr(m, name)) for m, name in _dropouts(model)]
    for m, name, _ in found:
        setattr(m, name, 0.0)
    try:
        yield
    finally:
        for m, name, rate in found:
            setattr(m, name, rate)


def _dropouts(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            yield m, "p"
        if isinstance(getattr(m, "attention_dropout", None), float):  # of transformers' attention modules
            yield m, "attention_dropout"
