"""One clean stop: at once, or after what belongs together; and one that insists."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from sweeps import signals


@pytest.fixture(autouse=True)
def _handled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    clock = [1000.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: clock[0])
    with signals.handled():
        yield


def interrupt(after_s: float = 0.0) -> None:
    now = signals.time.monotonic()
    signals.time.monotonic = lambda: now + after_s  # type: ignore[assignment]
    os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_stops_at_once_and_the_next_does_not_disturb_the_end() -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    interrupt(1.0)
    with pytest.raises(KeyboardInterrupt):
        signals.check()
    with pytest.raises(KeyboardInterrupt):
        interrupt(signals.INSISTS_S + 1.0)


def record(done: list[str], *signals_after_s: float) -> None:
    with signals.held():
        for after_s in signals_after_s:
            interrupt(after_s)
        done.append("all of it")


def test_what_belongs_together_is_done_first() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        record(done, 0.0)
    assert done == ["all of it"]


def test_one_that_insists_does_not_wait() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        record(done, 0.0, signals.INSISTS_S + 1.0)
    assert done == []
