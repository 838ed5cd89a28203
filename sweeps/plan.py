"""What every candidate of a space would take on a cluster, predicted: nothing is run, and no GPU, weights or hub asked.

Memory is the ledger's; a verdict rests on its bounds. Time is the closed form's, and ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sweeps.candidates import FREE, Candidate, Cluster, Context, enumerate_candidates, may_run, setting_of
from sweeps.clusters import ClusterPreset, load_cluster, presets
from sweeps.journal import check_writable
from sweeps.space import SPACES
from sweeps.spec import SweepSpec
from trainers import ledger, steptime
from trainers.embedded.model import EMBEDDED
from trainers.errors import UserError, did_you_mean
from trainers.ledger import MicroBatch
from trainers.result import GIB, Accounts
from trainers.shape import ModelShape
from trainers.steptime import Machine

Verdict = Literal["FITS", "AT_RISK", "OOM"]
BOUND = 0.15  # relative: by how much the ledger has been off at most, against simulations of unseen configurations
OUTSIDE_GIB, NCCL_GIB = 0.75, 0.75  # of a device outside torch's allocator: context and libraries; buffers of NCCL
MOST_RANKS = 4096


@dataclass(frozen=True)
class Prediction:
    """One candidate, predicted for the rank that holds most."""

    config: Mapping[str, Any]
    """axes, flat"""
    verdict: Verdict
    phase: str
    """in which memory peaks"""
    account: str
    """the largest at that instant"""
    accounts: Accounts
    point_gib: float
    """of the device: allocated, and what is outside the allocator"""
    upper_gib: float
    """the same, with the ledger's error"""
    step_time_s: float
    tokens_per_second: float
    usd_per_million_tokens: float

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Plan:
    """All predictions of a space, best first, and what was pruned."""

    spec: SweepSpec
    shape: ModelShape
    cluster: ClusterPreset
    price: float
    predictions: tuple[Prediction, ...]
    pruned: tuple[Candidate, ...]
    folder: Path


def make_plan(spec: SweepSpec) -> Plan:
    """Predict every candidate and write `predictions.jsonl`. Raises UserError."""
    if spec.cluster is None:
        raise UserError(f"plan=true needs cluster=…, the machine to predict for; available: {', '.join(presets())}")
    cluster = load_cluster(spec.cluster)
    check_writable(Path(spec.runs_dir))
    shape = shape_of(spec)
    devices = cluster.devices_per_node * cluster.nodes
    described = Cluster("cuda", devices, f"{cluster.name}: {devices} × {cluster.device}")
    context = Context(described, shape, shape.max_position_embeddings, "ray")
    price = spec.price_per_gpu_hour if spec.price_per_gpu_hour is not None else cluster.price_per_gpu_hour
    candidates = [too_wide(c, devices) for c in enumerate_candidates(spec, context)]
    legal = [c for c in candidates if c.legal]
    configs = list(solved(spec, distinct([c.flat for c in legal]), context, cluster))
    found = [p for config in configs if (p := predicted(config, context, cluster, price)) is not None]
    folder = Path(spec.runs_dir).expanduser().resolve() / f"{spec.space}-plan"
    folder.mkdir(parents=True, exist_ok=True)
    found.sort(key=lambda p: (("FITS", "AT_RISK", "OOM").index(p.verdict), p.usd_per_million_tokens, p.point_gib))
    plan = Plan(spec, shape, cluster, price, tuple(found), tuple(c for c in candidates if not c.legal), folder)
    write(plan)
    return plan


def shape_of(spec: SweepSpec) -> ModelShape:
    """Return the shape of a model: a preset's by hub id or name, a local folder's, the embedded one's."""
    shipped = {path.stem: ModelShape.from_yaml(path) for path in sorted((SPACES / "models").glob("*.yaml"))}
    by_name = {**shipped, **{shape.name: shape for shape in shipped.values()}}
    if spec.model in by_name:
        return by_name[spec.model]
    config = Path(spec.model).expanduser() / "config.json"
    if config.is_file():
        return ModelShape.from_hf_config(json.loads(config.read_text(encoding="utf-8")), spec.model)
    if spec.model == EMBEDDED:
        from trainers.embedded import model

        return ModelShape.from_hf_config(model.config().to_dict(), EMBEDDED)
    raise UserError(
        f"model={spec.model}: plan=true knows no such shape{did_you_mean(spec.model, by_name)}; give "
        f"{', '.join(s.name for s in shipped.values())}, or the path of a folder with a config.json"
    )


def too_wide(candidate: Candidate, devices: int) -> Candidate:
    """Return a candidate, pruned where it needs more devices than there are."""
    if candidate.num_workers <= devices:
        return candidate
    rule = f"num_workers={candidate.num_workers}: the cluster has {devices} GPUs"
    return dataclasses.replace(candidate, reasons=(*candidate.reasons, rule))


def distinct(configs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return one of those that differ only in what costs no memory and no time, such as the learning rate."""
    found: dict[str, Mapping[str, Any]] = {}
    for config in configs:
        found.setdefault(json.dumps({k: v for k, v in config.items() if k not in FREE}, sort_keys=True), config)
    return list(found.values())


def predicted(config: Mapping[str, Any], context: Context, cluster: ClusterPreset, price: float) -> Prediction | None:
    """Return what a configuration would take; None where it is none."""
    setting, shape = setting_of(config, context), context.shape
    if setting is None or shape is None:
        return None
    seq_len = setting.learning.seq_len
    batch = MicroBatch(setting.system.micro_batch_size, seq_len, seq_len)
    phase, accounts = ledger.peak(ledger.predict(shape, setting, batch))
    outside = OUTSIDE_GIB + (NCCL_GIB if setting.plan.world > 1 else 0.0)
    point = accounts.total / GIB
    seconds = steptime.predict(shape, setting, batch, machine(cluster)).total
    tokens = setting.learning.global_batch_size * seq_len
    return Prediction(
        config,
        verdict(point, outside, cluster.device_memory_gib),
        phase,
        max(Accounts.names(), key=lambda name: getattr(accounts, name)),
        accounts,
        point + outside,
        point * (1 + BOUND) + outside,
        seconds,
        tokens / seconds,
        price * setting.plan.world * seconds / 3600 / tokens * 1e6,
    )


def verdict(allocated_gib: float, outside_gib: float, capacity_gib: float) -> Verdict:
    """Return whether it fits: for certain, for certain not, or within the ledger's error."""
    if allocated_gib * (1 + BOUND) + outside_gib <= capacity_gib:
        return "FITS"
    return "OOM" if allocated_gib * (1 - BOUND) + outside_gib > capacity_gib else "AT_RISK"


def machine(cluster: ClusterPreset) -> Machine:
    """Return a cluster's numbers as the closed form of time takes them."""
    return Machine(
        {"bfloat16": cluster.peak_flops.bf16, "float32": cluster.peak_flops.fp32},
        cluster.memory_bandwidth_bytes_per_s,
        cluster.intra_node_link_bytes_per_s,
        cluster.inter_node_link_bytes_per_s,
        cluster.host_link_bytes_per_s,
        cluster.devices_per_node,
    )


def solved(
    spec: SweepSpec, configs: Sequence[Mapping[str, Any]], context: Context, cluster: ClusterPreset
) -> Iterator[Mapping[str, Any]]:
    """Yield the configurations to predict: all, or of those that differ in one axis the one that solves it.

    The largest micro batch that fits, or the smallest number of GPUs on which it fits, also beyond the cluster's; where
    nothing does, the smallest micro batch and the most GPUs.
    """
    if spec.solve == "none":
        yield from configs
        return
    axis = spec.solve
    seen = set()
    for config in configs:
        rest = {name: value for name, value in config.items() if name != axis}
        key = json.dumps(rest, sort_keys=True)
        if key in seen:
            continue
        seen.add(key)
        tried = [{**rest, axis: value} for value in values(axis, rest)]
        able = [c for c in tried if may_run(spec.model, c, context)]
        fitting = [c for c in able if (p := predicted(c, context, cluster, 0.0)) is not None and p.verdict == "FITS"]
        if axis == "micro_batch_size":
            yield from fitting[-1:] or able[:1]
        else:
            yield from fitting[:1] or able[-1:]


def values(axis: str, rest: Mapping[str, Any]) -> Iterator[int]:
    """Yield what is tried for an axis, ascending: powers of two."""
    most = int(rest["global_batch_size"]) if axis == "micro_batch_size" else MOST_RANKS
    yield from itertools.takewhile(lambda value: value <= most, (2**n for n in itertools.count()))


def write(plan: Plan) -> None:
    """Write a line for every prediction, and draw the accounts of the best."""
    lines = [json.dumps(p.to_json()) + "\n" for p in plan.predictions]
    (plan.folder / "predictions.jsonl").write_text("".join(lines), encoding="utf-8")
