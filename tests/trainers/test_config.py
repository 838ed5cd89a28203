"""Configs from text and from typed values: what is accepted, refused, absent and written back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainers import yaml_text
from trainers.config import LearningConfig, RunConfig, SystemConfig, TrialConfig, from_tree, load, to_tree
from trainers.errors import UserError
from trainers.strategies import STRATEGIES, Option, Strategy


def read(text: str) -> TrialConfig:
    return from_tree(TrialConfig, yaml_text.parse(text, "test"))


def faults(text: str) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        read(text)
    return caught.value.faults


@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 0.0001), ("5e-05", 0.00005), ("2e4", 20000.0), ("1E-4", 0.0001), ("3", 3.0)]
)
def test_a_float_field_reads_every_way_to_write_a_number(text: str, value: float) -> None:
    found = read(f"learning: {{learning_rate: {text}}}").learning.learning_rate
    assert (found, type(found)) == (value, float)


@pytest.mark.parametrize("text", ["no", "010", "12:30", "1e5", "2024-01-01", "1_000"])
def test_a_string_field_keeps_what_was_typed(text: str) -> None:
    config = read(f"model: {text}\nmodel_revision: {text}")
    assert (config.model, config.model_revision) == (text, text)
    written = yaml_text.dump(to_tree(config))
    assert yaml.safe_load(written)["model"] == text
    assert read(written) == config


@pytest.mark.parametrize(("text", "value"), [("16", 16), ("8_000", 8000), ("010", 10)])
def test_an_int_field_reads_digits(text: str, value: int) -> None:
    assert read(f"run: {{max_tokens: {text}}}").run.max_tokens == value


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("learning: {lora_rank: 8.5}", "learning.lora_rank='8.5': expected a whole number"),
        ("learning: {lora_rank: 1e3}", "learning.lora_rank='1e3': expected a whole number"),
        ("learning: {lora_rank: 0}", "learning.lora_rank='0': must be at least 1"),
        ("learning: {learning_rate: 0}", "learning.learning_rate='0': must be above 0"),
        ("learning: {learning_rate: fast}", "learning.learning_rate='fast': expected a number"),
        ("learning: {learning_rate: .nan}", "learning.learning_rate='.nan': expected a number"),
        ("learning: {learning_rate: nan}", "learning.learning_rate='nan': expected a finite number"),
        ("learning: {learning_rate: [1, 2]}", "learning.learning_rate=['1', '2']: expected one float"),
        ("learning: {lora_dropout: 1.0}", "learning.lora_dropout='1.0': must be at most 0.99"),
        ("learning: {lr_schedule: cosin}", "allowed: constant, linear, cosine (did you mean cosine?)"),
        ("learning: {adapter: 3}", "learning.adapter='3': allowed: full, lora"),
        ("learning: 3", "learning: expected keys and values, got '3'"),
        ("system: {strategy: dpd}", "unknown strategy 'dpd' (did you mean ddp?); available: "),
    ],
)
def test_wrong_values_are_told_with_the_rule(text: str, told: str) -> None:
    (fault,) = faults(text)
    assert told in fault


def test_all_faults_come_at_once_with_the_nearest_name() -> None:
    found = faults(
        "modle: x\nlearning: {lerning_rate: 1, lora_rank: none, max_grad_norm: -1}\nrun: {zzz: 1}\n"
        "system: {micro_batchsize: 2}\n"
    )
    assert found == (
        "unknown key modle (did you mean model?)",
        "unknown key learning.lerning_rate (did you mean learning.learning_rate?)",
        "learning.lora_rank='none': expected a whole number",
        "learning.max_grad_norm='-1': must be at least 0",
        f"unknown key run.zzz; there are: {', '.join(f.name for f in dataclasses.fields(RunConfig))}",
        "unknown key system.micro_batchsize for strategy ddp (did you mean system.micro_batch_size?)",
    )


def test_a_file_of_something_else_is_refused() -> None:
    assert faults("- a\n- b\n") == ("the file: expected keys and values, got ['a', 'b']",)


def test_an_empty_value_is_unset() -> None:
    config = read(
        "model:\nmodel_revision: ~\nlearning:\n  learning_rate:\n  lora_rank: null\nsystem: {strategy: }\nrun:\n"
    )
    assert config == TrialConfig()


def test_fields_that_do_not_apply_are_absent() -> None:
    full = to_tree(LearningConfig(adapter="full"))
    lora = to_tree(LearningConfig(adapter="lora"))
    assert set(lora) - set(full) == {"lora_rank", "lora_alpha", "lora_dropout", "lora_targets"}
    assert set(full) < set(lora) == {f.name for f in dataclasses.fields(LearningConfig)}


@pytest.mark.parametrize(
    "config",
    [
        TrialConfig(),
        TrialConfig(
            model="010",
            learning=LearningConfig(adapter="full", learning_rate=5e-05, lr_schedule="cosine"),
            system=SystemConfig(num_workers=2, micro_batch_size=4, attn_implementation="eager"),
            run=RunConfig(max_tokens=20_000, target_eval_loss=1.5, output_dir="no"),
        ),
    ],
)
def test_round_trips(config: TrialConfig, tmp_path: Path) -> None:
    tree = to_tree(config)
    assert from_tree(TrialConfig, tree) == config
    assert yaml.safe_load(yaml_text.dump(tree)) == tree
    path = tmp_path / "config.yaml"
    path.write_text(yaml_text.dump(tree))
    assert load(path) == config


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    """It would train the defaults, which nobody asked for."""
    (tmp_path / "config.yaml").write_text("# nothing yet\n")
    with pytest.raises(UserError, match=r"config\.yaml is empty; a config needs at least one key"):
        load(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").write_text("model: embedded\n")
    assert load(tmp_path / "config.yaml") == TrialConfig()


@pytest.fixture
def with_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ddp options of its own for one test."""
    options = (
        Option("buckets", int, 25, "…"),
        Option("overlap", bool, True, "…"),
        Option("note", str, "x", "…"),
        Option("mode", str, "a", "…", ("a", "b")),
    )
    monkeypatch.setattr(type(STRATEGIES["ddp"]), "options", options)


@pytest.mark.usefixtures("with_options")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", {"buckets": 25, "overlap": True, "note": "x", "mode": "a"}),
        ("buckets: 010, overlap: no, note: no, mode: b", {"buckets": 10, "overlap": False, "note": "no", "mode": "b"}),
        ("buckets: , overlap: , note: , mode: ", {"buckets": 25, "overlap": True, "note": "x", "mode": "a"}),
    ],
)
def test_a_strategys_options_lie_flat_beside_its_name(given: str, expected: dict[str, Any]) -> None:
    config = read(f"system: {{strategy: ddp, {given}}}")
    assert config.system.options == expected
    tree = to_tree(config)["system"]
    assert "options" not in tree
    assert {name: tree[name] for name in expected} == expected
    assert from_tree(TrialConfig, to_tree(config)) == config


@pytest.mark.usefixtures("with_options")
def test_a_strategys_options_are_typed_and_named() -> None:
    assert faults("system: {buckets: x, overlap: perhaps, bucket: 1, mode: c}") == (
        "system.buckets='x': expected a whole number",
        "system.overlap='perhaps': expected true or false",
        "unknown key system.bucket for strategy ddp (did you mean system.buckets?)",
        "system.mode='c': allowed: a, b",
    )


def test_no_option_of_a_strategy_hides_a_field() -> None:
    taken = {f.name for f in dataclasses.fields(SystemConfig)}
    for name in STRATEGIES:
        member: Strategy = STRATEGIES[name]
        assert not taken & {option.name for option in member.options}


def test_a_misplaced_key_is_shown_its_place_and_all_faults_are_told_at_once() -> None:
    tree = {
        "measure_seconds": 3,
        "learning": {"zero_stage": 2, "micro_batch_size": 2, "lora_rnk": 4},
        "system": {"strategy": "fdsp", "micro_batch_siz": 3},
    }
    with pytest.raises(UserError) as caught:
        from_tree(TrialConfig, tree)
    told = [fault.split(";")[0] for fault in caught.value.faults]
    assert told == [
        "unknown key measure_seconds (did you mean run.measure_seconds?)",
        "unknown key learning.zero_stage (did you mean system.zero_stage? it belongs to strategy=zero)",
        "unknown key learning.micro_batch_size (did you mean system.micro_batch_size?)",
        "unknown key learning.lora_rnk (did you mean learning.lora_rank?)",
        "system.strategy: unknown strategy 'fdsp' (did you mean fsdp2?)",
        "unknown key system.micro_batch_siz (did you mean system.micro_batch_size?)",
    ]


@pytest.mark.parametrize("given", ["abc", "1", "1:2:3", "1:2,", "1:x"])
def test_pairs_of_numbers_are_read_or_refused(given: str) -> None:
    form = "expected two numbers with a colon between them, comma separated, as in 1000:2.5,2000:2.1"
    assert faults(f"run: {{give_up: '{given}', dominated_by: '1.5:2,3:0.5'}}") == (f"run.give_up='{given}': {form}",)
    assert read("run: {dominated_by: '1.5:2,3:0.5'}").run.rivals == ((1.5, 2.0), (3.0, 0.5))
