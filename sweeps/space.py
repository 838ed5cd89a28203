"""From a space's YAML file and the command line's overrides to one validated SweepSpec."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from sweeps.objectives import OBJECTIVES
from sweeps.search import SEARCHERS
from sweeps.spec import SweepSpec, keys
from trainers import model, yaml_text
from trainers.errors import UserError, did_you_mean
from trainers.prepare import locate_data

OF_PLANS = ("solve", "simulate", "scaling", "corrected_by")
"""Keys that only plans know."""
SPACES = Path(__file__).resolve().parent.parent / "search_spaces"


# The beginning of a pydantic error's type to what a person is told.
PLAIN_WORDS = {
    "int_": "expected a whole number",
    "float_": "expected a number",
    "finite_": "expected a finite number",
    "bool_": "expected true or false",
    "string_type": "expected text",
    "too_short": "give at least one value",
}


def shipped() -> dict[str, Path]:
    """Return the spaces that ship, by name."""
    return {path.stem: path for path in sorted(SPACES.glob("*.yaml"))}


def find(name: str) -> Path:
    """Return the file of a space given by name or path."""
    if name in shipped():
        return shipped()[name]
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml") or path.is_absolute():
        if not path.is_file():
            raise UserError(f"space={name}: no such file; the spaces that ship: {', '.join(shipped())}")
        return path.resolve()
    if path.is_file():
        raise UserError(f"space={name}: a space is a .yaml file; the spaces that ship: {', '.join(shipped())}")
    raise UserError(
        f"unknown space {name!r}{did_you_mean(name, shipped())}; available: {', '.join(shipped())}, "
        "or the path of a .yaml file"
    )


def found_or_told(name: str, overrides: Mapping[str, Any]) -> Path:
    """Return the file of a space. Raises UserError, with the faults of the overrides that any space would have."""
    try:
        return find(name)
    except UserError as unknown:
        faults = list(unknown.faults)
    any_space = SPACES / "lora_small.yaml"  # its own name, not the unknown one, which may be a path
    try:
        validate(apply({**yaml_text.read(any_space), "space": any_space.stem}, overrides), Path.cwd(), given=overrides)
    except UserError as error:
        faults += error.faults
    raise UserError(faults)


def parse_overrides(arguments: Sequence[str], known: Collection[str] | None = None) -> dict[str, Any]:
    """Split `key=value` arguments; values keep their text, and `[…]`, `{…}` and quotes are YAML.

    `known`: the keys that there are; default: a sweep's. Raises UserError with every argument that is not of that form.
    """
    names = known or [*keys(), "space", "resume"]
    overrides: dict[str, Any] = {}
    faults = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        key = key.removeprefix("--").strip().replace("[", ".").replace("]", "").lstrip(".")  # a[b] is a.b
        if argument in shipped() and known is None:
            faults.append(f"{argument!r} is not key=value (did you mean space={argument}?)")
        elif not equals or not key:
            faults.append(f"{argument!r} is not key=value{did_you_mean(key, names)}")
        elif key in overrides:
            faults.append(f"{key} is given twice: {key}={_text(overrides[key])} and {argument}")
        else:
            try:
                overrides[key] = override_value(value)
            except UserError:
                quoted = shlex.quote(f"{key}={_quoted(value)}")
                faults.append(f"{argument!r}: the value is not valid; quote it as a whole: {quoted}")
    if faults:
        raise UserError(faults)
    return overrides


def override_value(text: str) -> Any:
    """Read an override's value: what is not bracketed or quoted is one scalar, whatever characters it has."""
    stripped = text.strip()
    if stripped[:1] in ("[", "{", '"', "'"):
        return yaml_text.parse(stripped, "value")
    return None if stripped in ("", "null", "~") else stripped


def load(space: str, overrides: Mapping[str, Any]) -> SweepSpec:
    """Read a space, apply overrides, validate. Raises UserError with all faults at once."""
    path = found_or_told(space, overrides)
    tree = yaml_text.read(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path} is not a space: expected keys and values")
    if tree.get("space") is None:
        tree["space"] = path.stem
    empty = [key for key in ("model", "data", "runs_dir") if key in overrides and overrides[key] is None]
    if empty:
        raise UserError([f"{key}= has no value; give one, or leave it out for the space's own" for key in empty])
    # The target belongs to the space's own model and data; another pair derives its own.
    if {"model", "data"} & set(overrides) and "target_eval_loss" not in overrides:
        tree.pop("target_eval_loss", None)
    base = path.parent if path.parent != SPACES else Path.cwd()
    try:
        merged = apply(tree, overrides)
    except UserError:
        validate(tree, base, given={})  # a faulty file says better what is wrong than the merge with it
        raise
    return validate(merged, base, given=overrides)


def apply(tree: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge overrides into a tree by OmegaConf's grammar (dots and brackets), and resolve interpolations."""
    try:
        config = OmegaConf.create(dict(tree))
        for key, value in overrides.items():
            OmegaConf.update(config, key, value, merge=isinstance(value, dict))
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(f"overrides: {str(error).splitlines()[0]}") from None
    except (TypeError, AttributeError, ValueError) as error:
        raise UserError(f"overrides {list(overrides)}: {error}") from None
    assert isinstance(plain, dict)
    return {str(k): v for k, v in plain.items()}


def validate(tree: Mapping[str, Any], base: Path, given: Mapping[str, Any]) -> SweepSpec:
    """Validate a tree into a SweepSpec with absolute paths.

    Paths of a space file resolve beside it, paths of the command line where the command was given.
    """
    faults: list[str] = []
    spec: SweepSpec | None = None
    try:
        spec = SweepSpec.model_validate(tree)
    except ValidationError as error:
        faults += faults_of(error)
    faults += [*_registry_faults(tree), *_plan_faults(tree), *_cluster_faults(tree, base, given)]
    changes = {}
    for key in ("model", "data", "eval_data", "cluster", "baseline", "runs_dir"):
        value = getattr(spec, key) if spec is not None else tree.get(key)
        if isinstance(value, str):  # of another type: told above
            changes[key] = _absolute(key, value, Path.cwd() if key in given or key == "runs_dir" else base, faults)
    if faults or spec is None:
        raise UserError(faults)
    return spec.model_copy(update=changes)


def faults_of(error: ValidationError, known: Collection[str] | None = None) -> list[str]:
    """Return each fault of a validation once, as a sentence. `known`: the keys that there are; default: a spec's."""
    # A list whose only item is wrong is also reported as too short.
    return [describe(e, known) for e in error.errors() if not (e["type"] == "too_short" and e["input"])]


def describe(error: Mapping[str, Any], known: Collection[str] | None = None) -> str:
    """Say one pydantic error as: key=value, what is allowed, the nearest valid name."""
    path = ".".join(str(part) for part in error["loc"] if not isinstance(part, int))
    value = error.get("input")
    if error["type"] == "extra_forbidden":
        while isinstance(value, dict) and len(value) == 1:
            ((inner, value),) = value.items()
            path = f"{path}.{inner}"
        more = "; run with --help to see all keys" if known is None else ""
        names = known or {*keys(), *(key.split(".", 1)[0] for key in keys())}
        return f"unknown key {path}={_text(value)}{did_you_mean(path, names)}{more}"
    if error["type"] == "literal_error":
        expected = str(error["ctx"]["expected"]).replace("'", "")
        choices = expected.replace(" or ", ", ").split(", ")
        return f"{path}={_text(value)}: allowed: {', '.join(choices)}{did_you_mean(str(value), choices)}"
    if error["type"] == "missing":
        return f"{path} is missing"
    if error["type"] in ("model_type", "dict_type"):
        return f"{path}={_text(value)}: expected keys and values"
    message = str(error["msg"]).removeprefix("Input ")
    plain = next((words for kind, words in PLAIN_WORDS.items() if str(error["type"]).startswith(kind)), None)
    return f"{path}={_text(value)}: {plain or message[:1].lower() + message[1:]}"


def to_yaml(spec: SweepSpec) -> str:
    """Write a spec as YAML that reads back equal."""
    return yaml_text.dump(spec.model_dump(mode="json"))


def schema() -> str:
    """Return the JSON schema of a space file, for editors."""
    document = SweepSpec.model_json_schema(mode="validation")
    document["required"] = []  # `space` defaults to the file's name
    document["properties"]["searcher"]["enum"] = list(SEARCHERS)
    document["properties"]["objectives"]["items"] = {"type": "string", "enum": list(OBJECTIVES)}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _registry_faults(tree: Mapping[str, Any]) -> list[str]:
    faults = []
    searcher = tree.get("searcher")
    if isinstance(searcher, str) and searcher not in SEARCHERS:
        faults.append(
            f"searcher={searcher}: unknown{did_you_mean(searcher, SEARCHERS)}; allowed: {', '.join(SEARCHERS)}"
        )
    objectives = tree.get("objectives")
    if isinstance(objectives, (list, tuple)) and len({str(o) for o in objectives}) < len(objectives):
        faults.append(f"objectives={_text(list(objectives))}: each objective once")
    for name in objectives if isinstance(objectives, (list, tuple)) else [objectives]:
        if isinstance(name, str) and name not in OBJECTIVES:
            faults.append(
                f"objectives: unknown objective {name!r}{did_you_mean(name, OBJECTIVES)}; allowed: "
                f"{', '.join(OBJECTIVES)}"
            )
    return faults


def _plan_faults(tree: Mapping[str, Any]) -> list[str]:
    if str(tree.get("plan", False)).lower() in ("true", "1", "yes", "on"):
        return []
    unset = {key: SweepSpec.model_fields[key].default for key in OF_PLANS}
    asked = [key for key in OF_PLANS if str(tree.get(key, unset[key])).lower() != str(unset[key]).lower()]
    return [f"{key}={_text(tree[key])}: only a plan answers that; give plan=true, too" for key in asked]


def _cluster_faults(tree: Mapping[str, Any], base: Path, given: Mapping[str, Any]) -> list[str]:
    from sweeps.clusters import load_cluster  # its presets are read by what is here

    name = tree.get("cluster")
    if not isinstance(name, str):
        return []
    try:
        load_cluster(_absolute("cluster", name, Path.cwd() if "cluster" in given else base, []))
    except UserError as error:
        return list(error.faults)
    return []


def _absolute(key: str, value: str, base: Path, faults: list[str]) -> str:
    """Resolve a path key against `base`; names that are not paths stay as they are."""
    path = Path(value).expanduser()
    if key == "runs_dir":
        return str((base / path).resolve())
    if key in ("cluster", "baseline"):  # a preset's name, or a file
        return str((base / path).resolve()) if os.path.isfile(base / path) else value
    if not path.is_absolute() and os.path.exists(base / path) and value not in ("embedded",):
        value = str((base / path).resolve())
    try:
        return model.locate(value) if key == "model" else locate_data(value)
    except UserError as error:
        faults.extend(error.faults)
        return value


def _quoted(value: str) -> str:
    """Write text as a YAML string in double quotes."""
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    return str(value) if isinstance(value, (str, int, float)) else json.dumps(value, ensure_ascii=False, default=str)
