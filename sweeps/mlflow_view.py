"""A sweep as MLflow shows it: names, params, metrics, histories and texts, made from outcomes.

Pure functions of what the journal holds, so sending them twice sends the same. `sweeps.record` does the sending.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sweeps.objectives import OBJECTIVES
from sweeps.outcome import TrialOutcome
from sweeps.spec import SweepSpec
from trainers import yaml_text
from trainers.result import Evaluation, Save, Update

RANK = "frontier/rank"
FRONTIER_COLOR, OTHER_COLOR = "#e7298a", "#b0b0b0"
NAME_LENGTH = 14  # MLflow's list of runs cuts longer names
PARAM_LENGTH, TAG_LENGTH, KEY_LENGTH = 6000, 5000, 250  # what the oldest supported server stores
TRAIN_CURVES = ("train/loss", "train/grad_norm", "train/learning_rate", "train/step_time_s")
WITHOUT_OBJECTIVES = ("OOM", "FAILED", "INFEASIBLE")

_GROUPS = {
    "memory": "peak_memory_gib peak_memory_allocated_gib peak_memory_reserved_gib host_peak_memory_gib weights_gib "
    "gradients_gib optimizer_state_gib activations_gib temporary_gib predicted_peak_memory_allocated_gib "
    "predicted_weights_gib predicted_gradients_gib predicted_optimizer_state_gib predicted_activations_gib "
    "predicted_temporary_gib",
    "throughput": "step_time_s step_time_precision tokens_per_second target_tokens_per_second "
    "tokens_per_second_per_device padding_share mfu hfu straggler_spread predicted_step_time_s",
    "step": "forward_share backward_share recompute_share collective_share transfer_share data_share "
    "pipeline_idle_share optimizer_share other_share profiled_step_time_s",
    "quality": "eval_loss eval_loss_start train_loss tokens_to_target consumed_tokens updates evaluations_to_target "
    "saves_to_target",
    "cost": "cost_per_quality_usd cost_over_composed storage_usd startup_cost_usd gpu_hours save_gib",
    "parity": "parity_difference parity_tolerance miniature_difference",
    "time": "time_to_target_s eval_time_s save_time_s startup_time_s wall_time_s",
}
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names.split()}


@dataclass(frozen=True)
class Reading:
    """One value of one metric."""

    key: str
    value: float
    timestamp: int
    step: int


# -- names and values ---------------------------------------------------------------------------------------------


def metric_key(name: str) -> str:
    """Return the key of a figure: its group, and its name."""
    return f"{_GROUP_OF.get(name, 'other')}/{param_key(name)}"


def param_key(name: str) -> str:
    """Return a key that MLflow accepts: any character that it refuses becomes `_x<hex>_`. See `param_name`."""
    key = re.sub(r"_(?=x[0-9a-f])|[^\w\-. :/]", _escape, name)
    if key == "." or key.startswith(("/", "..")) or key != posixpath.normpath(key):
        key = re.sub(r"[/.]", _escape, key)
    if len(key) > KEY_LENGTH:
        key = f"{key[:200]}_{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    return key


def param_name(key: str) -> str:
    """Return the name that `param_key` was given. A key over 250 characters is cut; its tag `param.<end>` has it."""
    return re.sub(r"_x([0-9a-f]+)_", lambda match: chr(int(match[1], 16)), key)


def _escape(match: re.Match[str]) -> str:
    return f"_x{ord(match[0]):x}_"


def text(value: Any) -> str:
    """Return the one text of a value: MLflow refuses a param that comes again in another spelling."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple, dict)):
        value = json.dumps(plain(value), sort_keys=True, ensure_ascii=False)
    return cut(str(value), PARAM_LENGTH)  # a float's str is its shortest exact decimal


def rounded(value: float) -> float:
    """Return a value with six significant digits; whole numbers, which are counts, stay exact."""
    return value if float(value).is_integer() else float(f"{value:.6g}")


def cut(text: str, limit: int) -> str:
    """Return text with at most `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def plain(value: Any) -> Any:
    """Return resolved plain data (dicts, lists, finite numbers) of whatever mappings and sequences hold it."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


# -- one trial ----------------------------------------------------------------------------------------------------


def run_name(outcome: TrialOutcome) -> str:
    """Return a name that a person recognises: `047 ddp 2x4` is trial 47, 2 workers with micro batches of 4."""
    base = f"{outcome.trial_id} {outcome.config.get('strategy', outcome.kind)} {outcome.num_workers}"
    full = f"{base}x{outcome.config['micro_batch_size']}" if "micro_batch_size" in outcome.config else base
    return full if len(full) <= NAME_LENGTH else base[:NAME_LENGTH].rstrip()


def params(outcome: TrialOutcome) -> dict[str, str]:
    """Return the candidate's values, flat, each with its one text; a value that is absent or null has no param."""
    return {param_key(name): text(value) for name, value in _flat(plain(outcome.config)) if value is not None}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def tags(outcome: TrialOutcome, sweep: str, parent: str, objectives: Sequence[str]) -> dict[str, str]:
    """Return the tags of a trial's run. It joins the frontier only when the sweep is concluded."""
    # Objectives that a completed trial has no value for: the record holds no stand-in for them.
    undefined = [n for n in objectives if n not in outcome.metrics] if outcome.status == "COMPLETED" else []
    trial = {"id": outcome.trial_id, "attempt": str(outcome.attempt), "config_hash": outcome.candidate_id}
    trial |= {"kind": outcome.kind, "status": outcome.status, "undefined": ", ".join(undefined)}
    trial |= {"reason": outcome.reason, "reason_kind": outcome.reason_kind or "", "phase": outcome.phase or ""}
    trial["rank"] = "" if outcome.rank is None else str(outcome.rank)
    found = {"mlflow.parentRunId": parent, "sweep.id": sweep, "sweep.role": "trial", **frontier_tags(False)}
    found |= {f"trial.{name}": value for name, value in trial.items()}
    if outcome.parity is not None:
        found |= {"parity.verdict": outcome.parity.verdict, "parity.reference": outcome.parity.reference}
    names = {param_key(name): name for name, _ in _flat(plain(outcome.config))}
    found |= {f"param.{key[-12:]}": name for key, name in names.items() if param_name(key) != name}
    return {key: cut(value, TAG_LENGTH) for key, value in found.items() if value}


def frontier_tags(on_frontier: bool) -> dict[str, str]:
    return {"frontier": text(on_frontier), "mlflow.runColor": FRONTIER_COLOR if on_frontier else OTHER_COLOR}


def final_metrics(outcome: TrialOutcome, objectives: Sequence[str]) -> list[Reading]:
    """Return the trial's figures. A trial that did not run through has no value for an objective, not a bad one."""
    hidden = {*OBJECTIVES, *objectives} if outcome.status in WITHOUT_OBJECTIVES else set[str]()
    figures = {"gpu_hours": outcome.gpu_hours, "wall_time_s": outcome.wall_s, **outcome.metrics}
    at = milliseconds(outcome.ended_at)
    shown = {name: value for name, value in figures.items() if name not in hidden and _finite(value)}
    return [Reading(metric_key(name), rounded(value), at, 0) for name, value in shown.items()]


def histories(outcome: TrialOutcome) -> list[Reading]:
    """Return the curves over consumed tokens, at times that follow from the outcome alone."""
    found: list[Reading] = []
    for elapsed, event in _events(outcome):
        if isinstance(event, Save):
            continue
        at = milliseconds(outcome.started_at + elapsed)
        names = TRAIN_CURVES if isinstance(event, Update) else ("eval/loss",)
        values = {name: getattr(event, name.partition("/")[2]) for name in names}
        found += [Reading(k, rounded(v), at, event.consumed_tokens) for k, v in values.items() if _finite(v)]
    return found


def _events(outcome: TrialOutcome) -> Iterator[tuple[float, Update | Evaluation | Save]]:
    """Yield what a job did, in order, with the seconds spent on it up to then."""
    measured = outcome.measured
    if measured is None:
        return
    events: list[Update | Evaluation | Save] = [*measured.updates, *measured.evaluations, *measured.saves]
    elapsed = 0.0
    for event in sorted(events, key=lambda e: e.consumed_tokens):  # stable: the update, then what followed it
        seconds = event.step_time_s if isinstance(event, Update) else event.seconds
        elapsed += seconds if _finite(seconds) else 0.0
        yield elapsed, event


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)  # the journal writes NaN as null


def files(outcome: TrialOutcome) -> dict[str, str]:
    """Return the artifacts of a trial: path to content."""
    found = {"config/config.yaml": yaml_text.dump(plain(outcome.trial_config)), "log.txt": log(outcome)}
    if outcome.result is not None:
        result = plain(outcome.result)
        timing = {name: result.get(name) for name in ("updates", "evaluations", "saves", "seconds", "speed")}
        found["memory.json"] = json.dumps(result.get("memory"), indent=1) + "\n"
        found["timing.json"] = json.dumps(timing, indent=1) + "\n"
    return found


def log(outcome: TrialOutcome) -> str:
    """Return the trial as lines for a person."""
    lines = [f"trial {outcome.trial_id}, attempt {outcome.attempt}, {outcome.kind}: {outcome.num_workers} worker(s)"]
    for elapsed, event in _events(outcome):
        shown = ", ".join(f"{name} {_figure(value)}" for name, value in asdict(event).items())
        lines.append(f"{elapsed:9.1f} s  {type(event).__name__.lower():10}  {shown}")
    where = f", phase {outcome.phase}" if outcome.phase else ""
    where += f", rank {outcome.rank}" if outcome.rank is not None else ""
    lines.append(f"{outcome.status}{where}{': ' if outcome.reason else ''}{outcome.reason}")
    lines += [f"    {detail}" for detail in outcome.details]
    if outcome.traceback:
        lines += ["", outcome.traceback]
    return "\n".join(lines) + "\n"


def _figure(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


# -- the sweep ----------------------------------------------------------------------------------------------------


def without_secrets(spec: SweepSpec) -> SweepSpec:
    """Return the spec with the values of environment variables hidden whose names speak of a secret."""
    secret = ("token", "key", "secret", "password", "credential")
    hidden = {n: "(hidden)" if any(word in n.lower() for word in secret) else v for n, v in spec.env.items()}
    return spec.model_copy(update={"env": hidden})


def space_hash(spec: SweepSpec) -> str:
    """Return what tells two spaces apart: a hash of the spec without budget, folder and label."""
    tree = spec.model_dump(mode="json", exclude={"budget", "runs_dir", "run_name"})
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:12]


def varying(spec: SweepSpec) -> list[str]:
    """Return the axes with several values, as params are named."""
    axes = {**spec.learning.model_dump(), **spec.system.model_dump()}
    return [param_key(name) for name, values in axes.items() if len(values) > 1]


def trials_csv(outcomes: Sequence[TrialOutcome], ranks: Mapping[str, int]) -> str:
    """Return all trials as a table."""
    rows = []
    for o in outcomes:
        rank = ranks.get(o.trial_id) if o.status == "COMPLETED" else None
        who = {"trial": o.trial_id, "attempt": o.attempt, "kind": o.kind, "status": o.status, "frontier_rank": rank}
        why = {"reason_kind": o.reason_kind, "reason": o.reason}
        rows.append({**who, **dict(_flat(plain(o.config))), **o.metrics, **why})
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
