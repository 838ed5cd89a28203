"""YAML whose scalars stay as typed: read by this project, by YAML 1.1 and written for both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trainers import yaml_text
from trainers.errors import UserError

TEXTS = ["no", "010", "12:30", "1e5", "2024-01-01", "1_000", "null", "~", "", "0o17", "1.", ".5", "0x1F", "yes", "a: b"]


@pytest.mark.parametrize("text", ["no", "010", "12:30", "1e5", "2024-01-01", "1_000", "1e-4", "true", "0x10", ".5"])
def test_plain_scalars_stay_text(text: str) -> None:
    assert yaml_text.parse(f"key: {text}", "x") == {"key": text}


@pytest.mark.parametrize("text", ["", "~", "null", "Null", "NULL"])
def test_an_empty_value_is_none_and_a_quoted_one_is_text(text: str) -> None:
    assert yaml_text.parse(f"key: {text}", "x") == {"key": None}
    assert yaml_text.parse(f"key: '{text}'", "x") == {"key": text}


def test_structure_is_kept() -> None:
    tree = yaml_text.parse("a: [1, no, 1e5]\nb:\n  - c: 010\n", "x")
    assert tree == {"a": ["1", "no", "1e5"], "b": [{"c": "010"}]}
    assert yaml_text.parse("", "x") is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\nb: 2\na: 3\n", "file.yaml line 3: duplicate key 'a'"),
        ("a:\n  b: 1\n  b: 1\n", "file.yaml line 3: duplicate key 'b'"),
        ("a: 1\n1: x\n'1': y\n", "file.yaml line 3: duplicate key '1'"),
        ("[a]: 1\n", "file.yaml line 1: a key must be plain text"),
        ("a: 1\nb: [1, 2\n", "file.yaml line 3: "),
    ],
)
def test_faults_name_the_line(text: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        yaml_text.parse(text, "file.yaml")
    (fault,) = caught.value.faults
    assert fault.startswith(told)


@pytest.mark.parametrize("text", TEXTS)
def test_dumped_text_is_text_to_yaml_1_1_and_to_us(text: str) -> None:
    written = yaml_text.dump({"key": text, "list": [text]})
    assert yaml.safe_load(written) == {"key": text, "list": [text]}
    assert yaml_text.parse(written, "x") == {"key": text, "list": [text]}


@pytest.mark.parametrize("value", [1e-4, 5e-05, 2e4, 1e20, 0.1, 1.0, 3, -7, 0])
def test_dumped_numbers_keep_their_type_in_yaml_1_1_and_their_value_with_us(value: float) -> None:
    written = yaml_text.dump({"key": value})
    loaded = yaml.safe_load(written)["key"]
    assert (loaded, type(loaded)) == (value, type(value))
    assert type(value)(yaml_text.parse(written, "x")["key"]) == value


@pytest.mark.parametrize(("value", "text"), [(True, "true"), (False, "false"), (None, None)])
def test_dumped_words(value: Any, text: str | None) -> None:
    written = yaml_text.dump({"key": value})
    assert yaml.safe_load(written) == {"key": value}
    assert yaml_text.parse(written, "x") == {"key": text}


def test_a_repeated_object_is_written_twice_and_not_as_an_alias() -> None:
    shared = {"a": 1}
    assert "&" not in yaml_text.dump({"x": shared, "y": shared})


def test_files_that_cannot_be_read_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*missing\.yaml"):
        yaml_text.read(tmp_path / "missing.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(UserError, match=r"cannot read .*latin\.yaml"):
        yaml_text.read(tmp_path / "latin.yaml")
