"""From windows of sample ids to a rank's micro batches on its device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from trainers import batch as batching
from trainers.batch import Counts, Window
from trainers.data import TokenizedDataset, collate
from trainers.engine import Batch
from trainers.prepare import TrialData


class Feed:
    """Turns windows into this rank's micro batches on its device."""

    def __init__(self, data: TrialData, dp: int, dp_rank: int, micro_batch_size: int, device: torch.device) -> None:
        self.data, self._dp, self._dp_rank, self._micro, self._device = data, dp, dp_rank, micro_batch_size, device
        self._samples = data.train.samples()
        held = data.eval.samples()
        longest_first = sorted(range(len(held)), key=lambda i: (-held.lengths[i], i))
        self._held = batching.split(Window(0, 0, tuple(longest_first)), dp, micro_batch_size)[dp_rank]
        self.eval_targets = sum(held.targets)

    def window(self, window: Window) -> tuple[list[Batch], Counts]:
        """Return this rank's micro batches, and the counts of the whole window over all ranks."""
        mine = batching.split(window, self._dp, self._micro)[self._dp_rank]
        counts = batching.count_window(window, self._samples, self._dp, self._micro)
        return [self.batch(self.data.train, ids) for ids in mine], counts

    def worst(self, updates: Sequence[Window]) -> tuple[Batch, int]:
        """Return the micro batch of `updates` with the most slots, and its targets over all dp ranks."""
        ids = batching.worst_micro_batch(updates, self._samples, self._dp, self._micro)
        return self.batch(self.data.train, ids), batching.count(ids, self._samples).targets * self._dp

    def evaluation(self) -> Iterator[Batch]:
        """Yield this rank's share of the evaluation data, longest rows first, as many batches as every other rank."""
        return (self.batch(self.data.eval, ids) for ids in self._held)

    def batch(self, dataset: TokenizedDataset, ids: Sequence[int]) -> Batch:
        host = collate(dataset, ids, self.data.pad_id)
        if self._device.type != "cuda":
            return host
        return {k: v.pin_memory().to(self._device, non_blocking=True) for k, v in host.items()}
