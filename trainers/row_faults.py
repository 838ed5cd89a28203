"""Rows that cannot be used: why, and the one error or note that tells of all of them. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from trainers.errors import UserError

OnError = Literal["refuse", "drop"]

Found = list[tuple[int, object]]
"""What a source holds: line or row number, and the record or the RowFault of reading it."""

MAX_TEXTS = 5
MAX_LINES = 5


@dataclass(frozen=True)
class RowFault:
    """Why one row cannot be used: `kind` groups faults, `text` is the sentence without file and line."""

    line: int
    kind: str
    text: str


class Refused(Exception):
    """A row is refused; raised with the kind and the sentence of its RowFault."""


def settle(faults: Sequence[RowFault], total: int, source: str, unit: str, on_error: OnError) -> list[str]:
    """Return a note per kind of fault, or raise UserError: with "refuse", or if no row is left.

    It tells first how many rows are refused and what to do, then the first few sentences, each once with its lines.
    """
    if not faults:
        return []
    kinds = _lines_by((fault.kind, fault.line) for fault in faults)
    counts = [f"{kind} in {count_rows(len(lines))} ({name_lines(lines, unit)})" for kind, lines in kinds.items()]
    left = total - len(faults)
    if on_error == "drop" and left > 0:
        return [f"dropped: {count}" for count in counts]
    remedy = "data_on_error=drop leaves them out" if left else "no row is left"
    told = [f"{source}: {len(faults)} of {total} rows are refused: {', '.join(counts)}; {remedy}"]
    texts = list(_lines_by((fault.text, fault.line) for fault in faults).items())
    told += [f"{source}, {name_lines(lines, unit)}: {text}" for text, lines in texts[:MAX_TEXTS]]
    if more := sum(len(lines) for _, lines in texts[MAX_TEXTS:]):
        told.append(f"{source}: and {count_rows(more)} more with other faults")
    raise UserError(told)


def _lines_by(found: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    lines: dict[str, list[int]] = {}
    for key, line in found:
        lines.setdefault(key, []).append(line)
    return lines


def count_rows(count: int) -> str:
    """Return "1 row" or "3,000 rows"."""
    return f"{count:,} row{'' if count == 1 else 's'}"


def name_lines(lines: Sequence[int], unit: str) -> str:
    """Return "line 3" or "lines 3, 8, 9", the first five and the number of the others."""
    named = ", ".join(map(str, lines[:MAX_LINES]))
    more = f" and {len(lines) - MAX_LINES} more" if len(lines) > MAX_LINES else ""
    return f"{unit}{'s' if len(lines) > 1 else ''} {named}{more}"
