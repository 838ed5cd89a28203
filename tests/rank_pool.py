"""Long-lived gloo ranks for tests: forked from a process that has imported torch, then sent function after function.

A pool that met an exception or a timeout is killed, since its ranks no longer agree on which collective comes next;
the next call forks a new one.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

# What the ranks need, imported once by the process that they are forked from. It must start no threads.
PRELOAD = [
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.llama.modeling_llama",
    "peft",
]
START_S = 180.0  # the imports take a few seconds of CPU, and minutes on a busy machine
GRACE_S = 3.0  # after the first rank has failed: peers that fail by themselves do it in this time


class RankPool:
    """`size` processes that form one process group: `run(function, *args)` returns what each rank returned."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._members: list[tuple[Any, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Call a module-level function on every rank; return the results in rank order.

        Results travel as pickled bytes. The first exception is raised here as it was, with its rank and traceback as
        a note; a rank that does not answer in time is a TimeoutError.
        """
        if not self._members:
            self._start()
        # Ranks are older than the test modules: they need the path on which those are found.
        request = pickle.dumps((sys.path, pickle.dumps((function, args))))
        for _, connection in self._members:
            connection.send_bytes(request)
        try:
            return self._collect(time.monotonic() + timeout_s, timeout_s)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End the ranks at once; nothing that a test left in them can hold that up."""
        for process, connection in self._members:
            process.kill()
            connection.close()
        for process, _ in self._members:
            process.join()
        self._members = []
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> None:
        context = warm_up()
        self._folder = tempfile.TemporaryDirectory(prefix="rank-pool-")
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, self.size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        atexit.register(self.kill)
        for rank, (_, connection) in enumerate(self._members):
            if not connection.poll(START_S):
                self.kill()
                raise TimeoutError(f"rank {rank} did not start in {START_S:.0f} s")
            connection.recv_bytes()

    def _collect(self, deadline: float, timeout_s: float) -> list[Any]:
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._members)}
        results: dict[int, Any] = {}
        failure: BaseException | None = None
        while waiting:
            ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
            if not ready and failure is None:
                raise TimeoutError(f"no answer from rank(s) {sorted(waiting.values())} in {timeout_s:.0f} s")
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    error, value = pickle.loads(connection.recv_bytes())
                except EOFError:
                    error, value = RuntimeError("the process died"), ""
                if error is None:
                    results[rank] = value
                else:
                    error.add_note(f"on rank {rank} of {self.size}: {value}")
                    failure = failure or error
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failure is not None:
            raise failure
        return [results[rank] for rank in range(self.size)]


def warm_up() -> ForkServerContext:
    """Start the process that ranks are forked from, and return at once; it imports what they need meanwhile."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    return context


def serve(rank: int, size: int, store: str, connection: Connection) -> None:
    """Run one rank: join the process group, then execute what is sent, until killed."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore", FutureWarning)  # as in pyproject.toml; nobody captures what ranks print
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=30))
    connection.send_bytes(b"ready")
    while True:
        sys.path[:], call = pickle.loads(connection.recv_bytes())
        connection.send_bytes(_execute(call))
        gc.collect()


def _execute(call: bytes) -> bytes:
    """Return the pickled pair (None, result) or (exception, traceback)."""
    try:
        function, args = pickle.loads(call)
        return pickle.dumps((None, function(*args)))
    except BaseException as error:
        trace = traceback.format_exc()
        try:
            reply = pickle.dumps((error, trace))
            pickle.loads(reply)
        except Exception:  # an exception that does not pickle: its text must do
            reply = pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), trace))
        return reply
