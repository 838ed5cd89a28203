"""The tables on which searchers are compared: one of a large cluster, whose truth is drawn around its predictions."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.replay import LearningTruth, SystemTruth, Table
from sweeps import space
from sweeps.candidates import Candidate, Cluster, Context, enumerate_candidates
from sweeps.clusters import load_cluster
from sweeps.compose import arm_key, key_of, learning_of
from sweeps.forecast import OUTSIDE_GIB
from sweeps.machines import machine_of
from sweeps.plan import shape_of
from sweeps.predict import predict
from sweeps.search import Prior
from sweeps.workload import FullRows
from trainers.result import GIB

SPACE: Mapping[str, Any] = {
    "model": "Qwen/Qwen3-8B", "cluster": "h100x8", "data": "embedded",
    "learning.adapter": "lora", "learning.lora_rank": [16, 64], "learning.seq_len": 2048,
    "learning.learning_rate": [2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3], "learning.global_batch_size": 64,
    "system.strategy": ["ddp", "fsdp2", "zero"], "system.zero_stage": [1, 2, 3], "system.num_workers": [2, 4, 8],
    "system.micro_batch_size": [1, 2, 4, 8], "system.activation_checkpointing": ["none", "selective", "full"],
    "system.reshard_after_forward": [True, False], "system.offload": "none", "system.reduce_dtype": "float32",
    "system.sync_each_batch": True,
}  # fmt: skip
SLOWEST, FASTEST = 1.6, 0.6  # times what is predicted: how far a strategy is off, hidden from searchers
OFF_IN_MEMORY = 0.10
ALONE = 0.03  # by how much a configuration is off beside its strategy
STARTUP_S = 60.0  # of an 8B model on a GPU: processes, weights, first steps
BUDGET, EVALUATE_EVERY = 20_000_000, 1_000_000  # tokens of a run, and between evaluations
BASE_LOSS, FLOOR, TARGET = 1.6, 0.9, 1.05


def cluster_table(seed: int) -> Table:
    """Return the table of a cluster: every candidate that plans know, with biases of this seed."""
    rng = random.Random(f"biases/{seed}")
    candidates, priors = _predicted()
    time: dict[str, float] = {}
    memory: dict[str, float] = {}
    systems: dict[tuple[str, str], SystemTruth] = {}
    for candidate in candidates:
        pair = arm_key(candidate.flat)
        if pair in systems:
            continue
        names = ("strategy", "zero_stage", "reshard_after_forward")
        strategy = " ".join(str(candidate.flat.get(name)) for name in names)
        time.setdefault(strategy, math.exp(rng.uniform(math.log(FASTEST), math.log(SLOWEST))))
        memory.setdefault(strategy, 1 + rng.uniform(-OFF_IN_MEMORY, OFF_IN_MEMORY))
        prior = priors[candidate.id]
        step = prior.step_time_s * time[strategy] * math.exp(rng.gauss(0, ALONE))
        gib = prior.memory_gib * memory[strategy] * math.exp(rng.gauss(0, ALONE / 3))
        systems[pair] = SystemTruth(gib, step, 0.5 * step, prior)
    learnings = {key_of(learning_of(c.flat)): learning_truth(c.flat, rng) for c in candidates[::-1]}
    cluster = load_cluster(str(SPACE["cluster"]))
    capacity = cluster.device_memory_gib - OUTSIDE_GIB
    price = cluster.price_per_gpu_hour
    return Table(f"cluster {seed}", candidates, systems, learnings, TARGET, capacity, price, STARTUP_S)


@cache
def _predicted() -> tuple[tuple[Candidate, ...], dict[str, Prior]]:
    """Return the legal candidates of the cluster's space with what is predicted of them."""
    spec = space.load("lora", {**SPACE, "plan": True})
    cluster, shape = load_cluster(str(SPACE["cluster"])), shape_of(spec)
    described = Cluster("cuda", cluster.devices_per_node, cluster.name)
    context = Context(described, shape, shape.max_position_embeddings, "ray", FullRows(), machine_of(cluster))
    found, priors = [], {}
    for candidate in enumerate_candidates(spec, context):
        told = predict(candidate.flat, context) if candidate.legal else None
        if told is not None and told.time is not None:
            found.append(candidate)
            gib = told.accounts.total / GIB
            priors[candidate.id] = Prior(gib, told.time.total, told.work.tokens, told.work.targets)
    return tuple(found), priors


def learning_truth(config: Mapping[str, Any], rng: random.Random) -> LearningTruth:
    """Return a power law of tokens: slow where the learning rate is low, with a high floor where it is too high."""
    best = 3e-4 / (1 if config["lora_rank"] == 16 else 1.5)
    off = math.log2(config["learning_rate"] / best)
    slowness = math.exp(0.5 * abs(off) + rng.gauss(0, 0.1)) * (1.0 if config["lora_rank"] == 64 else 1.15)
    floor = FLOOR + (0.08 * off**2 if off > 0 else 0.01 * off**2)
    curve = []
    for tokens in range(0, BUDGET + 1, EVALUATE_EVERY):
        loss = floor + (BASE_LOSS - floor) * (1 + tokens / (400_000 * slowness)) ** -0.7
        curve.append((tokens, loss))
    return LearningTruth(tuple(curve))


def folder() -> Path:
    return Path(__file__).resolve().parent / "tables"
