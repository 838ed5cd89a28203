"""What every candidate of a space would take on a cluster: predicted, with nothing run and no GPU, weights or hub."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeps import space
from sweeps.candidates import FREE, Candidate, Cluster, Context, enumerate_candidates, may_run
from sweeps.clusters import ClusterPreset, load_cluster, presets
from sweeps.forecast import Forecaster, Prediction
from sweeps.journal import Journal, check_writable
from sweeps.machines import machine_of
from sweeps.settling import settled
from sweeps.simulations import Simulations
from sweeps.space import SPACES
from sweeps.spec import SweepSpec
from sweeps.workload import FullRows
from trainers.embedded.model import EMBEDDED
from trainers.errors import UserError, did_you_mean
from trainers.shape import ModelShape

if TYPE_CHECKING:
    from sweeps.correction import Correction

MOST_RANKS = 4096
SPEC = "plan.yaml"  # not spec.yaml: a plan is no sweep to be resumed


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


def make_plan(spec: SweepSpec, told: Callable[[str, int, int], None] = lambda *_: None) -> Plan:
    """Predict every candidate and write `predictions.jsonl`. Raises UserError.

    `told`: where simulations are asked for, of what, and how many of how many are done.
    """
    if spec.cluster is None:
        raise UserError(f"plan=true needs cluster=…, the machine to predict for; available: {', '.join(presets())}")
    cluster = load_cluster(spec.cluster)
    check_writable(Path(spec.runs_dir))
    shape = shape_of(spec)
    devices = cluster.devices_per_node * cluster.nodes
    described = Cluster("cuda", devices, f"{cluster.name}: {devices} × {cluster.device}")
    context = Context(described, shape, shape.max_position_embeddings, "ray", FullRows(), machine_of(cluster))
    price = spec.price_per_gpu_hour if spec.price_per_gpu_hour is not None else cluster.price_per_gpu_hour
    forecaster = Forecaster(context, cluster, price, correction_of(spec, context, cluster), spec.memory_limit_gib)
    candidates = enumerate_candidates(spec, context)
    # A question about more GPUs is not answered by a space that would need them, in which all is too wide.
    wider = spec.scaling and all(c.num_workers > devices for c in candidates if c.legal)
    if not wider:
        candidates = [too_wide(c, devices) for c in candidates]
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
    folder = folder_of(spec, runs / f"{spec.space}-plan-{slug(shape.name)}-{slug(cluster.name)}")
    found.sort(key=best_first)
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
    pairs = correction.measured(journal.read(), of_model, machine_of(cluster))
    if not pairs:
        raise UserError(
            f"corrected_by={spec.corrected_by}: no trial of {journal.sweep_id} was timed on devices like "
            f"those of cluster={spec.cluster}"
        )
    return correction.learned(pairs)


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


def best_first(p: Prediction) -> tuple[int, float, float]:
    """Sort key: what fits by its price, what does not by how much it needs."""
    price = p.usd_per_million_tokens
    return ("FITS", "AT_RISK", "OOM").index(p.verdict), 0.0 if p.verdict == "OOM" else price, p.point_gib


def folder_of(spec: SweepSpec, first: Path) -> Path:
    """Return the folder of a plan: that of the same question, else one that is not there yet."""
    asked = space.to_yaml(spec)
    for n in itertools.count(1):
        folder = first if n == 1 else first.with_name(f"{first.name}-{n}")
        before = folder / SPEC
        if not folder.exists() or (before.is_file() and before.read_text(encoding="utf-8") == asked):
            break
    folder.mkdir(parents=True, exist_ok=True)
    before.write_text(asked, encoding="utf-8")
    return folder


def slug(name: str) -> str:
    """Return a name, of a hub id its last part, as a part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name.rstrip("/").rpartition("/")[2]).strip("-.") or "model"


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
