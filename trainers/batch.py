"""Which samples each update, rank and micro batch gets, and how many tokens that is. Standard library only.

Everything here follows from the lengths of the samples and the seed, so each rank knows the whole window's target
count without asking the others, and two splits of the same window can be compared by a fingerprint.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate


@dataclass(frozen=True)
class Samples:
    """The lengths of a data set: `lengths[i]` non-pad tokens, `targets[i]` of them loss-carrying, of sample i."""

    lengths: Sequence[int]
    targets: Sequence[int]

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True)
class Window:
    """One optimizer update: the ids of its samples, `global_batch_size` of them, fewer at the end of an epoch."""

    update: int
    epoch: int
    sample_ids: tuple[int, ...]


@dataclass(frozen=True)
class Counts:
    """Tokens of some micro batches: `slots` computed (padding included), `tokens` non-pad, `targets` in the loss."""

    slots: int = 0
    tokens: int = 0
    targets: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.slots + other.slots, self.tokens + other.tokens, self.targets + other.targets)

    @property
    def padding(self) -> float:
        """Share of the computed slots that is padding, 0 to 1."""
        return 1 - self.tokens / self.slots if self.slots else 0.0


def sample_order(num_samples: int, seed: int, epoch: int) -> list[int]:
    """Return the order in which epoch `epoch` visits the samples: a permutation that depends on seed and epoch."""
    order = list(range(num_samples))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def windows(num_samples: int, global_batch_size: int, seed: int, start: int = 0) -> Iterator[Window]:
    """Yield window after window, epoch after epoch, without end, beginning with update number `start`.

    The last window of an epoch holds what is left and is an update like any other.
    """
    per_epoch = -(-num_samples // global_batch_size)
    update = start
    while True:
        epoch, first = divmod(update, per_epoch)
        order = sample_order(num_samples, seed, epoch)
        for at in range(first, per_epoch):
            ids = order[at * global_batch_size : (at + 1) * global_batch_size]
            yield Window(update, epoch, tuple(ids))
            update += 1


def plan_updates(
    samples: Samples, global_batch_size: int, seed: int, *, max_tokens: int | None, epochs: int
) -> list[Window]:
    """Return the windows of one run: until `max_tokens` non-pad tokens are consumed, or `epochs` are over.

    The last window may cross `max_tokens`: updates are whole. With `max_tokens` the data is repeated as needed.
    """
    per_epoch = -(-len(samples) // global_batch_size)
    chosen: list[Window] = []
    tokens = 0
    for window in windows(len(samples), global_batch_size, seed):
        if tokens >= max_tokens if max_tokens is not None else window.update >= epochs * per_epoch:
            return chosen
        chosen.append(window)
        tokens += sum(samples.lengths[i] for i in window.sample_ids)
    raise AssertionError("windows() does not end")


def by_length(window: Window, samples: Samples) -> Window:
    """Return a window whose longest samples come first, equal ones as drawn.

    Split in this order, rows of a micro batch have similar lengths, and so have the micro batches that ranks compute at
    the same time. The gradient of a window is a sum, so that the order changes nothing but padding.
    """
    return replace(window, sample_ids=tuple(sorted(window.sample_ids, key=lambda i: -samples.lengths[i])))


def stratified(samples: Samples, global_batch_size: int, count: int, seed: int) -> list[Window]:
    """Return `count` windows that stand for all samples: one of each of as many equal shares of the sorted lengths.

    The middle one of each share, shuffled; data with fewer samples is repeated. Every candidate of a sweep with the
    same data and batch gets the same windows.
    """
    order = sorted(range(len(samples)), key=lambda i: (samples.lengths[i], i))
    drawn = count * global_batch_size
    chosen = [order[int((share + 0.5) * len(order) / drawn)] for share in range(drawn)]
    random.Random(f"{seed}/stratified").shuffle(chosen)
    return [Window(n, 0, tuple(chosen[n * global_batch_size : (n + 1) * global_batch_size])) for n in range(count)]


def split(window: Window, dp: int, micro_batch_size: int) -> list[list[tuple[int, ...]]]:
    """Return `micro[dp_rank][step]`: the sample ids of each micro batch of a window.

    Every rank gets the same number of micro batches, since unequal counts deadlock sharded strategies; in a short
    window some are smaller, or empty (the rank then computes one row of padding, which adds 0 to the loss).
    """
    ids = window.sample_ids
    steps = -(-len(ids) // (dp * micro_batch_size))
    shares = [ids[rank::dp] for rank in range(dp)]
    return [[share[s * micro_batch_size : (s + 1) * micro_batch_size] for s in range(steps)] for share in shares]


def count(micro_batch: Sequence[int], samples: Samples, padded_to: int = 0) -> Counts:
    """Count one micro batch padded to its longest sample, or to `padded_to` tokens if that is more."""
    lengths = [samples.lengths[i] for i in micro_batch]
    if not lengths:
        return Counts()
    return Counts(max(*lengths, padded_to) * len(lengths), sum(lengths), sum(samples.targets[i] for i in micro_batch))


def count_window(window: Window, samples: Samples, dp: int, micro_batch_size: int, alike: bool = False) -> Counts:
    """Count a window over all its ranks and micro batches; `alike`: of a rank all have one length, as in a pipeline."""
    shares = split(window, dp, micro_batch_size)
    counted = (count(m, samples, longest(share, samples) if alike else 0) for share in shares for m in share)
    return sum(counted, Counts())


def longest(share: Sequence[Sequence[int]], samples: Samples) -> int:
    """Return the length of the longest sample of some micro batches."""
    return max((samples.lengths[i] for ids in share for i in ids), default=0)


def extreme_micro_batches(
    updates: Sequence[Window], samples: Samples, dp: int, micro_batch_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the micro batches with the fewest slots and with the most that any rank meets: there memory peaks."""
    met = [m for w in updates for share in split(w, dp, micro_batch_size) for m in share if m]
    slots = [count(m, samples).slots for m in met]
    return met[slots.index(min(slots))], met[slots.index(max(slots))]


def fingerprints(updates: Sequence[Window], samples: Samples) -> list[str]:
    """Return a rolling fingerprint per update over its sample ids (as a set) and its number of targets.

    Equal at update k means: the same samples in every update up to k, whatever the split.
    """

    def link(previous: str, window: Window) -> str:
        targets = sum(samples.targets[i] for i in window.sample_ids)
        text = f"{previous}|{sorted(window.sample_ids)}|{targets}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    return list(accumulate(updates, link, initial=""))[1:]
