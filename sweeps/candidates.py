"""The finite space of a sweep: every combination of axes, legal ones and pruned ones with the rule that prunes them."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeps.spec import Axis, SweepSpec, axes
from trainers import config as configs
from trainers.config import LearningConfig, SystemConfig, TrialConfig, from_tree, to_tree
from trainers.errors import UserError
from trainers.plan import Plan
from trainers.shape import ModelShape
from trainers.strategies import STRATEGIES, Setting, illegal

if TYPE_CHECKING:
    from sweeps.search import Request
    from sweeps.workload import Workload
    from trainers.steptime import Machine

DERIVED = {"gradient_accumulation_steps"}
"""Names in a trial's configuration that follow from others."""


# What is learned with these costs no other memory or time.
FREE = {
    "learning_rate", "lr_schedule", "warmup_fraction", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
    "max_grad_norm", "lora_alpha", "seed",
}  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """What the sweep may use at once, and on which kind of device."""

    device: str  # cuda or cpu
    workers: int  # ranks that fit side by side
    description: str
    accelerator: str = ""  # a part of the GPUs' name, as H100; empty: not known
    memory_gib: float | None = None  # of a GPU; None: not known


@dataclass(frozen=True)
class Candidate:
    """One point of the space. Conditional axes that do not apply are absent from its values."""

    id: str
    learning: Mapping[str, Any]
    system: Mapping[str, Any]
    gradient_accumulation_steps: int | None = None
    reasons: tuple[str, ...] = field(default=())  # rules that forbid it; empty: legal

    @property
    def legal(self) -> bool:
        return not self.reasons

    @property
    def num_workers(self) -> int:
        return int(self.system["num_workers"])

    @property
    def flat(self) -> dict[str, Any]:
        """All values in one level; learning and system names do not overlap."""
        return {**self.learning, **self.system}


@dataclass(frozen=True)
class Context:
    """What legality depends on beside the candidate."""

    cluster: Cluster
    shape: ModelShape | None
    positions: int | None  # the longest input that the model's positions reach; None: not known
    launcher: str
    workload: Workload | None = None  # what is predicted for; without it nothing is
    machine: Machine | None = None


def enumerate_candidates(spec: SweepSpec, context: Context) -> list[Candidate]:
    """Return every distinct combination in the order of the axes, the last axis fastest."""
    learnings = list(_combinations(axes(LearningConfig), spec.learning.values()))
    systems = list(_combinations(axes(SystemConfig), spec.system.values()))
    found: dict[str, Candidate] = {}
    for learning, system in itertools.product(learnings, systems):
        candidate = _candidate(spec.model, learning, system, context)
        found.setdefault(candidate.id, candidate)
    return list(found.values())


def baseline_of(spec: SweepSpec, context: Context) -> Candidate | None:
    """Return the candidate that the file `baseline` describes. Raises UserError where it is none, or not legal."""
    if spec.baseline is None:
        return None
    path = Path(spec.baseline).expanduser()
    if not path.is_file():
        raise UserError(f"baseline={spec.baseline}: there is no such file")
    try:
        config = configs.load(path)
    except UserError as error:
        raise UserError([f"baseline={spec.baseline}: {fault}" for fault in error.faults]) from None
    found = _candidate(spec.model, to_tree(config.learning), to_tree(config.system), context)
    rules = list(found.reasons)
    if context.launcher == "ray" and found.num_workers > context.cluster.workers:
        rules.append(f"num_workers={found.num_workers}, and the cluster has room for {context.cluster.workers}")
    if rules:
        raise UserError([f"baseline={spec.baseline}: {rule}" for rule in rules])
    return found


def setting_of(config: Mapping[str, Any], context: Context) -> Setting | None:
    """Return the setting of a configuration, flat; None where it is none."""
    try:
        of_learning, of_system = _split(config)
        learning, system = from_tree(LearningConfig, of_learning), from_tree(SystemConfig, of_system)
        plan = STRATEGIES[system.strategy].plan(system)
        plan.accumulation(learning.global_batch_size, system.micro_batch_size)
    except (UserError, ValueError):
        return None
    return Setting(learning, system, plan, context.shape, context.cluster.device)


def _split(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a flat configuration as learning and system."""
    names = {f.name for f in dataclasses.fields(LearningConfig)}
    system = {name: value for name, value in config.items() if name not in names | DERIVED}
    return {name: value for name, value in config.items() if name in names}, system


def may_run(model: str, config: Mapping[str, Any], context: Context) -> bool:
    """Tell whether a configuration, flat, is one and legal."""
    try:
        return _candidate(model, *_split(config), context).legal
    except UserError:
        return False


def trial_tree(
    spec: SweepSpec,
    candidate: Candidate,
    device: str,
    target: float | None,
    proof: str = "none",
    traces: str | None = None,
    request: Request | None = None,
) -> dict[str, Any]:
    """Return the config of a candidate's trial, in file form; `traces`: the folder for those that are asked for."""
    probes = request is not None and request.kind == "probe"
    give_up = ",".join(f"{tokens}:{loss:.6g}" for tokens, loss in request.give_up) if request is not None else ""
    rivals = ",".join(f"{gib:.6g}:{seconds:.6g}" for gib, seconds in request.rivals) if request is not None else ""
    run = {
        "device": device,
        "max_tokens": spec.budget.tokens_per_trial,
        "epochs": spec.epochs,
        "target_eval_loss": target if not probes else None,
        "eval_every_tokens": spec.eval_every_tokens,
        "proof": proof,
        "measure_seconds": spec.measure_seconds,
        "precision": spec.precision,
        "memory_limit_gib": spec.memory_limit_gib,
        "trace": spec.trace,
        "trace_dir": traces if spec.trace != "none" else None,
        "max_updates": 1 if probes else None,
        "give_up": give_up or None,
        "dominated_by": rivals or None,
    }
    return {**data_tree(spec), "learning": dict(candidate.learning), "system": dict(candidate.system), "run": run}


def data_tree(spec: SweepSpec) -> dict[str, Any]:
    """Return what all trials have in common, model and data, in the form of a TrialConfig's file."""
    shared = {f.name for f in dataclasses.fields(TrialConfig)} - {"learning", "system", "run"}
    return {name: getattr(spec, name) for name in type(spec).model_fields if name in shared}


def varying(candidates: Sequence[Candidate]) -> list[str]:
    """Return the axes on which the candidates that have them differ: what tells one from another in a table."""
    return varying_of([c.flat for c in candidates])


def varying_of(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names on which flat configurations that have them differ."""
    names = dict.fromkeys(name for config in configs for name in config)
    return [n for n in names if len({json.dumps(config[n]) for config in configs if n in config}) > 1]


def pruned_rules(candidates: Sequence[Candidate]) -> Counter[str]:
    """Count the rules that prune, over all candidates."""
    return Counter(reason for c in candidates for reason in c.reasons)


def _combinations(all_axes: Sequence[Axis], values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield the product of axes in which a conditional axis multiplies only the branches that it applies to.

    A conditional axis comes after the axis that it depends on.
    """
    partial: list[dict[str, Any]] = [{}]
    for axis in all_axes:
        grown = []
        for chosen in partial:
            condition = axis.only_with
            if condition is not None and not condition.holds(chosen[condition.field]):
                grown.append(chosen)
            else:
                grown += [{**chosen, axis.name: value} for value in dict.fromkeys(values[axis.name])]
        partial = grown
    yield from partial


def _candidate(model: str, learning: Mapping[str, Any], system: Mapping[str, Any], context: Context) -> Candidate:
    identity = json.dumps({"model": model, "learning": learning, "system": system}, sort_keys=True)
    key = hashlib.sha256(identity.encode()).hexdigest()[:10]
    typed = from_tree(SystemConfig, dict(system))
    strategy = STRATEGIES[typed.strategy]
    reasons: list[str] = []
    accumulation = None
    plan: Plan | None = None
    try:
        plan = strategy.plan(typed)
        accumulation = plan.accumulation(learning["global_batch_size"], typed.micro_batch_size)
    except ValueError as error:
        reasons.append(str(error))
    if plan is not None:
        typed_learning = from_tree(LearningConfig, dict(learning))
        reasons += illegal(Setting(typed_learning, typed, plan, context.shape, context.cluster.device))
    reasons += _general_rules(learning, typed, context)
    return Candidate(key, learning, system, accumulation, tuple(reasons))


def _general_rules(learning: Mapping[str, Any], system: SystemConfig, context: Context) -> Iterator[str]:
    if context.launcher == "inline" and system.num_workers > 1:
        yield f"num_workers={system.num_workers}: launcher=inline runs in this one process, so num_workers must be 1"
    if context.positions is not None and learning["seq_len"] > context.positions:
        yield f"seq_len={learning['seq_len']} is longer than the model's {context.positions} positions"
