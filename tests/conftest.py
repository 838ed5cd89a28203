"""For all tests: no network, one thread a process, quiet libraries; and ranks to run on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

# Before any test module imports the libraries that read these; processes started by tests inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["MLFLOW_LOGGING_LEVEL"] = "ERROR"
os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
os.environ["GIT_PYTHON_REFRESH"] = "quiet"
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no look-up of this machine's name

import pytest

from tests.rank_pool import RankPool, warm_up


@pytest.hookimpl(tryfirst=True)  # before the plugin reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run in several processes, keep together what shares the pool of ranks, and what the cluster."""
    for item in items:
        folder = item.path.parent.name
        shared = "cluster" if item.path.stem in ("test_launch", "test_run", "test_sweep") else item.path.stem
        # One group for all of a folder: many pools of ranks side by side starve each other on few cores.
        of_ranks = folder == "trainers" or "rank" in shared
        group = folder if folder == "strategies" else "ranks" if of_ranks else shared
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the imports of the ranks go on beside the first tests."""
    needed = any("ranks" in getattr(item, "fixturenames", ()) for item in session.items)
    if needed and "PYTEST_XDIST_WORKER" not in os.environ:
        warm_up()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(2).run(function, *args)`: call a module-level function on 2 gloo ranks, return a list of 2 results."""
    pools: dict[int, RankPool] = {}

    def of(size: int) -> RankPool:
        return pools.setdefault(size, RankPool(size))

    yield of
    for pool in pools.values():
        pool.kill()
