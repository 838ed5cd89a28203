"""Windows, micro batches and token counts: worked by hand, and recomputed the naive way."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import pytest

from trainers import batch
from trainers.batch import Counts, Samples, Window


def data(count: int, seed: int = 0) -> Samples:
    rng = random.Random(seed)
    lengths = [rng.randint(2, 40) for _ in range(count)]
    return Samples(lengths, [rng.randint(0, n - 1) for n in lengths])


def test_the_order_is_a_permutation_that_depends_on_seed_and_epoch() -> None:
    order = batch.sample_order(50, seed=3, epoch=0)
    assert sorted(order) == list(range(50))
    assert order == batch.sample_order(50, seed=3, epoch=0)
    others = [batch.sample_order(50, 3, 1), batch.sample_order(50, 4, 0), list(range(50))]
    assert all(order != other for other in others)


def test_windows_of_two_epochs_with_a_short_last_one() -> None:
    """7 samples at a global batch of 3: windows of 3, 3, 1 an epoch, each epoch visits each sample once."""
    found = list(itertools.islice(batch.windows(7, 3, seed=0), 6))
    assert [len(w.sample_ids) for w in found] == [3, 3, 1, 3, 3, 1]
    assert [w.update for w in found] == [0, 1, 2, 3, 4, 5]
    assert [w.epoch for w in found] == [0, 0, 0, 1, 1, 1]
    for epoch in (0, 1):
        visited = [i for w in found[3 * epoch : 3 * epoch + 3] for i in w.sample_ids]
        assert visited == batch.sample_order(7, 0, epoch)


@pytest.mark.parametrize("start", range(8))
def test_windows_from_a_later_start_are_the_same_windows(start: int) -> None:
    whole = list(itertools.islice(batch.windows(7, 3, seed=5), 10))
    assert list(itertools.islice(batch.windows(7, 3, seed=5, start=start), 10 - start)) == whole[start:]


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
@pytest.mark.parametrize("micro", [1, 2, 3, 8])
def test_a_split_loses_and_doubles_nothing_and_is_even(dp: int, micro: int) -> None:
    for size in range(1, 34):
        window = Window(0, 0, tuple(random.Random(size).sample(range(100), size)))
        shares = batch.split(window, dp, micro)
        assert len(shares) == dp
        assert len({len(share) for share in shares}) == 1
        assert max(len(m) for share in shares for m in share) <= micro
        assert sorted(i for share in shares for m in share for i in m) == sorted(window.sample_ids)
        # No micro step is computed in vain: without the last one the window does not fit.
        assert (len(shares[0]) - 1) * dp * micro < size <= len(shares[0]) * dp * micro


def test_a_split_by_hand() -> None:
    window = Window(0, 0, (4, 0, 3, 1, 2))
    assert batch.split(window, dp=2, micro_batch_size=2) == [[(4, 3), (2,)], [(0, 1), ()]]


def test_counts_by_hand() -> None:
    """Lengths 3 and 10, padded to 10, with targets 1 and 4: 20 slots, 13 tokens, 5 targets."""
    samples = Samples([3, 10], [1, 4])
    assert batch.count((0, 1), samples) == Counts(slots=20, tokens=13, targets=5)
    assert batch.count((0, 1), samples).padding == 0.35
    assert batch.count((), samples) == Counts()
    assert Counts().padding == 0.0
    window = Window(0, 0, (0, 1))
    assert batch.count_window(window, samples, dp=1, micro_batch_size=2) == Counts(20, 13, 5)
    assert batch.count_window(window, samples, dp=2, micro_batch_size=1) == Counts(13, 13, 5)


def test_windows_and_padding_recomputed_the_naive_way() -> None:
    """An epoch's total slots: lists, one sample at a time, no helper of the module but the order."""
    samples, dp, micro, size = data(29), 2, 2, 8
    order = batch.sample_order(29, seed=7, epoch=0)
    slots = tokens = targets = 0
    while order:
        window, order = order[:size], order[size:]
        for rank in range(dp):
            share = [sample for position, sample in enumerate(window) if position % dp == rank]
            while share:
                rows, share = share[:micro], share[micro:]
                longest = 0
                for row in rows:
                    longest = samples.lengths[row] if samples.lengths[row] > longest else longest
                    tokens += samples.lengths[row]
                    targets += samples.targets[row]
                slots += longest * len(rows)
    updates = batch.plan_updates(samples, size, seed=7, max_tokens=None, epochs=1)
    found = sum((batch.count_window(w, samples, dp, micro) for w in updates), Counts())
    assert found == Counts(slots, tokens, targets)
    assert (tokens, targets) == (sum(samples.lengths), sum(samples.targets))


def test_updates_by_epochs() -> None:
    samples = data(10)
    updates = batch.plan_updates(samples, 4, seed=0, max_tokens=None, epochs=3)
    assert [len(w.sample_ids) for w in updates] == [4, 4, 2] * 3


@pytest.mark.parametrize(
    ("max_tokens", "count"),
    # 4 samples of 5 tokens, 2 an update: 10 tokens each, 20 an epoch. The last update may cross the limit.
    [(1, 1), (10, 1), (11, 2), (20, 2), (21, 3), (100, 10)],
)
def test_updates_by_tokens_repeat_the_data(max_tokens: int, count: int) -> None:
    samples = Samples([5] * 4, [1] * 4)
    updates = batch.plan_updates(samples, 2, seed=0, max_tokens=max_tokens, epochs=1)
    assert [w.update for w in updates] == list(range(count))
    assert [w.epoch for w in updates] == [k // 2 for k in range(count)]


def test_a_pipelines_micro_batches_have_one_length() -> None:
    """Rows of 3, 10, 4 and 5 tokens in micro batches of two on one rank: 4 rows of 10 slots, not 2 of 10 and 2 of 5."""
    samples, window = Samples([3, 10, 4, 5], [1] * 4), Window(0, 0, (0, 1, 2, 3))
    assert batch.count_window(window, samples, 1, 2).slots == 30
    assert batch.count_window(window, samples, 1, 2, alike=True) == Counts(40, 22, 4)


def test_the_extreme_micro_batches_have_the_fewest_slots_and_the_most() -> None:
    samples = Samples([2, 9, 4, 4], [1] * 4)
    updates = [Window(0, 0, (0, 2, 1, 3))]
    # dp=1, micro 2: (0, 2) has 8 slots, (1, 3) has 18. dp=2: rank 0 gets (0, 1) with 18, rank 1 (2, 3) with 8.
    assert batch.extreme_micro_batches(updates, samples, 1, 2) == ((0, 2), (1, 3))
    assert batch.extreme_micro_batches(updates, samples, 2, 2) == ((2, 3), (0, 1))
    # dp=3, micro 2: (0, 3) has 8 slots, and ranks 1 and 2 one sample each.
    assert batch.extreme_micro_batches(updates, samples, 3, 2) == ((2,), (1,))


def test_fingerprints_see_the_samples_and_nothing_of_the_split() -> None:
    samples = data(20)
    updates = batch.plan_updates(samples, 4, seed=0, max_tokens=None, epochs=1)
    prints = batch.fingerprints(updates, samples)
    assert len(prints) == len(set(prints)) == 5
    turned = [Window(w.update, w.epoch, w.sample_ids[::-1]) for w in updates]
    assert batch.fingerprints(turned, samples) == prints
    swapped = list(updates)
    swapped[2] = Window(2, 0, (*updates[2].sample_ids[:3], updates[3].sample_ids[0]))
    other = batch.fingerprints(swapped, samples)
    assert other[:2] == prints[:2]
    assert all(a != b for a, b in zip(other[2:], prints[2:], strict=True))
    fewer = Samples(samples.lengths, [*samples.targets[:-1], samples.targets[-1] + 1])
    assert batch.fingerprints(updates, fewer)[-1] != prints[-1]


def test_plan_and_batch_need_the_standard_library_only() -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        "import trainers.plan, trainers.batch\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names) - {'trainers'}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
