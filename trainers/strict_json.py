"""JSON lines and JSON arrays without leniency: nothing is repaired, a flawed row is a RowFault in its place.

Standard library only.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

from trainers.errors import UserError
from trainers.row_faults import Found, Refused, RowFault


def read_lines(data: bytes, source: str, notes: list[str]) -> Found:
    """Return the objects of JSON lines; blank lines are skipped, with a note."""
    # Only b"\n" ends a line: str.splitlines would also cut at U+2028, which JSON allows inside a string.
    lines = list(enumerate(data.split(b"\n"), start=1))
    filled = [(number, line) for number, line in lines if line.strip()]
    blank = len(lines) - len(filled) - (not lines[-1][1])
    if blank:
        notes.append(f"{blank} blank line{'s' if blank > 1 else ''} skipped")
    found: Found = []
    parser = _Parser()
    for number, line in filled:
        try:
            found.append((number, parser.line(line)))
        except Refused as refused:
            found.append((number, RowFault(number, *refused.args)))
    faults = [item for _, item in found if isinstance(item, RowFault)]
    if faults and len(faults) == len(found) and all(fault.kind == "not JSON" for fault in faults):
        first = f"{source}, line {faults[0].line}: {faults[0].text}"
        raise UserError(f"{first}; no line of the file is a row: one JSON object a line, or a JSON array, is needed")
    if faults and faults[-1].kind == "not JSON" and faults[-1].line == lines[-1][0]:
        last = faults[-1]
        found[-1] = (last.line, RowFault(last.line, last.kind, f"{last.text}; the file ends here, perhaps cut off"))
    return found


def read_array(data: bytes, source: str) -> Found:
    """Return the elements of one JSON array."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        at = error.start - data.rfind(b"\n", 0, error.start)
        raise UserError(f"{source}, line {line}: {_bad_byte(data[error.start], at)}") from None
    parser = _Parser()
    try:
        return [(number, item) for number, item in enumerate(parser.elements(text), start=1)]
    except Refused as refused:
        raise UserError(f"{source}, a JSON array: {refused.args[1]}") from None


def _bad_byte(value: int, position: int) -> str:
    return f"byte {position} of the line, 0x{value:02X}, is not UTF-8"


class _Parser:
    """JSON without the leniency of Python's: duplicate keys, NaN and Infinity refuse the row that holds them."""

    def __init__(self) -> None:
        self._flaw: Refused | None = None
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object, parse_constant=self._constant)

    def line(self, line: bytes) -> object:
        """Return the value of one line; Refused if it is none."""
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise Refused("invalid UTF-8", _bad_byte(line[error.start], error.start + 1)) from None
        value, end = self._value(text, len(text) - len(text.lstrip()))
        if text[end:].strip():
            raise Refused("not JSON", f"column {end + 1}: more text after the object")
        if self._flaw:
            raise self._flaw
        return value

    def elements(self, text: str) -> Iterator[object]:
        """Yield the elements of the array `text`, a RowFault for a flawed one; Refused where the array breaks."""
        at = text.index("[")
        number = 0
        while True:
            at = self._skip(text, at + 1)
            if text[at : at + 1] == "]" and not number:
                break
            number += 1
            value, at = self._value(text, at)
            yield RowFault(number, *self._flaw.args) if self._flaw else value
            at = self._skip(text, at)
            if text[at : at + 1] == "]":
                break
            if text[at : at + 1] != ",":
                raise Refused("not JSON", f"after row {number} a comma or ] is missing (line {_line(text, at)})")
        if text[at + 1 :].strip():
            raise Refused("not JSON", f"more text after its end (line {_line(text, at)})")

    def _value(self, text: str, start: int) -> tuple[object, int]:
        self._flaw = None
        try:
            return self._decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            place = f"line {error.lineno}, " if "\n" in text else ""
            raise Refused("not JSON", f"{place}column {error.colno}: {error.msg}") from None
        except (ValueError, RecursionError) as error:
            raise Refused("not JSON", f"{error}") from None

    @staticmethod
    def _skip(text: str, at: int) -> int:
        while text[at : at + 1] in (" ", "\t", "\n", "\r"):
            at += 1
        return at

    def _object(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        value = dict(pairs)
        if len(value) < len(pairs):
            key = Counter(key for key, _ in pairs).most_common(1)[0][0]
            self._flaw = Refused("duplicate key", f'the key "{key}" stands twice')
        return value

    def _constant(self, name: str) -> None:
        self._flaw = Refused("not a JSON number", f"{name} is not JSON")


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1
