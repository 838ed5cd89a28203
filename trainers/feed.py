"""From windows of sample ids to a rank's micro batches on its device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch

from trainers import batch as batching
from trainers.batch import Counts, Window
from trainers.data import TokenizedDataset, collate
from trainers.diagnose import Running
from trainers.ledger import MicroBatch
from trainers.prepare import TrialData
from trainers.regions import DATA, region
from trainers.strategies import Setting
from trainers.token_loss import Batch, head_columns, keeps_heads


class Feed:
    """Turns windows into this rank's micro batches on its device."""

    def __init__(
        self,
        data: TrialData,
        dp: int,
        dp_rank: int,
        micro_batch_size: int,
        device: torch.device,
        arrangement: Literal["length", "drawn"] = "drawn",
        alike: bool = False,
    ) -> None:
        """`alike`: the engine pads all micro batches of a window to one length, as a pipeline does."""
        self.data, self.micro = data, micro_batch_size
        self._dp, self._dp_rank, self._device, self._arrangement = dp, dp_rank, device, arrangement
        self.alike, self.samples = alike, data.train.samples()
        self._given: list[tuple[int, ...]] = []  # the latest micro batches
        held = data.eval.samples()
        longest_first = sorted(range(len(held)), key=lambda i: (-held.lengths[i], i))
        self._held = batching.split(Window(0, 0, tuple(longest_first)), dp, micro_batch_size)[dp_rank]
        self.eval_targets = sum(held.targets)

    def window(self, window: Window) -> tuple[list[Batch], Counts]:
        """Return this rank's micro batches, and the counts of the whole window over all ranks."""
        with region(DATA):
            mine = batching.split(window, self._dp, self.micro)[self._dp_rank]
            self._given = mine
            return [self.batch(self.data.train, ids) for ids in mine], self.count(window)

    def count(self, window: Window) -> Counts:
        """Return the counts of a window over all ranks."""
        return batching.count_window(window, self.samples, self._dp, self.micro, self.alike)

    def arranged(self, window: Window) -> Window:
        """Return a window in the order in which it is split."""
        return batching.by_length(window, self.samples) if self._arrangement == "length" else window

    def extremes(self, updates: Sequence[Window], accumulation: int) -> Iterator[tuple[list[Batch], int]]:
        """Yield two windows to rehearse with, each with its targets over all dp ranks.

        The micro batch of `updates` with the fewest slots; then that with the most, where there is accumulation after
        the small one, so that its gradients are there.
        """
        small, worst = batching.extreme_micro_batches(updates, self.samples, self._dp, self.micro)
        for mine in ([small], [small, worst] if accumulation > 1 else [worst]):
            self._given = mine
            targets = sum(batching.count(ids, self.samples).targets for ids in mine) * self._dp
            yield [self.batch(self.data.train, ids) for ids in mine], targets

    def largest(self, updates: Sequence[Window], only_targets: bool) -> MicroBatch:
        """Return the size of the micro batch with the most slots."""
        _, ids = batching.extreme_micro_batches(updates, self.samples, self._dp, self.micro)
        tokens = max(self.samples.lengths[i] for i in ids)
        return MicroBatch(len(ids), tokens, self.heads(ids, only_targets) // len(ids))

    def heads(self, ids: Sequence[int], only_targets: bool) -> int:
        """Return for how many positions of a micro batch logits are made: all, or those at which a row has a target."""
        if not only_targets:
            return batching.count(ids, self.samples).slots
        return len(ids) * len({int(t) for i in ids for t in self.data.train.sample(i)[1].nonzero()[0]})

    def running(self, setting: Setting) -> Callable[[int], Running]:
        """Return what tells of the n-th micro batch of those given last."""

        def of(micro_step: int) -> Running:
            ids = self._given[min(micro_step, len(self._given) - 1)] if self._given else ()
            if not ids:
                return Running()
            longest = max(ids, key=lambda i: self.samples.lengths[i])
            train, tokens = self.data.train, self.samples.lengths[longest]
            heads = self.heads(ids, only_targets=keeps_heads(setting))
            logits = heads * setting.shape.vocab_size if setting.shape is not None else 0
            return Running(f"{train.source}:{train.lines[longest]}, {tokens:,} tokens", logits)

        return of

    def evaluation(self) -> Iterator[Batch]:
        """Yield this rank's share of the evaluation data, longest rows first, as many batches as every other rank."""
        return (self.batch(self.data.eval, ids) for ids in self._held)

    def batch(self, dataset: TokenizedDataset, ids: Sequence[int]) -> Batch:
        host = collate(dataset, ids, self.data.pad_id)
        if self._device.type != "cuda":
            return host
        host["head_columns"] = head_columns(host["labels"])
        return {k: v.pin_memory().to(self._device, non_blocking=True) for k, v in host.items()}
