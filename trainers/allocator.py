"""What torch's CUDA caching allocator reserves for a sequence of requests: a replay, without CUDA.

Source: torch 2.13, c10/cuda/CUDACachingAllocator.cpp, with default settings: requests in multiples of 512 bytes; a pool
of small and one of large blocks for every stream; the smallest free block that is large enough; what is left of it is
split off; neighbours that are free are merged; segments go back to the device only when there is nothing else left.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

GRANULE = 512  # bytes: every request is rounded up to a multiple
MIB = 2**20
SMALL = MIB  # requests up to this are met from the small pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB  # for requests of the large pool below half of it
ROUND_LARGE = 2 * MIB  # larger ones get a segment of their own, rounded up to a multiple


class OutOfMemory(Exception):
    """A request does not fit, even after all that can be given back was given back."""


@dataclass(frozen=True)
class Request:
    """Bytes that are asked for on a stream (size > 0) under a key, or that the key's holder gives back (size == 0)."""

    key: int
    size: int
    stream: int = 0


Pool = list[tuple[int, int]]
"""Free blocks of a stream and kind, as (size, address), ascending."""


@dataclass
class Block:
    """A stretch of a segment, in use or free, between its neighbours."""

    address: int
    size: int
    pool: tuple[int, bool]  # stream, whether small
    free: bool = False
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)


class Allocator:
    """The state of the allocator; `reserved` and `peak` are in bytes. `limit`: of the device, for this process."""

    def __init__(self, limit: float = float("inf")) -> None:
        self.limit = limit
        self.reserved = self.peak = self.retries = 0
        self._held: dict[int, Block] = {}
        self._free: dict[tuple[int, bool], Pool] = {}
        self._blocks: dict[int, Block] = {}  # free ones, by address
        self._end = 0  # of the addresses given to segments

    def replay(self, requests: Iterable[Request]) -> int:
        """Meet requests in order; return the most that was reserved meanwhile. Raises OutOfMemory."""
        self.peak = self.reserved
        for request in requests:
            if request.size:
                self.allocate(request)
            else:
                self.release(request.key)
        return self.peak

    def allocate(self, request: Request) -> None:
        """Meet one request. Raises OutOfMemory."""
        size = -(-request.size // GRANULE) * GRANULE
        kind = (request.stream, size <= SMALL)
        block = self._found(kind, size) or self._segment(kind, size)
        left = block.size - size
        if left >= GRANULE if kind[1] else left > SMALL:
            rest = Block(block.address + size, left, kind, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.size, block.after = size, rest
            self._put(rest)
        self._held[request.key] = block

    def release(self, key: int) -> None:
        """Take back what a key holds, and merge it with free neighbours."""
        block = self._held.pop(key)
        if block.before is not None and block.before.free:
            block = self._joined(self._taken(block.before), block)
        if block.after is not None and block.after.free:
            block = self._joined(block, self._taken(block.after))
        self._put(block)

    def _found(self, kind: tuple[int, bool], size: int) -> Block | None:
        """Return the smallest free block of a kind that is large enough, no longer free."""
        pool = self._free.get(kind, [])
        at = bisect_left(pool, (size, 0))
        return self._taken(self._blocks[pool[at][1]]) if at < len(pool) else None

    def _segment(self, kind: tuple[int, bool], size: int) -> Block:
        """Return memory of the device; before giving up, all segments that nobody uses go back to it."""
        rounded = -(-size // ROUND_LARGE) * ROUND_LARGE
        needed = SMALL_SEGMENT if kind[1] else LARGE_SEGMENT if size < LARGE_SEGMENT // 2 else rounded
        if self.reserved + needed > self.limit:
            self.retries += 1
            self._return_unused()
            if self.reserved + needed > self.limit:
                raise OutOfMemory(f"{size} bytes were asked for beside {self.reserved} reserved of {self.limit}")
        self.reserved += needed
        self.peak = max(self.peak, self.reserved)
        self._end += needed
        return Block(self._end - needed, needed, kind)

    def _return_unused(self) -> None:
        for block in list(self._blocks.values()):
            if block.before is None and block.after is None:
                self._taken(block)
                self.reserved -= block.size

    def _put(self, block: Block) -> None:
        block.free = True
        self._blocks[block.address] = block
        insort(self._free.setdefault(block.pool, []), (block.size, block.address))

    def _taken(self, block: Block) -> Block:
        block.free = False
        del self._blocks[block.address]
        pool = self._free[block.pool]
        del pool[bisect_left(pool, (block.size, block.address))]
        return block

    @staticmethod
    def _joined(first: Block, second: Block) -> Block:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first
