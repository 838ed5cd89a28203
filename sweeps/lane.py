"""A lane: a Ray Train job that takes one trial after another, so that processes start and import once.

Each trial has a process group of its own among the first ranks of the lane. What fails ends the lane, and the next
trial gets new processes: after a failure, or out of memory, nothing in them is to be relied on. Where trials run side
by side, a lane that nobody uses ends by itself: others may wait for its workers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

POLL_S = 0.05
CLOSING_S = 20.0
IDLE_S = 2.0  # that a lane waits for its next trial where others may need its workers; Tune hands trials out in less


def switch_actor() -> Any:
    """Return the actor class through which a lane's ranks get jobs and give results."""
    import asyncio

    import ray

    @ray.remote
    class Switch:
        """Jobs by number, from 0; ranks ask for the next one and wait for it."""

        def __init__(self) -> None:
            self._jobs: list[Mapping[str, Any]] = []
            self._results: dict[int, Mapping[str, Any]] = {}
            self._meetings: dict[int, tuple[str, int]] = {}
            self._closed = False
            self._changed = asyncio.Condition()

        async def _notify(self) -> None:
            async with self._changed:
                self._changed.notify_all()

        async def submit(self, job: Mapping[str, Any]) -> int:
            self._jobs.append(job)
            await self._notify()
            return len(self._jobs) - 1

        async def job(self, number: int) -> Mapping[str, Any] | None:
            """Wait for a job; None: there will be no more."""
            async with self._changed:
                await self._changed.wait_for(lambda: self._closed or len(self._jobs) > number)
            return self._jobs[number] if len(self._jobs) > number else None

        async def meet(self, number: int, address: str, port: int) -> None:
            """Say where rank 0 keeps the store of a job's process group."""
            self._meetings[number] = address, port
            await self._notify()

        async def meeting(self, number: int) -> tuple[str, int]:
            async with self._changed:
                await self._changed.wait_for(lambda: number in self._meetings)
            return self._meetings[number]

        async def finish(self, number: int, result: Mapping[str, Any]) -> None:
            self._results[number] = result
            await self._notify()

        async def result(self, number: int) -> Mapping[str, Any]:
            async with self._changed:
                await self._changed.wait_for(lambda: number in self._results)
            return self._results.pop(number)

        async def close(self) -> None:
            self._closed = True
            await self._notify()

    return Switch


class Lane:
    """The job's driver: `fit` runs it in a thread, and returns or raises when it ends."""

    def __init__(self, switch: Any, name: str, workers: int, fit: Callable[[str], Any], idle_s: float | None) -> None:
        """`switch`: a handle of its own actor, by `name`; `idle_s`: seconds without a trial that end it, None: none."""
        self.workers, self._switch, self._idle_s = workers, switch, idle_s
        self._failure: Exception | None = None
        self._turn = threading.Lock()  # held by a trial, and by what ends the lane
        self._ending: threading.Timer | None = None
        self._thread = threading.Thread(target=self._fit, args=(fit, name), daemon=True)
        self._thread.start()

    def _fit(self, fit: Callable[[str], Any], name: str) -> None:
        try:
            fit(name)
        except Exception as error:  # Ray raises many types; run() hands it on
            self._failure = error

    def take(self) -> bool:
        """Take the lane for a trial, until `leave`; False where it has ended."""
        if not self._turn.acquire(blocking=False):
            return False  # it is ending
        if self._ending is not None:
            self._ending.cancel()
        if self._thread.is_alive():
            return True
        self._turn.release()
        return False

    def leave(self) -> None:
        """Give it back."""
        if self._idle_s is not None:
            self._ending = threading.Timer(self._idle_s, self._end_idle)
            self._ending.daemon = True
            self._ending.start()
        self._turn.release()

    def _end_idle(self) -> None:
        if self._turn.acquire(blocking=False):  # kept for good: nobody takes it again
            self.close()

    def run(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run a trial; return its result. Raises what the job ended with where it fails."""
        import ray

        result = self._switch.result.remote(ray.get(self._switch.submit.remote(job)))
        while not ray.wait([result], timeout=POLL_S)[0]:
            if not self._thread.is_alive():
                raise self._failure or RuntimeError("the lane's job ended without a result")
        found: Mapping[str, Any] = ray.get(result)
        return found

    def close(self) -> None:
        """Let the ranks go home, and wait for it."""
        import ray

        try:
            ray.get(self._switch.close.remote(), timeout=CLOSING_S)
        except ray.exceptions.RayError:
            return
        end = time.monotonic() + CLOSING_S
        while self._thread.is_alive() and time.monotonic() < end:
            time.sleep(POLL_S)
        ray.kill(self._switch)
