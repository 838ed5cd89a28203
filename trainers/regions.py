"""Named stretches of a step, for whoever watches it: the trace of memory, and torch's profiler.

A region is seen from every thread: on CUDA the backward pass, and what is recomputed in it, runs in threads of its own
while the one that called it waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import record_function

RECOMPUTE = "recompute"  # a forward pass that the backward pass does again
LOSS = "loss"  # from the logits on
DATA = "data"  # waiting for the next micro batches
STEP = "step"  # one update

_inside: list[str] = []


@contextmanager
def region(name: str) -> Iterator[None]:
    """Give what runs inside a name."""
    _inside.append(name)
    try:
        with record_function(name):
            yield
    finally:
        _inside.remove(name)


def inside(name: str) -> bool:
    """Tell whether a region of this name is running."""
    return name in _inside
