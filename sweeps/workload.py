"""What data asks of a configuration: the micro batch that decides memory, and those that decide time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from trainers import batch as batching
from trainers.batch import Counts, Window
from trainers.ledger import MicroBatch
from trainers.prepare import TrialData
from trainers.strategies import Setting


@dataclass(frozen=True)
class Work:
    """What an update asks of a rank."""

    largest: MicroBatch
    """with the most slots that a run meets: there memory peaks"""
    usual: MicroBatch
    """rows as long as they are on average, padding counted"""
    tokens: float
    """of an update, over all ranks, padding not counted"""
    targets: float


class Workload(Protocol):
    """Some data."""

    def of(self, setting: Setting) -> Work:
        """Return what it asks of a configuration."""

    def tokens(self, seq_len: int) -> float | None:
        """Return how many tokens one pass over it has; None where it has no end."""


class FullRows:
    """The worst that data can be: every row is `seq_len` tokens long, and all of them are targets."""

    def of(self, setting: Setting) -> Work:
        rows, length = setting.system.micro_batch_size, setting.learning.seq_len
        tokens = setting.learning.global_batch_size * length
        return Work(MicroBatch(rows, length, length), MicroBatch(rows, length, length), tokens, tokens)

    def tokens(self, seq_len: int) -> float | None:
        return None


class OfData:
    """The data of a sweep: what its trials rehearse, and the windows that they are timed on."""

    def __init__(self, data: Mapping[int, TrialData], max_tokens: int | None, epochs: int) -> None:
        """`data`: by seq_len."""
        self._data, self._max_tokens, self._epochs = data, max_tokens, epochs
        self._updates, self._work = cache(self._planned), cache(self._counted)

    def of(self, setting: Setting) -> Work:
        from trainers.token_loss import keeps_heads

        learning, system, plan = setting.learning, setting.system, setting.plan
        return self._work(
            learning.seq_len, learning.global_batch_size, learning.seed, plan.dp, system.micro_batch_size,
            system.arrangement == "length", plan.pp > 1, keeps_heads(setting),
        )  # fmt: skip

    def tokens(self, seq_len: int) -> float | None:
        return float(sum(self._data[seq_len].train.samples().lengths))

    def _planned(self, seq_len: int, batch: int, seed: int) -> Sequence[Window]:
        samples = self._data[seq_len].train.samples()
        return batching.plan_updates(samples, batch, seed, max_tokens=self._max_tokens, epochs=self._epochs)

    def _counted(
        self, seq_len: int, batch: int, seed: int, dp: int, micro: int, by_length: bool, alike: bool, only_targets: bool
    ) -> Work:
        import torch

        from trainers.feed import Feed
        from trainers.speed import WINDOWS

        arrangement = "length" if by_length else "drawn"
        feed = Feed(self._data[seq_len], dp, 0, micro, torch.device("cpu"), arrangement, alike)  # type: ignore[arg-type]
        largest = feed.largest([feed.arranged(w) for w in self._updates(seq_len, batch, seed)], only_targets)
        windows = [feed.arranged(w) for w in batching.stratified(feed.samples, batch, WINDOWS, seed)]
        counts, rows = sum((feed.count(w) for w in windows), Counts()), WINDOWS * batch
        usual = MicroBatch(micro, max(1, round(counts.slots / rows)), max(1, round(counts.targets / rows)))
        return Work(largest, usual, counts.tokens / WINDOWS, counts.targets / WINDOWS)
