"""Rows that cannot be used: why, and the one error or note that tells of all of them. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainers.errors import UserError

OnError = Literal["refuse", "drop"]

Found = list[tuple[int, object]]
"""What a source holds: line or row number, and the record or the Fault of reading it."""

MAX_FAULTS = 20
MAX_LINES = 5


@dataclass(frozen=True)
class Fault:
    """Why one row cannot be used: `kind` groups faults, `text` is the sentence without file and line."""

    line: int
    kind: str
    text: str


class Refused(Exception):
    """A row is refused; raised with the kind and the sentence of its Fault."""


def settle(faults: Sequence[Fault], total: int, source: str, unit: str, on_error: OnError) -> list[str]:
    """Return a note per kind of fault, or raise all of them as one UserError: with "refuse", or if no row is left."""
    if not faults:
        return []
    kinds: dict[str, list[int]] = {}
    for fault in faults:
        kinds.setdefault(fault.kind, []).append(fault.line)
    counts = [f"{kind} in {count_rows(len(lines))} ({name_lines(lines, unit)})" for kind, lines in kinds.items()]
    left = total - len(faults)
    if on_error == "drop" and left > 0:
        return [f"dropped: {count}" for count in counts]
    told = [f"{source}, {unit} {fault.line}: {fault.text}" for fault in faults[:MAX_FAULTS]]
    if len(faults) > MAX_FAULTS:
        told.append(f"{source}: and {len(faults) - MAX_FAULTS} more faults")
    remedy = "data_on_error=drop leaves them out" if left else "no row is left"
    told.append(f"{source}: {len(faults)} of {total} rows are refused: {', '.join(counts)}; {remedy}")
    raise UserError(told)


def count_rows(count: int) -> str:
    """Return "1 row" or "3 rows"."""
    return f"{count} row{'' if count == 1 else 's'}"


def name_lines(lines: Sequence[int], unit: str) -> str:
    """Return "line 3" or "lines 3, 8, 9", the first five and the number of the others."""
    named = ", ".join(map(str, lines[:MAX_LINES]))
    more = f" and {len(lines) - MAX_LINES} more" if len(lines) > MAX_LINES else ""
    return f"{unit}{'s' if len(lines) > 1 else ''} {named}{more}"
