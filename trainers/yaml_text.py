"""YAML in which a value keeps its text until a typed field reads it.

`no`, `010`, `12:30` and `1e5` mean different things to YAML 1.1, YAML 1.2 and a person. Here every scalar is loaded
as the text that was typed; a float field reads `1e-4` as 0.0001, a string field keeps `010` and `no`. Files, command
line overrides and exports go through these functions, so they agree.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from trainers.errors import UserError

Tree = Any  # None, str, or nested lists and str-keyed dicts of these: what a YAML document of text holds

_NULL = re.compile(r"(?:~|null|Null|NULL|)\Z")
# Scalars that a YAML 1.2 reader resolves but PyYAML's 1.1 rules leave alone: quoted on writing, so both read a string.
_YAML_1_2_NUMBER = re.compile(r"[-+]?(?:0o[0-7]+|(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?)\Z")


class _TextLoader(yaml.BaseLoader):
    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        if node.style is None and _NULL.match(node.value):
            return None
        return super().construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            seen.add(key.value)
        return {str(k.value): self.construct_object(v, deep=deep) for k, v in node.value}


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "'" if _YAML_1_2_NUMBER.match(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_str)


def parse(text: str, source: str) -> Tree:
    """Parse one YAML document of text. Raises UserError with the line when it is not valid YAML."""
    try:
        return yaml.load(text, _TextLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"{source}{at}: {getattr(error, 'problem', None) or error}") from None


def read(path: Path) -> Tree:
    """Read a YAML file of text. Raises UserError when it cannot be read or parsed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    return parse(text, str(path))


def dump(value: Any) -> str:
    """Write plain data (typed scalars, lists, dicts) as YAML that YAML 1.1, YAML 1.2 and `parse` read alike."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
