"""What every candidate of a space would take on a cluster, predicted: nothing is run, and no GPU, weights or hub asked.

Memory is the ledger's; a verdict rests on its bounds. Time is the closed form's, and ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sweeps import space
from sweeps.candidates import FREE, Candidate, Cluster, Context, enumerate_candidates, may_run, setting_of
from sweeps.clusters import ClusterPreset, load_cluster, presets
from sweeps.journal import Journal, check_writable
from sweeps.simulations import Case, Outcome, Simulations
from sweeps.space import SPACES
from sweeps.spec import SweepSpec
from trainers import ledger, steptime
from trainers.embedded.model import EMBEDDED
from trainers.errors import UserError, did_you_mean
from trainers.ledger import MicroBatch
from trainers.result import GIB, Accounts
from trainers.shape import ModelShape
from trainers.steptime import Machine
from trainers.strategies import Setting

if TYPE_CHECKING:
    from sweeps.correction import Correction

Verdict = Literal["FITS", "AT_RISK", "OOM"]
BOUND = 0.15  # relative: by how much the ledger has been off at most, against simulations of unseen configurations
SIMULATION_BOUND = 0.05  # the same of simulations, against what real ranks took: benchmarks/prediction.py
FRAGMENTED = 1.31  # times what is allocated: the most that published tables show reserved
OUTSIDE_GIB, NCCL_GIB = 0.75, 0.75  # of a device outside torch's allocator: context and libraries; buffers of NCCL
PROCESS_GIB = 3.0  # of host memory: a rank's interpreter, libraries and what CUDA maps
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
    """the same, with the error that such a prediction has had at most; of a simulation what is reserved"""
    host_gib: float
    """of a node's host memory, by all its ranks"""
    step_time_s: float
    tokens_per_second: float
    usd_per_million_tokens: float
    by: Literal["ledger", "simulation"] = "ledger"
    note: str = ""
    """why a simulation that was asked for is missing"""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Forecaster:
    """Predicts single configurations on a cluster."""

    context: Context
    cluster: ClusterPreset
    price: float
    correction: Correction | None = None

    def predict(self, config: Mapping[str, Any]) -> Prediction | None:
        """Return what a configuration, flat, would take; None where it is none."""
        setting, shape = setting_of(config, self.context), self.context.shape
        if setting is None or shape is None:
            return None
        seq_len, batch = setting.learning.seq_len, batch_of(setting)
        phase, accounts = ledger.peak(ledger.predict(shape, setting, batch))
        outside, allocated = outside_of(setting), accounts.total / GIB
        host = on_host(shape, setting, self.cluster)
        fits = verdict(allocated, outside, self.cluster.device_memory_gib)
        time = steptime.predict(shape, setting, batch, machine(self.cluster))
        seconds = (self.correction.apply(time) if self.correction is not None else time).total
        tokens = setting.learning.global_batch_size * seq_len
        return Prediction(
            config,
            fits if host <= self.cluster.host_memory_gib else "OOM",
            phase if host <= self.cluster.host_memory_gib else "host memory",
            max(Accounts.names(), key=lambda name: getattr(accounts, name)),
            accounts,
            allocated + outside,
            allocated * (1 + BOUND) + outside,
            host,
            seconds,
            tokens / seconds,
            self.price * setting.plan.world * seconds / 3600 / tokens * 1e6,
        )


@dataclass(frozen=True)
class Plan:
    """All predictions of a space, best first, and what was pruned."""

    spec: SweepSpec
    forecaster: Forecaster
    predictions: tuple[Prediction, ...]
    pruned: tuple[Candidate, ...]
    folder: Path

    @property
    def shape(self) -> ModelShape:
        assert self.forecaster.context.shape is not None
        return self.forecaster.context.shape


def make_plan(spec: SweepSpec, told: Callable[[int, int], None] = lambda *_: None) -> Plan:
    """Predict every candidate and write `predictions.jsonl`. Raises UserError.

    `told`: how many of how many simulations are done, where some are asked for.
    """
    if spec.cluster is None:
        raise UserError(f"plan=true needs cluster=…, the machine to predict for; available: {', '.join(presets())}")
    cluster = load_cluster(spec.cluster)
    check_writable(Path(spec.runs_dir))
    shape = shape_of(spec)
    devices = cluster.devices_per_node * cluster.nodes
    described = Cluster("cuda", devices, f"{cluster.name}: {devices} × {cluster.device}")
    context = Context(described, shape, shape.max_position_embeddings, "ray")
    price = spec.price_per_gpu_hour if spec.price_per_gpu_hour is not None else cluster.price_per_gpu_hour
    forecaster = Forecaster(context, cluster, price, correction_of(spec, context, cluster))
    candidates = [too_wide(c, devices) for c in enumerate_candidates(spec, context)]
    legal = [c for c in candidates if c.legal]
    configs = list(solved(spec, distinct([c.flat for c in legal]), forecaster))
    found = [p for config in configs if (p := forecaster.predict(config)) is not None]
    pruned = distinct_candidates([c for c in candidates if not c.legal])
    if not found:
        rules = Counter(rule for c in pruned for rule in c.reasons)
        raise UserError([f"no candidate is left to predict: {rule}" for rule, _ in rules.most_common(8)])
    runs = Path(spec.runs_dir).expanduser().resolve()
    if spec.simulate != "none":
        found = settled(found, spec.simulate, forecaster, Simulations(runs / ".simulations"), told)
    folder = runs / f"{spec.space}-plan"
    folder.mkdir(parents=True, exist_ok=True)
    found.sort(key=lambda p: (("FITS", "AT_RISK", "OOM").index(p.verdict), p.usd_per_million_tokens, p.point_gib))
    plan = Plan(spec, forecaster, tuple(found), tuple(pruned), folder)
    write(plan)
    return plan


def correction_of(spec: SweepSpec, context: Context, cluster: ClusterPreset) -> Correction | None:
    """Return what the trials of the sweep `corrected_by` teach of step times. Raises UserError."""
    if spec.corrected_by is None:
        return None
    from sweeps import correction

    journal = Journal.find(spec.corrected_by, Path(spec.runs_dir).expanduser().resolve(), "corrected_by")
    told = journal.spec_tree()
    if told.get("cluster") != spec.cluster:
        raise UserError(
            f"corrected_by={spec.corrected_by}: {journal.sweep_id} ran with cluster={told.get('cluster')}, and teaches "
            f"nothing of cluster={spec.cluster}"
        )
    of_model = dataclasses.replace(context, shape=shape_of(space.validate(told, Path.cwd(), {})))
    pairs = correction.measured(journal.read(), of_model, machine(cluster))
    if not pairs:
        raise UserError(
            f"corrected_by={spec.corrected_by}: no trial of {journal.sweep_id} was timed on devices like "
            f"those of cluster={spec.cluster}"
        )
    return correction.learned(pairs)


def settled(
    predictions: Sequence[Prediction],
    which: str,
    forecaster: Forecaster,
    simulations: Simulations,
    told: Callable[[int, int], None],
) -> list[Prediction]:
    """Return predictions of which those at risk, or all, were simulated."""
    shape = forecaster.context.shape
    assert shape is not None
    found = list(predictions)
    asked = [i for i, p in enumerate(predictions) if which == "all" or p.verdict == "AT_RISK"]
    # Few blocks tell what is allocated, and that is often enough; all of them what is reserved, too.
    for whole in (False, True):
        cases: dict[int, list[Case]] = {}
        for i in asked:
            setting = setting_of(predictions[i].config, forecaster.context)
            if setting is not None:
                ranks = (0, setting.plan.world - 1) if setting.plan.pp > 1 else (0,)
                cases[i] = [Case(shape, setting, batch_of(setting), rank, whole) for rank in ranks]
        outcomes = iter(simulations.run([case for group in cases.values() for case in group], told))
        for i, group in cases.items():
            found[i] = simulated(predictions[i], group[0], [next(outcomes) for _ in group], forecaster)
        asked = [i for i in cases if found[i].verdict == "AT_RISK" and not found[i].note]
    return found


def simulated(prediction: Prediction, case: Case, outcomes: Sequence[Outcome], forecaster: Forecaster) -> Prediction:
    """Return a prediction with what its simulated ranks came to; unchanged, with the reason, where one failed."""
    failed = next((o for o in outcomes if isinstance(o, str)), None)
    if failed is not None:
        return dataclasses.replace(prediction, note=f"not simulated: {failed}")
    peaks = [(m, phase) for o in outcomes if not isinstance(o, str) for phase, m in o.items()]
    most, phase = max(peaks, key=lambda peak: peak[0].allocated)
    reserved = max(m.reserved for m, _ in peaks) / GIB if case.whole else most.allocated / GIB * FRAGMENTED
    outside, capacity = outside_of(case.setting), forecaster.cluster.device_memory_gib
    if prediction.phase == "host memory":
        fits: Verdict = "OOM"
    elif reserved * (1 + SIMULATION_BOUND) + outside <= capacity:
        fits = "FITS"
    else:  # what is reserved and not allocated can be given back, with time lost
        fits = "OOM" if most.allocated / GIB * (1 - SIMULATION_BOUND) + outside > capacity else "AT_RISK"
    return dataclasses.replace(
        prediction,
        verdict=fits,
        phase=prediction.phase if prediction.phase == "host memory" else phase,
        account=max(Accounts.names(), key=lambda name: getattr(most.accounts, name)),
        accounts=most.accounts,
        point_gib=most.allocated / GIB + outside,
        upper_gib=reserved * (1 + SIMULATION_BOUND) + outside,
        by="simulation",
    )


def shape_of(spec: SweepSpec) -> ModelShape:
    """Return the shape of a model: a preset's by hub id or name, a local folder's, the embedded one's."""
    shipped = {path.stem: ModelShape.from_yaml(path) for path in sorted((SPACES / "models").glob("*.yaml"))}
    by_name = {**shipped, **{shape.name: shape for shape in shipped.values()}}
    if spec.model in by_name:
        return by_name[spec.model]
    config = Path(spec.model).expanduser() / "config.json"
    if config.is_file():
        try:
            return ModelShape.from_hf_config(json.loads(config.read_text(encoding="utf-8")), spec.model)
        except UserError:
            raise
        except (ValueError, TypeError, AttributeError, KeyError, ZeroDivisionError) as error:
            raise UserError(f"{config} is not a model's configuration: {error}") from None
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


def distinct_candidates(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return one of those whose configurations `distinct` would make one."""
    flats = [c.flat for c in candidates]
    by_config = {id(flat): c for flat, c in zip(flats, candidates, strict=True)}
    return [by_config[id(flat)] for flat in distinct(flats)]


def distinct(configs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return one of those that differ only in what costs no memory and no time, such as the learning rate."""
    found: dict[str, Mapping[str, Any]] = {}
    for config in configs:
        found.setdefault(json.dumps({k: v for k, v in config.items() if k not in FREE}, sort_keys=True), config)
    return list(found.values())


def batch_of(setting: Setting) -> MicroBatch:
    """Return the largest micro batch that data can make: every row is `seq_len` tokens long, all of them targets."""
    return MicroBatch(setting.system.micro_batch_size, setting.learning.seq_len, setting.learning.seq_len)


def outside_of(setting: Setting) -> float:
    """Return the GiB of a device that are outside torch's allocator."""
    return OUTSIDE_GIB + (NCCL_GIB if setting.plan.world > 1 else 0.0)


def on_host(shape: ModelShape, setting: Setting, cluster: ClusterPreset) -> float:
    """Return the GiB of host memory of a node: what its ranks keep there, a copy of what is trained, and themselves.

    The copy is taken while a trial proves itself and rehearses. Weights are read in pieces, which the system caches and
    gives up where it must.
    """
    kept = ledger.on_host(shape, setting, batch_of(setting)) / GIB
    return min(setting.plan.world, cluster.devices_per_node) * (PROCESS_GIB + kept)


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
    spec: SweepSpec, configs: Sequence[Mapping[str, Any]], forecaster: Forecaster
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
        able = [c for c in tried if may_run(spec.model, c, forecaster.context)]
        fitting = [c for c in able if (p := forecaster.predict(c)) is not None and p.verdict == "FITS"]
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
    of_plan = {"model": plan.spec.model, "cluster": plan.forecaster.cluster.name}
    lines = [json.dumps({**of_plan, **p.to_json()}) + "\n" for p in plan.predictions]
    (plan.folder / "predictions.jsonl").write_text("".join(lines), encoding="utf-8")
