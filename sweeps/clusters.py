"""Cluster presets: what a device can do and what it costs, from search_spaces/clusters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import Field, ValidationError

from sweeps.space import SPACES, faults_of
from sweeps.spec import Frozen, SweepSpec, keys
from trainers import yaml_text
from trainers.errors import UserError, did_you_mean


class PeakFlops(Frozen):
    """Dense peak of one device, FLOP/s by dtype."""

    bf16: float = Field(gt=0)
    fp16: float = Field(gt=0)
    tf32: float = Field(gt=0)
    fp32: float = Field(gt=0)


class ClusterPreset(Frozen):
    """Hardware numbers of a cluster; bandwidths are per device and one direction, in bytes per second."""

    name: str
    device: str
    devices_per_node: int = Field(ge=1)
    nodes: int = Field(1, ge=1)
    device_memory_gib: float = Field(gt=0)
    peak_flops: PeakFlops
    memory_bandwidth_bytes_per_s: float = Field(gt=0)
    intra_node_link_bytes_per_s: float = Field(gt=0)
    inter_node_link_bytes_per_s: float = Field(gt=0)
    host_memory_gib: float = Field(gt=0)
    host_link_bytes_per_s: float = Field(gt=0)
    price_per_gpu_hour: float = Field(ge=0)
    """USD; an example to be replaced by your own"""


def presets() -> dict[str, Path]:
    """Return the cluster presets that ship, by name."""
    return {path.stem: path for path in sorted((SPACES / "clusters").glob("*.yaml"))}


def load_cluster(name: str) -> ClusterPreset:
    """Read a preset by name or path. Raises UserError with all its faults."""
    path = presets().get(name) or Path(name).expanduser()
    if not path.is_file():
        raise UserError(
            f"cluster={name}: unknown{did_you_mean(name, presets())}; available: {', '.join(presets())}, "
            "or the path of a .yaml file"
        )
    try:
        return ClusterPreset.model_validate(yaml_text.read(path))
    except ValidationError as error:
        raise UserError([f"{path}: {fault}" for fault in faults_of(error, keys(ClusterPreset))]) from None


def price_per_gpu_hour(spec: SweepSpec, note: Callable[[str], None]) -> float:
    """Return the price to use: the spec's, else the cluster preset's example, else 1; and say which."""
    cluster = load_cluster(spec.cluster) if spec.cluster is not None else None
    if spec.price_per_gpu_hour is not None:
        return spec.price_per_gpu_hour
    if cluster is not None:
        note(
            f"price_per_gpu_hour={cluster.price_per_gpu_hour}: the example price of cluster={cluster.name}; trials run "
            "and are measured on the devices that are here"
        )
        return cluster.price_per_gpu_hour
    note("price_per_gpu_hour is not set: costs are counted at 1 USD per GPU-hour")
    return 1.0
