"""The replay of CUDA's caching allocator against what its source says, worked by hand."""

from __future__ import annotations

import pytest

from trainers.allocator import MIB, Allocator, OutOfMemory, Request


def reserved(*requests: tuple[int, float] | tuple[int, float, int]) -> float:
    """Return the MiB that are reserved after requests of (key, MiB[, stream]); 0 MiB gives back."""
    allocator = Allocator()
    allocator.replay(Request(key, int(size * MIB), *stream) for key, size, *stream in requests)
    return allocator.reserved / MIB


@pytest.mark.parametrize(
    ("requests", "mib"),
    [
        ([(1, 0.3)], 2),  # up to 1 MiB: a segment of 2 MiB
        ([(1, 0.3), (2, 1.0), (3, 0.5)], 2),  # which serves others
        ([(1, 1.5)], 20),  # above, and below 10 MiB: a segment of 20 MiB
        ([(1, 9), (2, 9)], 20),
        ([(1, 9), (2, 9), (3, 9)], 40),
        ([(1, 10)], 10),  # from 10 MiB on: rounded up to 2 MiB
        ([(1, 11)], 12),
        ([(1, 30), (1, 0), (2, 12), (3, 12)], 30),  # what is left of a block is split off
        ([(1, 12), (1, 0), (2, 11), (3, 1.5)], 32),  # but not 1 MiB of a large one
        ([(1, 30), (1, 0), (2, 10), (3, 10), (4, 10), (3, 0), (2, 0), (5, 20)], 30),  # free neighbours are merged
        ([(1, 30), (1, 0), (2, 10), (3, 10), (4, 10), (2, 0), (4, 0), (5, 20)], 50),  # and no others
        ([(1, 40), (2, 20), (1, 0), (2, 0), (3, 19), (4, 40)], 60),  # the smallest that is large enough is taken
        ([(1, 20), (1, 0), (2, 20, 7)], 40),  # another stream's is not
    ],
)
def test_what_is_reserved(requests: list[tuple[int, float]], mib: float) -> None:
    assert reserved(*requests) == mib


def test_what_nobody_uses_is_given_back_before_a_request_fails() -> None:
    allocator = Allocator(limit=50 * MIB)
    allocator.replay([Request(1, 20 * MIB), Request(2, 30 * MIB), Request(1, 0)])
    assert allocator.replay([Request(3, 19 * MIB)]) == 50 * MIB  # within the free 20
    allocator.replay([Request(3, 0), Request(4, 16 * MIB, 1)])
    assert (allocator.reserved, allocator.retries) == (46 * MIB, 1)
    with pytest.raises(OutOfMemory, match=f"{6 * MIB} bytes were asked for"):
        allocator.allocate(Request(5, 6 * MIB))
