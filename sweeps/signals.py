"""Ctrl-C and SIGTERM: one clean stop, however often they come."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

INSISTS_S = 5.0  # a signal that comes so long after the last one means that the clean end does not come

stopping = threading.Event()
_last = 0.0
_held = False


def check() -> None:
    """Raise KeyboardInterrupt if a stop was asked for.

    The signal's own exception is lost where it strikes inside a callback of the interpreter, so it is asked for again
    between trials.
    """
    if stopping.is_set():
        raise KeyboardInterrupt


def _interrupt(*_: object) -> None:
    global _last
    before, _last = _last, time.monotonic()
    first = not stopping.is_set()
    stopping.set()
    insists = not first and _last - before > INSISTS_S
    if insists or (first and not _held):
        raise KeyboardInterrupt


@contextmanager
def held() -> Iterator[None]:
    """Let a stop wait until what is inside is done, as records that belong together are; one that insists does not."""
    global _held
    _held = True
    try:
        yield
    finally:
        _held = False
    check()


@contextmanager
def handled() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into one KeyboardInterrupt; what comes right after it does not disturb the clean end."""
    stopping.clear()
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stopping.clear()  # it was for what ran inside
