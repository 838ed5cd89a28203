"""The sweep's specification: pydantic models that forbid unknown keys, frozen once validated.

`learning` and `system` hold the axes of the space. Their keys are the fields of the trainers' configs (and the
options of each strategy), each with one value or a list of values to try.
"""

from __future__ import annotations

import dataclasses
import typing
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from trainers.config import LearningConfig, OnlyWith, SystemConfig, TrialConfig
from trainers.strategies import DIMENSIONS, STRATEGIES, Option


class Frozen(BaseModel):
    """Base of all models here: unknown keys are errors, values cannot be changed afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_unset(cls, data: Any) -> Any:
        """A key with no value is unset: its default holds, where null is not a value of its own."""
        if not isinstance(data, dict):
            return data
        unset = {
            name
            for name, field in cls.model_fields.items()
            if not field.is_required() and type(None) not in typing.get_args(field.annotation)
        }
        return {key: value for key, value in data.items() if value is not None or key not in unset}


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of the space: its type, default, and the value of another axis without which it does not exist."""

    name: str
    type: Any
    default: Any
    help: str
    only_with: OnlyWith | None = None
    bounds: typing.Mapping[str, float | None] = dataclasses.field(default_factory=dict)


@cache
def axes(config: type) -> tuple[Axis, ...]:
    """Return the axes that a trainer config offers: its fields, and for the system the strategies' options."""
    hints = typing.get_type_hints(config)
    found = []
    for f in dataclasses.fields(config):
        if f.name == "options":
            found += _option_axes()
            continue
        kind = Literal[tuple(STRATEGIES)] if f.metadata.get("choices") == "strategies" else hints[f.name]
        found.append(
            Axis(f.name, kind, f.default, f.metadata["help"], f.metadata.get("only_with"), f.metadata["bounds"])
        )
    return tuple(found)


def _option_axes() -> list[Axis]:
    """Return an axis for each option; one that several strategies declare is one axis, with the choices of all."""
    owners: dict[str, list[str]] = {}
    declared: dict[str, Option] = {}
    for name in STRATEGIES:
        for option in STRATEGIES[name].options:
            owners.setdefault(option.name, []).append(name)
            known = declared.get(option.name, option)
            declared[option.name] = dataclasses.replace(
                known, choices=tuple(dict.fromkeys((*known.choices, *option.choices)))
            )
    found = [_option_axis(o, OnlyWith("strategy", tuple(owners[o.name]))) for o in declared.values()]
    return found + [_option_axis(o, OnlyWith(d, above=1)) for d in DIMENSIONS for o in DIMENSIONS[d].options]


def _option_axis(option: Option, only_with: OnlyWith) -> Axis:
    kind = _one_of(option.choices) if option.choices else option.type
    return Axis(option.name, kind, option.default, option.help, only_with)


def _one_of(choices: tuple[Any, ...]) -> Any:
    """Return the type of a value among `choices`, which files and overrides give as text."""
    by_text = {str(choice): choice for choice in choices}
    return Annotated[Literal[choices], BeforeValidator(lambda value: by_text.get(str(value), value))]


def _as_list(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else (value,)


class Axes(Frozen):
    """Axes of the space: every field a tuple of values to try."""

    def values(self) -> dict[str, tuple[Any, ...]]:
        """Return each axis's values."""
        return {name: getattr(self, name) for name in type(self).model_fields}


def _axes_model(name: str, config: type, doc: str) -> type[Axes]:
    fields: dict[str, Any] = {}
    for axis in axes(config):
        bounds: dict[str, Any] = {test: bound for test, bound in axis.bounds.items() if bound is not None}
        one: Any = Annotated[axis.type, Field(**bounds)] if bounds else axis.type
        item: Any = tuple[one, ...]
        many = Annotated[item, Field(min_length=1), BeforeValidator(_as_list, json_schema_input_type=one | item)]
        fields[axis.name] = (many, Field(default=(axis.default,), description=axis.help))
    return create_model(name, __base__=Axes, __doc__=doc, **fields)


if TYPE_CHECKING:

    class LearningAxes(Axes):
        """Axes that change what is learned."""

    class SystemAxes(Axes):
        """Axes that must not change what is learned."""

else:  # the fields are those of the trainers' configs, and are written there once
    LearningAxes = _axes_model("LearningAxes", LearningConfig, "Axes that change what is learned.")
    SystemAxes = _axes_model("SystemAxes", SystemConfig, "Axes that must not change what is learned.")


class Budget(Frozen):
    """What the sweep may spend. It stops at the first limit that is reached, and says what it left untried."""

    trials: int | None = Field(default=None, ge=1)
    """trials to run; null: every legal candidate"""
    minutes: float | None = Field(default=None, gt=0)
    """wall-clock minutes; running trials end at their next evaluation"""
    gpu_hours: float | None = Field(default=None, gt=0)
    """reserved GPUs × hours, over all trials"""
    tokens_per_trial: int | None = Field(default=None, ge=1)
    """non-pad training tokens of one trial; null: epochs passes over the data"""


class Ray(Frozen):
    """How trials are placed on the cluster."""

    cpus_per_worker: float = Field(default=1.0, gt=0)
    """CPUs that Ray reserves for each worker; below 1, CPU workers share cores"""
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Ray's placement strategy for the workers of a trial"""
    max_concurrent_trials: int | None = Field(default=None, ge=1)
    """trials side by side; null: as many as fit on GPUs, one at a time on CPUs, where they would disturb each other"""
    reuse_processes: bool = True
    """trials take turns in processes that have started once; after a failure, or false: each trial starts its own"""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """seconds a trial may wait for its workers before it fails"""


_TRIAL_HELP = {f.name: f.metadata.get("help", "") for f in dataclasses.fields(TrialConfig)}


class SweepSpec(Frozen):
    """One sweep, complete: what `runs/<sweep id>/spec.yaml` holds."""

    space: str = Field(pattern=r"^[^/]+$")  # part of a folder's name
    """name of the space: the file's name, and the MLflow experiment"""
    run_name: str | None = None
    """a label for the sweep in MLflow; null: <space>-<date>-<n>"""
    model: str = Field("embedded", description=_TRIAL_HELP["model"])
    model_revision: str | None = Field(default=None, description=_TRIAL_HELP["model_revision"])
    data: str = Field("embedded", description=_TRIAL_HELP["data"])
    eval_data: str | None = Field(default=None, description=_TRIAL_HELP["eval_data"])
    eval_fraction: float = Field(default=0.1, gt=0, le=0.9, description=_TRIAL_HELP["eval_fraction"])
    max_eval_rows: int = Field(default=500, ge=1, description=_TRIAL_HELP["max_eval_rows"])
    data_template: Literal["auto", "chat", "plain"] = Field("auto", description=_TRIAL_HELP["data_template"])
    data_on_error: Literal["refuse", "drop"] = Field("refuse", description=_TRIAL_HELP["data_on_error"])
    cluster: str | None = None
    """a preset of search_spaces/clusters, or a path: device memory, peaks, links, an example price"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where the cluster has GPUs"""
    learning: LearningAxes = LearningAxes()
    system: SystemAxes = SystemAxes()
    objectives: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = Field(
        ("peak_memory_gib", "cost_per_quality_usd", "target_tokens_per_second"), min_length=1
    )
    """what the frontier trades off; each has its own direction"""
    target_eval_loss: float | None = Field(default=None, gt=0)
    """the quality that cost is paid for; null: derived from the first trial, and said so"""
    eval_every_tokens: int = Field(default=100_000, ge=1)
    """non-pad training tokens between evaluations"""
    epochs: int = Field(default=1, ge=1)
    """passes over the data, where budget.tokens_per_trial is null"""
    price_per_gpu_hour: float | None = Field(default=None, ge=0)
    """USD per reserved GPU (or CPU worker) and hour; null: the cluster preset's example price, else 1"""
    price_per_gib_month: float = Field(default=0.0, ge=0)
    """USD per GiB of saves kept for a month"""
    storage_months: float = Field(default=1.0, ge=0)
    """months that the saves are kept"""
    price_per_gib_io: float = Field(default=0.0, ge=0)
    """USD per GiB of saves moved"""
    proof: Literal["reference", "steps", "none"] = "reference"
    """how it is proved that trials learn the same: reference: by one process's first updates, and a step of a small
    model; steps: by that step alone; none: not at all"""
    measure_seconds: float = Field(default=20.0, ge=0)
    """most seconds that a trial times its windows for, before it trains; they stand for the data's lengths, and are the
    same in all trials. 0: training itself is timed, and there is no split of the step"""
    precision: float = Field(default=0.03, gt=0, le=0.5)
    """it stops earlier once the 95 % confidence interval of the step time is within this, relatively"""
    remeasure_every: int = Field(default=10, ge=0)
    """after so many trials the fastest one so far is timed again, which shows whether the machine drifts; 0: never"""
    trace: Literal["none", "memory", "time"] = "none"
    """keep a trace of every trial under runs/<sweep id>/traces: of memory, or of time for Perfetto"""
    memory_limit_gib: float | None = Field(default=None, gt=0)
    """let trials run out of memory here, as on a device that has no more"""
    plan: bool = False
    """predict every candidate on `cluster` and run none: no GPU, no weights, no hub"""
    solve: Literal["none", "micro_batch_size", "num_workers"] = "none"
    """with plan=true: the largest micro batch of each candidate that fits, or the fewest GPUs"""
    simulate: Literal["none", "at_risk", "all"] = "none"
    """with plan=true: run the real code on fake tensors, for candidates at risk or for all; seconds each"""
    scaling: bool = False
    """with plan=true: of each strategy the cheapest configuration that fits on several GPUs, on up to 4,096"""
    corrected_by: str | None = None
    """with plan=true: a sweep on the same cluster (an id, or latest) whose step times correct the predicted ones"""
    searcher: str = "guided"
    """who picks the next trial. guided: the one that is expected to add most to the frontier for its GPU time; speed
    and memory are probed apart from learning, and the cost of a configuration is composed of both"""
    seed: int = Field(default=0, ge=0)
    """seed of the searcher"""
    confirm: int = Field(default=3, ge=0)
    """with searcher=guided: how many configurations of the frontier are run whole in the end, to confirm their cost"""
    baseline: str | None = None
    """a job's file, as for `trainers.train`, with the configuration that you run now: a candidate, and first to run"""
    least_gain: float = Field(default=0.001, gt=0, lt=1)
    """with searcher=guided: it stops when no trial is expected to enlarge the hypervolume by this much, relatively"""
    budget: Budget = Budget()
    launcher: Literal["ray", "inline"] = "ray"
    """inline: every trial in this process, without Ray, for a debugger"""
    ray: Ray = Ray()
    trial_timeout_minutes: float = Field(default=120.0, gt=0)
    """a trial that takes longer is ended as a timeout"""
    env: dict[str, str] = Field(default_factory=dict)
    """environment variables of the workers"""
    runs_dir: str = "runs"
    """where runs/<sweep id>/ goes"""


def keys(model: type[BaseModel] = SweepSpec) -> dict[str, tuple[str, Any, str]]:
    """Return every key in dotted form with its type, default and help, in the order of the models."""
    return dict(_keys(model, ""))


def _keys(model: type[BaseModel], prefix: str) -> typing.Iterator[tuple[str, tuple[str, Any, str]]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
            continue
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        yield f"{prefix}{name}", (type_name(kind), default, field.description or "")


def type_name(kind: Any) -> str:
    """Return a type as a person writes it: int, one of a|b, a list."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return type_name(args[0])
    if origin is Literal:
        return "|".join(str(a) for a in args)
    if origin is tuple:
        return f"{type_name(args[0])} or list"
    if origin is dict:
        return "name: text pairs"
    if args:
        return " or ".join("null" if a is type(None) else type_name(a) for a in args)
    return getattr(kind, "__name__", str(kind))
