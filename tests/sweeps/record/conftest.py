"""A database for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sweeps.mlflow_store import prepare_sqlite
from tests.sweeps.record.trials import Store


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "mlflow.db"  # a schema takes seconds to make, and a moment to copy
    prepare_sqlite(f"sqlite:///{path}")
    assert [p.name for p in path.parent.iterdir()] == ["mlflow.db"]
    return path


@pytest.fixture
def store(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    shutil.copy(template, tmp_path / "mlflow.db")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    return Store(tmp_path)
