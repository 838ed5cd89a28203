"""`pytest tests/strategies` proves every combination; a run of all tests a pairwise subset."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.strategies.cells import all_cells, pairwise
from tests.strategies.reference import save_models

CELLS = all_cells()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cells that add no pair of values, unless this folder was asked for."""
    if any("strategies" in str(argument) for argument in config.invocation_params.args):
        return
    kept = {cell.name for cell in pairwise()}
    extra = [i for i in items if i.originalname == "test_cell" and i.callspec.params["name"] not in kept]  # type: ignore[attr-defined]
    items[:] = [item for item in items if item not in extra]
    config.hook.pytest_deselected(items=extra)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny models."""
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many combinations were proved equal."""
    passed = [r for r in terminalreporter.getreports("passed") if "::test_cell[" in r.nodeid and r.when == "call"]
    if passed:
        terminalreporter.write_line(f"{len(passed)} of {len(CELLS)} combinations take the step that one process takes")
