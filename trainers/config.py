"""What one trial runs: frozen dataclasses, read from YAML or from a plain dict.

A field's metadata holds its help text, and `only_with`: the value of another field without which it does not exist
(then it is absent from files and records, not null). The search space offers the same fields as axes, so a new field
here is a new axis there.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from trainers import yaml_text
from trainers.errors import UserError, did_you_mean, nearest

T = TypeVar("T")
Scalar = str | int | float | bool


@dataclass(frozen=True)
class OnlyWith:
    """A field exists only where `field` has one of `values`, or is above `above`."""

    field: str
    values: tuple[str, ...] = ()
    above: int | None = None

    def holds(self, value: Any) -> bool:
        """Tell whether the condition holds for this value of `field`."""
        return value in self.values or (self.above is not None and value is not None and value > self.above)


def option(
    default: Any,
    help: str,
    *,
    only_with: OnlyWith | None = None,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    choices: str | None = None,
    form: Callable[[str], Any] | None = None,
) -> Any:
    """Declare a config field: default, help text, numeric bounds, or the registry that names its choices.

    `form` reads the text of a value that has one, and raises ValueError with what is expected.
    """
    bounds = {"gt": above, "ge": at_least, "le": at_most}
    metadata = {"help": help, "only_with": only_with, "bounds": bounds, "choices": choices, "form": form}
    return field(default=default, metadata=metadata)


def pairs(text: str | None) -> tuple[tuple[float, float], ...]:
    """Read `1:2,3:4`. Raises ValueError where it is not of that form."""
    try:
        parts = [part.split(":") for part in text.split(",")] if text else []
        return tuple((float(one), float(other)) for one, other in parts)
    except ValueError as error:
        wanted = "two numbers with a colon between them, comma separated, as in 1000:2.5,2000:2.1"
        raise ValueError(f"expected {wanted}") from error


_LORA = OnlyWith("adapter", ("lora", "qlora"))


@dataclass(frozen=True)
class LearningConfig:
    """Everything that changes what is learned. Two trials with equal values learn the same, whatever their system."""

    adapter: Literal["full", "lora", "qlora"] = option(
        "lora", "what is trained: all weights, or a LoRA adapter on a frozen base; qlora: on a base of 4-bit weights"
    )
    lora_rank: int = option(8, "rank of the LoRA matrices", only_with=_LORA, at_least=1)
    lora_alpha: float = option(16.0, "LoRA scale: the update is multiplied by alpha / rank", only_with=_LORA, above=0)
    lora_dropout: float = option(0.0, "dropout on the adapter's input", only_with=_LORA, at_least=0, at_most=0.99)
    lora_targets: str = option(
        "all-linear", "modules that get an adapter: all-linear, or names joined by commas", only_with=_LORA
    )
    learning_rate: float = option(2e-4, "peak learning rate of AdamW", above=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = option("linear", "decay after the warm-up, to 0 at the end")
    warmup_fraction: float = option(0.05, "share of the updates over which the rate rises", at_least=0, at_most=1)
    weight_decay: float = option(0.0, "decoupled weight decay of AdamW", at_least=0)
    adam_beta1: float = option(0.9, "decay of AdamW's first moment", at_least=0, at_most=0.9999)
    adam_beta2: float = option(0.999, "decay of AdamW's second moment", at_least=0, at_most=0.99999)
    adam_epsilon: float = option(1e-8, "added to the root of AdamW's second moment", above=0)
    max_grad_norm: float = option(1.0, "clip the global gradient norm to this; 0 switches clipping off", at_least=0)
    global_batch_size: int = option(16, "samples per update, over all ranks and micro batches", at_least=1)
    seq_len: int = option(1024, "tokens a sample is truncated to", at_least=2)
    param_dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto",
        "dtype of compute and of frozen weights; trained weights are kept in float32. "
        "auto: bfloat16 on CUDA, float32 on CPU, where bfloat16 is many times slower without its instructions",
    )
    seed: int = option(0, "seed of data order, adapter weights and dropout", at_least=0)

    @property
    def targets(self) -> tuple[str, ...] | None:
        """The modules that get an adapter, by name or by the end of their path; None for all linear layers."""
        names = tuple(name.strip() for name in self.lora_targets.split(","))
        return None if names == ("all-linear",) else names


@dataclass(frozen=True)
class SystemConfig:
    """Everything that must not change what is learned: how the work is laid out on devices."""

    strategy: str = option("ddp", "the data-parallel method", choices="strategies")
    num_workers: int = option(1, "ranks: one per GPU, or per CPU process", at_least=1)
    micro_batch_size: int = option(1, "samples in one forward and backward pass of a rank", at_least=1)
    activation_checkpointing: Literal["none", "selective", "full"] = option(
        "none",
        "what the backward pass recomputes: nothing; all but attention and every second matrix product; whole blocks",
    )
    arrangement: Literal["length", "drawn"] = option(
        "length",
        "which samples of an update share a micro batch: those of similar length, for less padding; or as drawn",
    )
    offload_activations: bool = option(False, "keep what is saved for the backward pass in host memory")
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2"] = option("sdpa", "attention kernel")
    tp: int = option(1, "tensor-parallel degree: ranks that share each layer", at_least=1)
    pp: int = option(1, "pipeline-parallel degree: ranks that hold different layers", at_least=1)
    cp: int = option(1, "context-parallel degree: ranks that share each sequence", at_least=1)
    options: Mapping[str, Scalar] = field(
        default_factory=dict, metadata={"help": "options of the strategy, and of the degrees above 1"}
    )


@dataclass(frozen=True)
class RunConfig:
    """How long one run trains, when it evaluates and saves."""

    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto: cuda where there is a GPU")
    max_tokens: int | None = option(None, "stop after the update that reaches this many non-pad tokens", at_least=1)
    epochs: int = option(1, "passes over the data, where max_tokens is not given", at_least=1)
    target_eval_loss: float | None = option(None, "stop at the first evaluation at or under this loss")
    eval_every_tokens: int | None = option(
        None, "non-pad training tokens between evaluations; null: only at the end", at_least=1
    )
    save_every_updates: int = option(0, "updates between saves; 0: only at the end", at_least=0)
    output_dir: str | None = option(None, "where saves go; null: to a temporary folder, removed afterwards")
    proof: Literal["none", "steps", "reference"] = option(
        "none",
        "prove that the ranks learn what one process would. steps: one step of a miniature of the model, and the first "
        "updates noted; reference: also what one process does in them, to compare with",
    )
    measure_seconds: float = option(
        0.0,
        "before training, time two windows that stand for the data's lengths, again and again, until the step time is "
        "known to within `precision`, at most for so long, but three times at least; then profile them. 0: off",
        at_least=0,
    )
    precision: float = option(
        0.03, "relative half-width of the step time's 95 % confidence interval: 0.03 is 3 %", above=0, at_most=0.5
    )
    trace: Literal["none", "memory", "time"] = option(
        "none",
        "keep a trace of each rank: of time for Perfetto; of memory: on CUDA the allocator's snapshot, on CPU the "
        "bytes of each account after every event",
    )
    trace_dir: str | None = option(None, "where traces go; null: to output_dir")
    memory_limit_gib: float | None = option(
        None,
        "let the job run out of memory here, as on a device that has no more; on a CPU, where all but the rehearsal on "
        "the largest batch, loading and saving go untraced, in these only",
        above=0,
    )
    max_updates: int | None = option(None, "stop after this many updates, though the schedule is longer", at_least=1)
    give_up: str | None = option(
        None,
        "end where others have shown it to be worse: tokens:loss, comma separated; from so many tokens on, an eval "
        "loss above this is one that cannot win",
        form=pairs,
    )
    dominated_by: str | None = option(
        None,
        "end once measured where others are better for certain: GiB:seconds, comma separated; a job that takes more "
        "memory and more time for a step than one of these",
        form=pairs,
    )

    @property
    def rivals(self) -> tuple[tuple[float, float], ...]:
        """What `dominated_by` says, as (GiB, seconds)."""
        return pairs(self.dominated_by)

    @property
    def rungs(self) -> tuple[tuple[float, float], ...]:
        """What `give_up` says, as (tokens, loss)."""
        return pairs(self.give_up)


@dataclass(frozen=True)
class TrialConfig:
    """One training job, complete: `python -m trainers.train config.yaml` runs it with no other input."""

    model: str = option("embedded", "embedded, a hub id, or the path of a Hugging Face model folder")
    model_revision: str | None = option(None, "revision of a hub model")
    data: str = option("embedded", "embedded, a .jsonl file, or a hub data set as org/name or org/name:split")
    eval_data: str | None = option(None, "evaluation data in the same forms; null: a seeded split of data")
    eval_fraction: float = option(0.1, "share of data held out, where eval_data is null", above=0, at_most=0.9)
    max_eval_rows: int = option(500, "most rows that the split holds out, so that evaluations stay cheap", at_least=1)
    data_template: Literal["auto", "chat", "plain"] = option(
        "auto", "chat: the tokenizer's chat template; plain: prompt + answer; auto: chat where there is a template"
    )
    data_on_error: Literal["refuse", "drop"] = option("refuse", "what to do with rows that cannot be trained on")
    learning: LearningConfig = field(default_factory=LearningConfig)
    system: SystemConfig = field(default_factory=SystemConfig)
    run: RunConfig = field(default_factory=RunConfig)


def from_tree(cls: type[T], tree: Any, path: str = "") -> T:
    """Build a config dataclass from text or typed values, nested dicts for nested configs.

    Raises UserError with every unknown key and wrong value at once.
    """
    faults: list[str] = []
    value = _build(cls, tree, path, faults)
    if faults:
        raise UserError(faults)
    return typing.cast(T, value)


def load(path: Path) -> TrialConfig:
    """Read a trial's YAML file."""
    tree = yaml_text.read(path)
    if not tree:
        raise UserError(f"{path} is empty; a config needs at least one key, such as model: embedded")
    if not isinstance(tree, Mapping):
        raise UserError(f"{path}: expected keys and values such as model: embedded, got {tree!r:.100}")
    return from_tree(TrialConfig, tree)


def to_tree(config: Any) -> dict[str, Any]:
    """Return a config as plain data in file form: options flat, fields that do not apply absent."""
    tree: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            tree[f.name] = to_tree(value)
        elif f.name == "options":
            tree.update(value)
        elif applies(f, lambda name: getattr(config, name)):
            tree[f.name] = value
    return tree


def applies(f: dataclasses.Field[Any], value_of: typing.Callable[[str], Any]) -> bool:
    """Tell whether a field exists, given the values of its siblings."""
    condition: OnlyWith | None = f.metadata.get("only_with")
    return condition is None or condition.holds(value_of(condition.field))


def _build(cls: type[Any], tree: Any, path: str, faults: list[str]) -> Any:
    if not isinstance(tree, Mapping):
        faults.append(f"{path or 'the file'}: expected keys and values, got {tree!r}")
        return None
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for key, raw in tree.items():
        where = f"{path}.{key}" if path else str(key)
        if key in fields and key != "options":
            values[key] = _convert(hints[key], raw, where, faults, fields[key])
        elif "options" in fields:
            extra[key] = raw
        else:
            near = _place_of(str(key), where, fields)
            faults.append(f"unknown key {where}{near or '; there are: ' + ', '.join(fields)}")
    if "options" in fields:
        values["options"] = _owned_options(values, extra, path, set(fields) - {"options"}, faults)
    return None if faults else cls(**values)


def _owned_options(
    values: dict[str, Any], extra: dict[str, Any], path: str, known: set[str], faults: list[str]
) -> dict[str, Scalar]:
    from trainers.strategies import DIMENSIONS, STRATEGIES

    name = values.get("strategy") or SystemConfig.strategy
    if name not in STRATEGIES:
        faults.append(
            f"{path}.strategy: unknown strategy {name!r}{did_you_mean(str(name), STRATEGIES)}; "
            f"available: {', '.join(STRATEGIES)}"
        )
        for key in extra:
            where = f"{path}.{key}" if path else key
            if not _owner_of(key):
                faults.append(f"unknown key {where}{_place_of(key, where, known)}")
        return {}
    used = [d for d in DIMENSIONS if (values.get(d) or 1) > 1]
    declared = {o.name: o for o in (*STRATEGIES[name].options, *(o for d in used for o in DIMENSIONS[d].options))}
    chosen: dict[str, Scalar] = {o.name: o.default for o in declared.values()}
    for key, raw in extra.items():
        where = f"{path}.{key}" if path else key
        if key not in declared:
            owners = ", ".join([f"strategy {name}", *(f"{d}={values[d]}" for d in used)])
            near = _owner_of(key) or _place_of(key, where, known | set(declared))
            faults.append(f"unknown key {where} for {owners}{near}")
        elif raw is not None:  # a key with no value is unset
            value = _convert(declared[key].type, raw, where, faults, None)
            allowed = declared[key].choices
            if value is not None and allowed and value not in allowed:
                near = did_you_mean(str(raw), [str(a) for a in allowed])
                faults.append(f"{where}={raw!r}: allowed: {', '.join(map(str, allowed))}{near}")
            chosen[key] = value
    return chosen


def _place_of(key: str, where: str, siblings: Iterable[str]) -> str:
    """Say where a key belongs, or the nearest one of its section, or of any."""
    everywhere = names(TrialConfig)
    section = where.removesuffix(key)
    if any(name.rpartition(".")[2] == key for name in everywhere):
        return did_you_mean(where, everywhere)
    if _owner_of(key):
        return f" (did you mean system.{key}?{_owner_of(key).replace(':', '', 1)})"
    near = nearest(key, siblings)
    return f" (did you mean {section}{near}?)" if near else did_you_mean(where, everywhere)


def names(cls: type, prefix: str = "") -> list[str]:
    """Return the dotted names of a config's keys, without options."""
    found = []
    for f in dataclasses.fields(cls):
        nested = f.default_factory if dataclasses.is_dataclass(f.default_factory) else None
        found += names(typing.cast(type, nested), f"{prefix}{f.name}.") if nested else [f"{prefix}{f.name}"]
    return [name for name in found if name != "system.options"]


def _owner_of(key: str) -> str:
    """Say which strategies or degrees an option belongs to; empty for one of none."""
    from trainers.strategies import DIMENSIONS, STRATEGIES

    owners = [f"strategy={name}" for name in STRATEGIES if key in {o.name for o in STRATEGIES[name].options}]
    owners += [f"{name} above 1" for name in DIMENSIONS if key in {o.name for o in DIMENSIONS[name].options}]
    return f": it belongs to {' or '.join(owners)}" if owners else ""


def _convert(hint: Any, raw: Any, where: str, faults: list[str], f: dataclasses.Field[Any] | None) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), raw if raw is not None else {}, where, faults)
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if raw is None:
        if type(None) in allowed:
            return None
        if f is not None and f.default is not MISSING:
            return f.default  # a key with no value is unset
    wanted = next(a for a in allowed if a is not type(None))
    try:
        value = _scalar(wanted, raw)
        if f is not None and (form := f.metadata.get("form")) is not None:
            form(value)
    except ValueError as error:
        faults.append(f"{where}={raw!r}: {error}")
        return None
    for test, bound in (f.metadata.get("bounds") or {}).items() if f is not None else ():
        if bound is not None and not _within(test, value, bound):
            faults.append(f"{where}={raw!r}: must be {_BOUND_WORDS[test]} {bound}")
    return value


_BOUND_WORDS = {"gt": "above", "ge": "at least", "le": "at most"}


def _within(test: str, value: Any, bound: float) -> bool:
    return bool(value > bound if test == "gt" else value >= bound if test == "ge" else value <= bound)


def _scalar(wanted: Any, raw: Any) -> Scalar:
    """Read text (or an already typed value) as the wanted type. Raises ValueError with what is allowed."""
    if typing.get_origin(wanted) is Literal:
        choices = typing.get_args(wanted)
        if raw not in choices:
            raise ValueError(f"allowed: {', '.join(choices)}{did_you_mean(str(raw), choices)}")
        return typing.cast(Scalar, raw)
    if isinstance(raw, (list, dict)):
        raise ValueError(f"expected one {wanted.__name__}")
    if wanted is bool:
        words = {
            "true": True,
            "yes": True,
            "on": True,
            "1": True,
            "false": False,
            "no": False,
            "off": False,
            "0": False,
        }
        if str(raw).lower() not in words:
            raise ValueError("expected true or false")
        return words[str(raw).lower()]
    if wanted is str:
        return str(raw)
    return _number(wanted, raw)


def _number(wanted: type, raw: Any) -> int | float:
    if wanted is int:
        if isinstance(raw, bool) or (isinstance(raw, float) and not raw.is_integer()):
            raise ValueError("expected a whole number")
        try:
            return int(raw)
        except ValueError:
            raise ValueError("expected a whole number") from None
    try:
        value = float(raw)
    except ValueError:
        raise ValueError("expected a number") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError("expected a finite number")
    return value
