"""What sweep tests share: one Ray cluster of two nodes and one MLflow store for the session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sweeps.launch import RAY_ENVIRONMENT


@pytest.fixture(scope="session")
def _two_nodes() -> Iterator[str]:
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    yield cluster.address
    import ray

    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def cluster(_two_nodes: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two nodes of one CPU each, joined through RAY_ADDRESS."""
    monkeypatch.setenv("RAY_ADDRESS", _two_nodes)
    return _two_nodes


@pytest.fixture(scope="session")
def _database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mlflow") / "mlflow.db"


@pytest.fixture(scope="module")
def module_store(_database: Path) -> Iterator[str]:
    """The shared store, for fixtures of a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{_database}")
        yield f"sqlite:///{_database}"


@pytest.fixture
def store(_database: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An MLflow store that all tests share: its schema is made once."""
    uri = f"sqlite:///{_database}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri
