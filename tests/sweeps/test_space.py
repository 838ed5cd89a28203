"""Spaces, overrides and exports: a value means what was typed, wherever it was typed, and every fault is told."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import jsonschema
import pytest
import yaml

from sweeps import space
from sweeps.candidates import enumerate_candidates, trial_tree
from sweeps.clusters import load_cluster, presets, price_per_gpu_hour
from sweeps.spec import SweepSpec, keys
from tests.sweeps.factories import make_context, make_spec
from trainers import model, yaml_text
from trainers.config import TrialConfig, from_tree
from trainers.errors import UserError
from trainers.shape import ModelShape

SPACES = Path(__file__).parents[2] / "search_spaces"
SHIPPED = sorted(SPACES.glob("*.yaml"))
CLUSTERS = sorted(p.stem for p in (SPACES / "clusters").glob("*.yaml"))

each_space = pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)


class Yaml12Loader(yaml.SafeLoader):
    """Reads scalars by the core schema of YAML 1.2, as editors do."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


for tag, pattern, first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", list("-+.0123456789")),
):
    Yaml12Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(rf"(?:{pattern})\Z"), first)
# What PyYAML would make of 1.2's numbers: 010 is 8, and 1e-4 has no point.
Yaml12Loader.add_constructor(
    "tag:yaml.org,2002:int", lambda loader, node: int(node.value, 0 if "x" in node.value else 10)
)
Yaml12Loader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(node.value))


def read_1_2(text: str) -> Any:
    return yaml.load(text, Yaml12Loader)


def write(folder: Path, text: str, name: str = "mine.yaml") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def load(folder: Path, text: str, *arguments: str) -> SweepSpec:
    """Load a space file of this text with overrides as a shell would hand them over."""
    return space.load(write(folder, text), space.parse_overrides(arguments))


def faults(folder: Path, text: str, *arguments: str) -> tuple[str, ...]:
    with pytest.raises(UserError) as error:
        load(folder, text, *arguments)
    return error.value.faults


def reread(spec: SweepSpec) -> SweepSpec:
    """Return the spec that its export reads back as."""
    return space.validate(yaml_text.parse(space.to_yaml(spec), "export"), base=Path("/nowhere"), given={})


def typed(spec: SweepSpec) -> list[Any]:
    """Return the export as readers of YAML 1.1 and of YAML 1.2 see it."""
    text = space.to_yaml(spec)
    return [yaml.safe_load(text), read_1_2(text)]


# -- by name and by path -----------------------------------------------------------------------------------------------


def test_a_space_is_found_by_name_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert set(space.shipped()) == {p.stem for p in SHIPPED}
    assert space.find("lora_small") == SPACES / "lora_small.yaml"
    text = "learning:\n  seed: 5\n"
    for given in (write(tmp_path, text), "mine.yaml", "./mine.yaml", write(tmp_path, text, "a folder/my space.yml")):
        spec = space.load(given, {})
        assert (spec.space, spec.learning.values()["seed"]) == (Path(given).stem, (5,))
    assert space.load(write(tmp_path, "space: other\n"), {}).space == "other"


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ("lora_smal", r"unknown space 'lora_smal' \(did you mean lora_small\?\); available: .*lora_small"),
        ("nowhere.yaml", r"space=nowhere\.yaml: no such file; the spaces that ship: .*lora_small"),
        ("/nowhere/at/all", r"space=/nowhere/at/all: no such file"),
    ],
)
def test_an_unknown_space(given: str, fault: str) -> None:
    with pytest.raises(UserError, match=fault) as error:
        space.load(given, {})
    assert len(error.value.faults) == 1


@pytest.mark.parametrize("text", ["", "- a\n", "text\n", "# only a comment\n"])
def test_a_file_that_holds_no_keys(tmp_path: Path, text: str) -> None:
    assert "is not a space: expected keys and values" in faults(tmp_path, text)[0]


# -- OmegaConf's grammar -----------------------------------------------------------------------------------------------


def test_dots_brackets_and_lists(tmp_path: Path) -> None:
    text = "learning:\n  seed: 1\n  learning_rate: [1e-3, 1e-4]\n"
    spec = load(
        tmp_path,
        text,
        "learning.seed=2",
        "learning[lora_rank]=[4,8]",
        "learning.learning_rate[1]=5e-4",
        "system={num_workers: [1, 2], micro_batch_size: 4}",
        "--budget.trials=3",
    )
    learning, system = spec.learning.values(), spec.system.values()
    assert (learning["seed"], learning["lora_rank"], learning["learning_rate"]) == ((2,), (4, 8), (1e-3, 5e-4))
    assert (system["num_workers"], system["micro_batch_size"], spec.budget.trials) == ((1, 2), (4,), 3)


def test_an_override_of_one_key_leaves_its_neighbours(tmp_path: Path) -> None:
    spec = load(tmp_path, "budget:\n  trials: 5\n  minutes: 2\n", "budget.trials=7")
    assert (spec.budget.trials, spec.budget.minutes) == (7, 2.0)


def test_interpolation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH_OF_TEST", "/scratch")
    text = "seed: 7\nlearning:\n  seed: ${seed}\nrun_name: s${seed}\nenv:\n  CACHE: ${oc.env:SCRATCH_OF_TEST}/c\n"
    spec = load(tmp_path, text, "seed=8", 'system.num_workers=[1,"${learning.seed}"]')
    assert (spec.seed, spec.learning.values()["seed"], spec.system.values()["num_workers"]) == (8, (8,), (1, 8))
    assert (spec.run_name, spec.env) == ("s8", {"CACHE": "/scratch/c"})


@pytest.mark.parametrize("value", ["${sed}", "${", "${oc.env:NOT_SET_IN_TEST}", "???"])
def test_an_interpolation_that_leads_nowhere_is_a_fault(tmp_path: Path, value: str) -> None:
    assert faults(tmp_path, "seed: 1\n", f"learning.seed={value}")[0].startswith("overrides: ")


@pytest.mark.parametrize(
    "value",
    [
        "epoch=9-step=1",
        "a,b",
        "a|b",
        "10%",
        "@x",
        "*",
        "测试",
        "naïve 🙂",
        "mlx5_0:1,mlx5_3:1",
        "a: b",
        "a #b",
        "- a",
        "!x",
        "&x",
        "?",
        "a'b",
        'a"b',
        "C:\\new",
        "(x)",
        "a{b}",
        "a]",
    ],
)
def test_values_with_special_characters(tmp_path: Path, value: str) -> None:
    spec = load(tmp_path, "seed: 1\n", f"run_name={value}", f"env.NCCL_IB_HCA={value}")
    assert (spec.run_name, spec.env) == (value, {"NCCL_IB_HCA": value})
    assert reread(spec) == spec
    assert [export["run_name"] for export in typed(spec)] == [value] * 2


@pytest.mark.parametrize("name", ["epoch=9-step=1.jsonl", "a b,c.jsonl", "数据 100%.jsonl", "@x|y*.jsonl"])
def test_data_with_special_characters(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, '{"text": "x"}\n', name)
    assert load(tmp_path, "seed: 1\n", f"data={path}").data == path
    assert load(tmp_path, f"data: '{path}'\n").data == path


@pytest.mark.parametrize(
    "argument", ["run_name=[a", "run_name={a", "run_name='a", "run_name=[a]b", "run_name=[a].jsonl"]
)
def test_the_error_shows_the_corrected_argument(tmp_path: Path, argument: str) -> None:
    (fault,) = faults(tmp_path, "seed: 1\n", argument)
    corrected = fault.rpartition(": ")[2]
    spec = load(tmp_path, "seed: 1\n", *shlex.split(corrected))
    assert spec.run_name == argument.partition("=")[2]


def test_every_argument_that_is_no_override_is_named(tmp_path: Path) -> None:
    found = faults(tmp_path, "seed: 1\n", "sede", "=3", "run_name=[a", "seed=2", "seed=3")
    assert [f.split(" ")[0] for f in found] == ["'sede'", "'=3'", "'run_name=[a':", "seed"]
    assert "did you mean seed?" in found[0]


# -- one meaning in a file, an override and an export ------------------------------------------------------------------


def three_ways(folder: Path, key: str, text: str) -> list[SweepSpec]:
    """Return the spec with key: text in the file, as an override, and in the file with an override of the same."""
    nested = text
    for part in reversed(key.split(".")):
        nested = f"{part}: {nested}" if nested == text else f"{part}:\n  {nested}"
    return [
        load(folder, f"{nested}\n"),
        load(folder, "seed: 0\n", f"{key}={text}"),
        load(folder, nested, f"{key}={text}"),
    ]


FLOATS = {
    "1e-4": 0.0001,
    "1E-4": 0.0001,
    "1.0e-4": 0.0001,
    "+1e-04": 0.0001,
    ".0001": 0.0001,
    "5e-05": 0.00005,
    "2e4": 20000.0,
    "1e5": 100000.0,
    "1": 1.0,
    "010": 10.0,
    "1_000": 1000.0,
    "1e-30": 1e-30,
    "12345678901234567": 12345678901234567.0,
}


@pytest.mark.parametrize("text", [*list(FLOATS)[:1], "1e5", "010", f"[{', '.join(FLOATS)}]"])
def test_floats(tmp_path: Path, text: str) -> None:
    values = [FLOATS[text]] if text in FLOATS else list(FLOATS.values())
    for spec in three_ways(tmp_path, "learning.learning_rate", text):
        assert list(spec.learning.values()["learning_rate"]) == values
        assert reread(spec) == spec
        for export in typed(spec):
            assert export["learning"]["learning_rate"] == values
            assert {type(v) for v in export["learning"]["learning_rate"]} == {float}
        candidates = enumerate_candidates(spec, make_context())
        trees = [trial_tree(spec, c, "cpu", None) for c in candidates]
        rates = [from_tree(TrialConfig, tree).learning.learning_rate for tree in trees]
        assert rates == list(dict.fromkeys(values))


@pytest.mark.parametrize(("text", "value"), [("010", 10), ("8_000", 8000), ("+7", 7)])
def test_whole_numbers(tmp_path: Path, text: str, value: int) -> None:
    for spec in three_ways(tmp_path, "seed", text):
        assert spec.seed == value
        assert reread(spec) == spec
        assert [(export["seed"], type(export["seed"])) for export in typed(spec)] == [(value, int)] * 2


@pytest.mark.parametrize("text", ["no", "010", "1e5"])
@pytest.mark.parametrize("key", ["run_name", "model_revision"])
def test_strings_stay_strings(tmp_path: Path, key: str, text: str) -> None:
    for spec in three_ways(tmp_path, key, text):
        assert getattr(spec, key) == text
        assert reread(spec) == spec
        assert [export[key] for export in typed(spec)] == [text] * 2


def test_every_word_that_yaml_reads_as_something_else(tmp_path: Path) -> None:
    words = ["no", "NO", "off", "on", "yes", "true", "False", "010", "12:30", "1_000", "2024-01-01", "1e5", "1e-4"]
    words += ["1.0", "0x1F", "0o17", "+1", ".5", "1.", ".inf", ".nan", "=", "<<", "0b1", "190:20:30", "1E4", "-1e3"]
    env = {f"W{n}": word for n, word in enumerate((*words, "y", "n", "N", "Infinity", "NaN", "nan", "1e", "e5"))}
    lines = "".join(f"  {name}: {word}\n" for name, word in env.items())
    in_file = load(tmp_path, f"env:\n{lines}")
    overridden = load(tmp_path, "seed: 0\n", *(f"env.{name}={word}" for name, word in env.items()))
    assert in_file.env == overridden.env == env
    assert reread(in_file) == in_file
    assert [export["env"] for export in typed(in_file)] == [env] * 2


@pytest.mark.parametrize("text", ["null", "~", "", "Null"])
def test_quoted_nothing_is_a_string(tmp_path: Path, text: str) -> None:
    for spec in three_ways(tmp_path, "run_name", f'"{text}"'):
        assert spec.run_name == text
        assert reread(spec) == spec
        assert [export["run_name"] for export in typed(spec)] == [text] * 2


def test_an_export_is_complete(tmp_path: Path) -> None:
    spec = load(tmp_path, "seed: 3\n", "learning.adapter=[full,lora]", "env.A=no", "target_eval_loss=1e-1")
    assert reread(spec) == spec
    exported = yaml.safe_load(space.to_yaml(spec))
    assert set(exported) == {key.split(".")[0] for key in keys()}
    assert set(exported["learning"]) == {key.split(".")[1] for key in keys() if key.startswith("learning.")}


# -- unset, duplicate, frozen ------------------------------------------------------------------------------------------


def test_keys_with_no_value_are_unset(tmp_path: Path) -> None:
    """The default holds, as if the line were not there; in a section, in a section's place, and as an override."""
    default = load(tmp_path, "seed: 0\n")
    text = "seed:\nsearcher:\nrun_name:\nobjectives: null\nenv: ~\nlearning:\nsystem:\n  num_workers:\n"
    assert load(tmp_path, f"{text}budget:\n  trials:\n") == default
    assert load(tmp_path, "seed: 5\nepochs: 3\n", "seed=", "epochs=null", "learning.lora_rank=", "system=~") == default


def test_a_name_with_no_value_is_the_files(tmp_path: Path) -> None:
    assert load(tmp_path, "space:\nseed: 1\n").space == "mine"


def test_an_unknown_key_with_no_value_is_still_unknown(tmp_path: Path) -> None:
    found = faults(tmp_path, "sede:\nlearning:\n  lora_rnk:\n")
    assert sorted(f.split("=")[0] for f in found) == ["unknown key learning.lora_rnk", "unknown key sede"]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("learning:\n  learning_rate: [1e-3, null]\n", "learning.learning_rate"),
        ("learning:\n  lora_rank: [4, ]\n  learning_rate: [~]\n", "learning.learning_rate"),
        ("objectives: [null]\n", "objectives"),
        ("env:\n  A:\n", "env.A"),
    ],
)
def test_nothing_where_a_value_is_needed_is_a_fault(tmp_path: Path, text: str, key: str) -> None:
    (fault,) = faults(tmp_path, text)
    assert fault.startswith(f"{key}=null: expected ")


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("seed: 1\nmodel: embedded\nseed: 2\n", 3, "seed"),
        ("learning:\n  seed: 1\n  seed: 1\n", 3, "seed"),
        ('seed: 1\n"seed": 2\n', 2, "seed"),
    ],
)
def test_duplicate_keys_in_a_file(tmp_path: Path, text: str, line: int, key: str) -> None:
    (fault,) = faults(tmp_path, text)
    assert fault.endswith(f"mine.yaml line {line}: duplicate key '{key}'")


@pytest.mark.parametrize(
    "arguments",
    [("seed=1", "seed=2"), ("seed=1", "seed=1"), ("seed=1", "--seed=2"), ("learning.seed=1", "learning[seed]=2")],
)
def test_duplicate_keys_on_the_command_line(tmp_path: Path, arguments: Sequence[str]) -> None:
    (fault,) = faults(tmp_path, "model: embedded\n", *arguments)
    assert fault == f"{arguments[0].split('=')[0]} is given twice: {arguments[0]} and {arguments[1]}"


def test_a_duplicate_key_inside_an_override(tmp_path: Path) -> None:
    assert len(faults(tmp_path, "model: embedded\n", "learning={seed: 1, seed: 2}")) == 1


def test_a_spec_is_frozen() -> None:
    spec = make_spec()
    for owner, name in ((spec, "seed"), (spec.learning, "seed"), (spec.system, "num_workers"), (spec.budget, "trials")):
        with pytest.raises(ValueError, match="frozen"):
            setattr(owner, name, 1)


# -- faults ------------------------------------------------------------------------------------------------------------


def test_all_faults_at_once(tmp_path: Path) -> None:
    text = """\
modle: x
searcher: gridd
objectives: [peak_memory_gib, peak_memroy_gib]
learning:
  lora_rnk: 3
  adapter: lorra
  lora_rank: [4, 0]
  learning_rate: [1e-4, fast]
system:
  num_workers: 1.5
lerning:
  seed: 3
epochs: 0
"""
    arguments = ("learning_rate=1e-4", "system.micro_batch=3", "budget.trial=3", "device=gpu", "eval_fraction=0.95")
    expected = [
        "unknown key modle=x (did you mean model?)",
        "searcher=gridd: unknown (did you mean grid?); allowed: factored, grid",
        "objectives: unknown objective 'peak_memroy_gib' (did you mean peak_memory_gib?); allowed: ",
        "unknown key learning.lora_rnk=3 (did you mean learning.lora_rank?)",
        "learning.adapter=lorra: allowed: full, lora, qlora (did you mean lora?)",
        "learning.lora_rank=0: should be greater than or equal to 1",
        "learning.learning_rate=fast: expected a number",
        "system.num_workers=1.5: expected a whole number",
        "unknown key lerning.seed=3 (did you mean learning.seed?)",
        "epochs=0: should be greater than or equal to 1",
        "unknown key learning_rate=1e-4 (did you mean learning.learning_rate?)",
        "unknown key system.micro_batch=3 (did you mean system.micro_batch_size?)",
        "unknown key budget.trial=3 (did you mean budget.trials?)",
        "device=gpu: allowed: auto, cpu, cuda",
        "eval_fraction=0.95: should be less than or equal to 0.9",
    ]
    found = faults(tmp_path, text, *arguments)
    for sentence in expected:
        assert [f for f in found if f.startswith(sentence)], sentence
    assert len(found) == len(expected)


@pytest.mark.parametrize(
    ("argument", "fault"),
    [
        ("learning.learning_rate=0", "learning.learning_rate=0: should be greater than 0"),
        ("learning.learning_rate=nan", "learning.learning_rate=nan: expected a finite number"),
        ("target_eval_loss=inf", "target_eval_loss=inf: expected a finite number"),
        ("learning.lora_dropout=[0,1]", "learning.lora_dropout=1: should be less than or equal to 0.99"),
        ("learning=3", "learning=3: expected keys and values"),
        ("budget=[1]", 'budget=["1"]: expected keys and values'),
        ("env=x", "env=x: expected keys and values"),
        ("model.x=3", 'model={"x": "3"}: expected text'),
        ("system.strategy=dpd", "system.strategy=dpd: allowed: "),
        ("objectives=speed", "objectives: unknown objective 'speed'"),
        ("objectives=[]", "objectives=[]: give at least one value"),
        ("system.num_workers=[]", "system.num_workers=[]: give at least one value"),
        ("seed=true", "seed=true: expected a whole number"),
        ("space=a/b", "space=a/b: string should match pattern"),
        ("lerning={a: 1, b: 2}", 'unknown key lerning={"a": "1", "b": "2"} (did you mean learning'),
    ],
)
def test_one_fault(tmp_path: Path, argument: str, fault: str) -> None:
    (found,) = faults(tmp_path, "model: embedded\n", argument)
    assert found.startswith(fault)


def test_broken_yaml_names_its_line(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, "seed: 1\nlearning: [\n")
    assert "mine.yaml line 3: " in fault


# -- paths -------------------------------------------------------------------------------------------------------------


def test_paths_resolve_beside_the_file_or_where_the_command_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaces, here = tmp_path / "my spaces", tmp_path / "here"
    for folder in (spaces, here):
        for name in ("d.jsonl", "e.jsonl", "m/config.json"):
            write(folder, "{}", name)
        write(folder, (space.SPACES / "clusters" / "l40sx4.yaml").read_text(), "c.yaml")
    monkeypatch.chdir(here)
    text = "data: d.jsonl\neval_data: ./e.jsonl\nmodel: ./m\ncluster: c.yaml\n"
    spec = load(spaces, text)
    assert [spec.data, spec.eval_data, spec.model, spec.cluster] == [
        str(spaces / name) for name in ("d.jsonl", "e.jsonl", "m", "c.yaml")
    ]
    spec = load(spaces, text, "data=d.jsonl", "eval_data=../here/e.jsonl", "model=m", "cluster=c.yaml")
    assert [spec.data, spec.eval_data, spec.model, spec.cluster] == [
        str(here / name) for name in ("d.jsonl", "e.jsonl", "m", "c.yaml")
    ]
    assert reread(spec) == spec  # whatever the folder it is read in
    assert load(spaces, "runs_dir: out\n").runs_dir == str(here / "out")


def test_names_are_not_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "embedded").mkdir()
    (tmp_path / "h100x8").mkdir()
    monkeypatch.chdir(tmp_path)
    spec = load(tmp_path, "model: embedded\ndata: embedded\ncluster: h100x8\n")
    assert (spec.model, spec.data, spec.cluster) == ("embedded", "embedded", "h100x8")
    spec = load(tmp_path, "model: org/name\ndata: org/name:train\n")
    assert (spec.model, spec.data) == ("org/name", "org/name:train")


def test_a_target_belongs_to_its_own_model_and_data(tmp_path: Path) -> None:
    assert load(tmp_path, "target_eval_loss: 2.5\n").target_eval_loss == 2.5
    assert load(tmp_path, "target_eval_loss: 2.5\n", "model=org/name").target_eval_loss is None
    assert load(tmp_path, "target_eval_loss: 2.5\n", "model=org/name", "target_eval_loss=2").target_eval_loss == 2.0


# -- what ships --------------------------------------------------------------------------------------------------------


def test_the_schema_file_is_current() -> None:
    path = SPACES / "schema.json"
    assert path.is_file(), "run: make schema"
    assert path.read_text(encoding="utf-8") == space.schema(), "run: make schema"


def test_the_schema_is_a_schema() -> None:
    document = json.loads(space.schema())
    jsonschema.Draft202012Validator.check_schema(document)
    validator = jsonschema.Draft202012Validator(document)
    assert validator.is_valid({"learning": {"learning_rate": 1e-4, "seed": [0, 1]}, "searcher": "grid"})
    for wrong in (
        {"modle": "x"},
        {"learning": {"lora_rnk": 1}},
        {"searcher": "gird"},
        {"objectives": ["speed"]},
        {"learning": {"learning_rate": "1e-4"}},
        {"learning": {"lora_rank": [4, 0]}},
        {"system": {"strategy": "dpd"}},
    ):
        assert not validator.is_valid(wrong), wrong


def test_every_key_is_documented() -> None:
    """Editors show these; so does --help."""
    assert [key for key, (_, _, help_text) in keys().items() if not help_text] == []


@each_space
def test_a_shipped_space_is_valid_to_an_editor(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "# yaml-language-server: $schema=schema.json" in text.splitlines()
    validator = jsonschema.Draft202012Validator(json.loads(space.schema()))
    assert [f"{e.json_path}: {e.message}" for e in validator.iter_errors(read_1_2(text))] == []


@each_space
def test_a_shipped_space_loads_and_has_something_to_compare(path: Path) -> None:
    spec = space.load(path.stem, {})
    assert spec.space == path.stem
    assert reread(spec) == spec
    assert sum(c.legal for c in enumerate_candidates(spec, make_context("cuda"))) >= 2


def shape_of(name: str) -> ModelShape | None:
    """Return the shape of a space's model, from its preset."""
    if name == "embedded":
        return model.shape(name)
    return ModelShape.from_yaml(SPACES / "models" / f"{name.rpartition('/')[2].lower()}.yaml")


@each_space
def test_each_axis_of_a_shipped_space_has_a_choice(path: Path) -> None:
    """Of every axis with several values at least two are in legal candidates, and no value is in none."""
    spec = space.load(path.stem, {})
    device = "cpu" if spec.model == "embedded" else "cuda"
    legal = [c for c in enumerate_candidates(spec, make_context(device, shape=shape_of(spec.model))) if c.legal]
    for name, values in {**spec.learning.values(), **spec.system.values()}.items():
        found = {c.flat[name] for c in legal if name in c.flat}
        if len(values) > 1:
            assert found == set(values), name


@each_space
def test_a_shipped_space_says_how_to_run_it_and_what_to_expect(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    header = lines[: next(n for n, line in enumerate(lines) if not line.startswith("#"))]
    for word in ("Run:", "Takes:", "Expect:"):
        assert any(line.startswith(f"# {word}") for line in header), word
    assert f"space={path.stem}" in next(line for line in header if line.startswith("# Run:"))


# -- clusters ----------------------------------------------------------------------------------------------------------


def test_the_presets_are_found() -> None:
    assert list(presets()) == CLUSTERS


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_preset_loads_with_the_numbers_of_its_file(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.model_dump() == yaml.safe_load((SPACES / "clusters" / f"{name}.yaml").read_text(encoding="utf-8"))


def test_an_unknown_cluster() -> None:
    with pytest.raises(UserError, match=r"cluster=h100x9: unknown \(did you mean h100x8\?\); available: .*h200x8"):
        load_cluster("h100x9")


def test_a_cluster_of_ones_own(tmp_path: Path) -> None:
    preset = (SPACES / "clusters" / "h100x8.yaml").read_text(encoding="utf-8")
    path = write(tmp_path, preset.replace("price_per_gpu_hour: 6.88", "price_per_gpu_hour: 2.5"))
    assert load_cluster(path).price_per_gpu_hour == 2.5
    broken = write(tmp_path, preset.replace("nodes: 1", "nodes: 0").replace("bf16:", "bf61:"))
    with pytest.raises(UserError) as error:
        load_cluster(broken)
    assert sorted(f.removeprefix(f"{broken}: ") for f in error.value.faults) == [
        "nodes=0: should be greater than or equal to 1",
        "peak_flops.bf16 is missing",
        "unknown key peak_flops.bf61=9.894e+14 (did you mean peak_flops.bf16?)",
    ]


@pytest.mark.parametrize(
    ("tree", "price", "said"),
    [
        ({"price_per_gpu_hour": "3"}, 3.0, None),
        ({"price_per_gpu_hour": "0"}, 0.0, None),
        ({"price_per_gpu_hour": "3", "cluster": "h100x8"}, 3.0, None),
        ({"cluster": "h100x8"}, 6.88, "example price of cluster=h100x8"),
        ({}, 1.0, "counted at 1 USD per GPU-hour"),
    ],
)
def test_the_price_and_where_it_is_from(tree: dict[str, str], price: float, said: str | None) -> None:
    notes: list[str] = []
    assert price_per_gpu_hour(make_spec(tree), notes.append) == price
    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]
