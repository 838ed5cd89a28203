"""How long an update takes on a given machine, in closed form: to rank configurations, not to promise seconds.

Operations over the device's peak, bytes over its memory's bandwidth, traffic over the links, and what the host needs to
start it all; what overlaps is counted once. Published utilisations of one and the same device span 32 to 59 %, so that
a constant efficiency ranks, and measured trials have to correct it. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trainers import flops
from trainers.flops import Rows, adapted
from trainers.ledger import MicroBatch, kept_of_block, parameters
from trainers.shape import ModelShape
from trainers.strategies import STRATEGIES, Setting, Traffic, dimensions
from trainers.strategies.pipeline import STAGES_OF_A_RANK, schedule

# Of the peak, as well-kept code reaches it with large matrices; of a memory's or a link's bandwidth.
OF_PEAK: Mapping[str, float] = {"bfloat16": 0.45, "float32": 0.6}
OF_BANDWIDTH = 0.8
HOST_BANDWIDTH = 2.5e10  # bytes per second of host memory for one device, where the optimizer runs on the host
OPTIMIZER_BYTES = 28  # a trained number: weight and both moments are read and written, the gradient is read; float32
# Of a block's forward pass: operations that the host starts one by one, as torch's profiler counts them in
# transformers' Llama; and for every adapted layer.
OPERATIONS, OF_ADAPTER = 45, 5
BACKWARD = 2.0  # operations of a backward pass for one of a forward pass


@dataclass(frozen=True)
class Machine:
    """Peaks of one device and of its links: FLOP/s by dtype, and bytes per second in one direction."""

    peak_flops: Mapping[str, float]
    memory_bandwidth: float
    link_within_node: float
    link_between_nodes: float
    link_to_host: float
    devices_per_node: int
    # Seconds that a step of a ring takes, within a node and between nodes: NCCL's own model of its rings (src/graph/
    # tuning.cc, NVLink and network, protocol Simple).
    latency_within_node: float = 3.4e-6
    latency_between_nodes: float = 1.4e-5
    operation: float = 8e-6
    """seconds in which the host starts an operation"""
    overlap: float = 0.9
    """of the computing, beside which gradients and weights can travel; 0: the host computes, and starts nothing
    meanwhile"""


@dataclass(frozen=True)
class StepTime:
    """Seconds of an update, by part; they sum to it."""

    compute: float
    communication: float  # exposed
    bubble: float  # of a pipeline
    transfer: float  # between device and host, exposed
    optimizer: float
    started: bool = False
    """whether computing takes as long as the host takes to start its operations, and not as long as they run"""

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.bubble + self.transfer + self.optimizer


def predict(shape: ModelShape, setting: Setting, batch: MicroBatch, machine: Machine) -> StepTime:
    """Return the seconds of an update whose micro batches are all `batch`, on the busiest rank."""
    plan, own = setting.plan, parameters(shape, setting)
    micro_batches = setting.micro_batches
    working, starting = _micro_batch(shape, setting, batch, machine)
    compute = micro_batches * (max(working, starting) if machine.overlap else working + starting)
    # Narayanan et al. 2021: (p - 1) / m of the computing, less by as many as a rank has stages.
    bubble = compute * (plan.pp - 1) / (micro_batches * STAGES_OF_A_RANK[schedule(setting)])
    strategy = STRATEGIES[setting.system.strategy]
    trained_here = own.trained * strategy.part(setting)
    on_host = strategy.to_host(setting, own, micro_batches)
    updating = HOST_BANDWIDTH if on_host else machine.memory_bandwidth * OF_BANDWIDTH
    optimizer = OPTIMIZER_BYTES * trained_here / updating
    travelling = traffic(shape, setting, batch, micro_batches)
    beside = sum(seconds(t, machine) for t in travelling if t.overlapped)
    alone = sum(seconds(t, machine) for t in travelling if not t.overlapped)
    left = max(0.0, machine.overlap * compute - beside)  # computing beside which nothing travels yet
    if setting.system.offload_activations:
        on_host += 2 * micro_batches * own.blocks * kept_of_block(shape, setting, batch)
    transfer = max(0.0, on_host / (machine.link_to_host * OF_BANDWIDTH) - left)
    exposed = alone + max(0.0, beside - machine.overlap * compute)
    return StepTime(compute, exposed, bubble, transfer, optimizer, started=starting > working)


def _micro_batch(shape: ModelShape, setting: Setting, batch: MicroBatch, machine: Machine) -> tuple[float, float]:
    """Return the seconds of a micro batch's passes: products or reading the weights, and starting the operations."""
    plan, learning, own = setting.plan, setting.learning, parameters(shape, setting)
    rows = Rows([batch.tokens] * batch.rows, batch.rows * batch.heads, batch.rows * batch.heads)
    recompute = setting.system.activation_checkpointing
    done = flops.of_rows(rows, shape, learning, recompute).hardware / (plan.tp * plan.cp * plan.pp)
    products = done / (machine.peak_flops[setting.compute_dtype] * OF_PEAK[setting.compute_dtype])
    reading = 3 * own.in_use / (machine.memory_bandwidth * OF_BANDWIDTH)  # forward, and twice backward
    forward = own.blocks * (OPERATIONS + OF_ADAPTER * len(adapted(learning)))
    slower = math.prod(dimension.slows(setting) for dimension in dimensions(setting.system))
    of_model = slower * forward * (1 + BACKWARD + (recompute != "none"))
    starting = machine.operation * (of_model + STRATEGIES[setting.system.strategy].starts(setting, own))
    return max(products, reading), starting


def traffic(shape: ModelShape, setting: Setting, batch: MicroBatch, micro_batches: int) -> list[Traffic]:
    """Return what a rank sends in an update, of the strategy and of every degree."""
    own = parameters(shape, setting)
    found = STRATEGIES[setting.system.strategy].traffic(setting, own, micro_batches)
    tokens = batch.rows * batch.tokens / setting.plan.cp * micro_batches
    return found + [d.traffic(setting, shape, tokens) for d in dimensions(setting.system)]


def seconds(travels: Traffic, machine: Machine) -> float:
    """Return how long something travels: its bytes, and the latency of every ring and every step to a neighbour.

    Between nodes as many links are used as a node has of the ranks: a ring for each of them.
    """
    here = max(1, min(travels.ranks, machine.devices_per_node // travels.stride))  # of the ranks on one node
    nodes = math.ceil(travels.ranks / here)
    bandwidth, step = machine.link_within_node, machine.latency_within_node
    if nodes > 1:
        links = here if travels.rings else 1
        bandwidth = min(bandwidth, links * machine.link_between_nodes)
        step = machine.latency_between_nodes
    ring = (travels.ranks - nodes) * machine.latency_within_node + (nodes - 1) * machine.latency_between_nodes
    return travels.bytes / (bandwidth * OF_BANDWIDTH) + travels.rings * ring + travels.sends * step
