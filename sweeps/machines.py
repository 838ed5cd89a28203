"""The machine that step times are predicted for."""

from __future__ import annotations

from collections.abc import Callable

from sweeps.candidates import Cluster
from sweeps.clusters import ClusterPreset, load_cluster, presets
from trainers.steptime import Machine

# A process with a core, and gloo over the loopback device; no overlap: the core that computes would have to send, too.
# In the order of what benchmarks/prediction.py measures. They rank; trials correct them.
CPU = Machine({"float32": 5e10, "bfloat16": 5e10}, 1e10, 5e8, 5e8, 1e10, 64, 2e-4, 2e-4, operation=1.5e-5, overlap=0.0)
UNKNOWN = "h100x8"  # whose numbers rank for a GPU that no preset describes


def machine_of(cluster: ClusterPreset) -> Machine:
    """Return a preset's numbers as the closed form of time takes them."""
    return Machine(
        {"bfloat16": cluster.peak_flops.bf16, "float32": cluster.peak_flops.fp32},
        cluster.memory_bandwidth_bytes_per_s,
        cluster.intra_node_link_bytes_per_s,
        cluster.inter_node_link_bytes_per_s,
        cluster.host_link_bytes_per_s,
        cluster.devices_per_node,
    )


def machine_here(cluster: Cluster, named: str | None, note: Callable[[str], None]) -> Machine:
    """Return the numbers of the devices that a sweep runs on: of `named`, the preset that a person gave, or by device.

    `note` is told where none is known.
    """
    if cluster.device != "cuda":
        return CPU
    if named is not None:
        return machine_of(load_cluster(named))
    known = [load_cluster(name) for name in presets()]
    found = next((preset for preset in known if cluster.accelerator and cluster.accelerator in preset.device), None)
    if found is None:
        note(f"no cluster preset has {cluster.accelerator or 'these GPUs'}: step times are predicted as on {UNKNOWN}")
    return machine_of(found or load_cluster(UNKNOWN))
