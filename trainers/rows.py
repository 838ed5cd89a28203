"""SFT data into rows: JSONL, a JSON array, either gzipped, or a data set of the Hugging Face hub. Standard library.

Nothing is repaired and nothing becomes text that was not text: a row that is not what its format says is a fault
with its line. All faults of a file come as one UserError, or are dropped and counted when asked.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from trainers.errors import UserError, did_you_mean, nearest

OnError = Literal["refuse", "drop"]

_Found = list[tuple[int, object]]
"""What a source holds: line or row number, and the record or the Fault of reading it."""

MAX_FAULTS = 20
MAX_LINES = 5
ROLES = ("system", "user", "assistant")
ROLE_NAMES = {role: role for role in ROLES}
SPEAKERS = {"human": "user", "gpt": "assistant"} | ROLE_NAMES
HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+))?")
FILE_SUFFIXES = {".jsonl", ".json", ".gz", ".ndjson", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".zst", ".zip"}
ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n{context}### Response:\n"
)


@dataclass(frozen=True)
class Message:
    """One turn: `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Row:
    """One sample: `line` is its 1-based line, or its 1-based row number in an array or a hub data set.

    `prompt` is the text before the answer where the answer is simply appended (the plain template); None for data
    that came as a conversation.
    """

    line: int
    messages: tuple[Message, ...]
    prompt: str | None

    @property
    def answer(self) -> str:
        return self.messages[-1].content

    @cached_property
    def digest(self) -> str:
        """16 hex digits that are equal for rows which differ in nothing but white space, position or data format."""
        turns = [[m.role, " ".join(m.content.split())] for m in self.messages]
        return hashlib.sha256(json.dumps(turns).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Rows:
    """The rows of one source. `unit` is what `Row.line` counts: "line" or "row"."""

    rows: tuple[Row, ...]
    source: str
    format: str
    notes: tuple[str, ...] = ()
    unit: str = "line"

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)


@dataclass(frozen=True)
class Fault:
    """Why one row cannot be used: `kind` groups faults, `text` is the sentence without file and line."""

    line: int
    kind: str
    text: str


class Refused(Exception):
    """A row is refused; raised with the kind and the sentence of its Fault."""


@dataclass(frozen=True)
class _Format:
    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


FORMATS = (
    _Format("messages", ("messages",)),
    _Format("conversations", ("conversations",)),
    *(_Format(f"prompt/{answer}", ("prompt", answer)) for answer in ("completion", "answer", "response")),
    _Format("question/answer", ("question", "answer")),
    _Format("instruction/output", ("instruction", "output"), ("input",)),
)


def read(source: str, on_error: OnError = "refuse") -> Rows:
    """Return the rows of a file, or of a hub data set `org/name[:split]` (default split: train).

    "drop" leaves faulty rows out and says so in the notes. UserError: faulty rows (with "refuse"), no row left, or
    a source that cannot be read.
    """
    path = Path(source).expanduser()
    notes: list[str] = []
    if path.is_dir():
        raise UserError(f"data {source} is a folder; give one .jsonl, .json or .jsonl.gz file in it")
    if path.exists():
        unit, found = _file(path, source, notes)
    elif HUB_ID.fullmatch(source) and path.suffix not in FILE_SUFFIXES and not path.parent.is_dir():
        unit, found = "row", _hub(source)
    else:
        raise UserError(f"data not found: {source}{_near_file(path)}")
    if not found:
        raise UserError(f"{source} has 0 rows")
    return _rows(found, source, unit, notes, on_error)


def from_records(records: Iterable[object], source: str) -> Rows:
    """Return the rows of records that are at hand already; their lines are their 1-based numbers."""
    return _rows(list(enumerate(records, start=1)), source, "row", [], "refuse")


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


def _file(path: Path, source: str, notes: list[str]) -> tuple[str, _Found]:
    try:
        data = path.read_bytes()
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{source} cannot be read: {error}") from None
    data = data.removeprefix(b"\xef\xbb\xbf")
    if data.lstrip().startswith(b"["):
        return "row", _array(data, source)
    return "line", _lines(data, source, notes)


def _lines(data: bytes, source: str, notes: list[str]) -> _Found:
    # Only b"\n" ends a line: str.splitlines would also cut at U+2028, which JSON allows inside a string.
    lines = list(enumerate(data.split(b"\n"), start=1))
    filled = [(number, line) for number, line in lines if line.strip()]
    blank = len(lines) - len(filled) - (not lines[-1][1])
    if blank:
        notes.append(f"{blank} blank line{'s' if blank > 1 else ''} skipped")
    found: _Found = []
    parser = _Parser()
    for number, line in filled:
        try:
            found.append((number, parser.line(line)))
        except Refused as refused:
            found.append((number, Fault(number, *refused.args)))
    faults = [item for _, item in found if isinstance(item, Fault)]
    if faults and len(faults) == len(found) and all(fault.kind == "not JSON" for fault in faults):
        first = f"{source}, line {faults[0].line}: {faults[0].text}"
        raise UserError(f"{first}; no line of the file is a row: one JSON object a line, or a JSON array, is needed")
    if faults and faults[-1].kind == "not JSON" and faults[-1].line == lines[-1][0]:
        last = faults[-1]
        found[-1] = (last.line, Fault(last.line, last.kind, f"{last.text}; the file ends here, perhaps cut off"))
    return found


def _array(data: bytes, source: str) -> _Found:
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


def _hub(source: str) -> _Found:
    match = HUB_ID.fullmatch(source)
    assert match, source
    name, split = match[1], match[2] or "train"
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(f"data {source} is no file here, and hub data sets need `pip install datasets`") from None
    try:
        data = load_dataset(name, split=split)
        return list(enumerate(data, start=1))
    except Exception as error:  # the hub client raises its HTTP library's errors, which have no common base
        told = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"data {source} is no file here, and the hub gave no such data set: {told}") from None


def _near_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (there is no folder {path.parent})"
    return did_you_mean(path.name, (file.name for file in path.parent.iterdir()))


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
        """Yield the elements of the array `text`, a Fault for a flawed one; Refused where the array breaks."""
        at = text.index("[")
        number = 0
        while True:
            at = self._skip(text, at + 1)
            if text[at : at + 1] == "]" and not number:
                break
            number += 1
            value, at = self._value(text, at)
            yield Fault(number, *self._flaw.args) if self._flaw else value
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


def _rows(found: _Found, source: str, unit: str, notes: list[str], on_error: OnError) -> Rows:
    known = _format(record for _, record in found)
    if known is None:
        faults = [record for _, record in found if isinstance(record, Fault)]
        if len(faults) == len(found):
            settle(faults, len(found), source, unit, on_error)
        raise UserError(_no_format(found, source, unit))
    rows: list[Row] = []
    faults = []
    extra: set[str] = set()
    for line, record in found:
        if isinstance(record, Fault):
            faults.append(record)
            continue
        try:
            rows.append(_row(line, record, known, extra))
        except Refused as refused:
            faults.append(Fault(line, *refused.args))
    notes += settle(faults, len(found), source, unit, on_error)
    if extra:
        notes.append(f"keys not used: {', '.join(sorted(extra))}")
    return Rows(tuple(rows), source, known.name, tuple(notes), unit)


def _format(records: Iterable[object]) -> _Format | None:
    """Return the format of the first record that has all the keys of one."""
    for record in records:
        if isinstance(record, dict):
            for known in FORMATS:
                if all(key in record for key in known.required):
                    return known
    return None


def _no_format(found: _Found, source: str, unit: str) -> str:
    line, record = next(item for item in found if not isinstance(item[1], Fault))
    shapes = "; ".join(" + ".join(known.required) for known in FORMATS)
    if not isinstance(record, dict):
        return f"{source}, {unit} {line}: a row is an object, this is {_kind(record)}; known keys: {shapes}"
    wanted = {key for known in FORMATS for key in known.required} - set(record)
    near = next((f'; did you mean "{name}" by "{key}"?' for key in record if (name := nearest(key, wanted))), "")
    keys = ", ".join(map(str, record)) or "none"
    return f"{source}, {unit} {line}: keys {keys} are no known format{near}; known: {shapes}"


def _row(line: int, record: object, known: _Format, extra: set[str]) -> Row:
    if not isinstance(record, dict):
        raise Refused("wrong type", f"a row is an object, this is {_kind(record)}")
    answer = known.required[-1]
    for key in known.required:
        if key not in record:
            near = nearest(key, set(record) - {*known.required, *known.optional})
            by = f'; did you mean it by "{near}"?' if near else f"; its keys: {', '.join(record) or 'none'}"
            raise Refused("no answer" if key == answer else "other keys", f'the key "{key}" is missing{by}')
    extra |= set(record) - {*known.required, *known.optional}
    if len(known.required) == 1:
        return Row(line, _conversation(record[answer], answer, extra), None)
    question = _text(record[known.required[0]], known.required[0])
    prompt = question
    if known.optional:
        context = _text(record["input"], "input") if record.get("input") is not None else ""
        prompt = _alpaca(question, context)
        question += f"\n\n{context}" if context else ""
    return Row(line, (Message("user", question), Message("assistant", _answer(record[answer], answer))), prompt)


def _alpaca(instruction: str, context: str) -> str:
    paired = ", paired with an input that provides further context" if context else ""
    given = f"### Input:\n{context}\n\n" if context else ""
    return ALPACA.format(paired=paired, instruction=instruction, context=given)


def _conversation(value: object, key: str, extra: set[str]) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise Refused("wrong type", f'"{key}" is {_kind(value)}; a list of messages is needed')
    role_key, text_key = ("role", "content") if key == "messages" else ("from", "value")
    messages = []
    for index, item in enumerate(value):
        where = f"{key}[{index}]"
        if not isinstance(item, dict):
            raise Refused("wrong type", f'"{where}" is {_kind(item)}; an object is needed')
        if item.get("tool_calls") or item.get("function_call"):
            raise Refused("tool calls", f'"{where}" holds tool calls, which are not supported')
        role = _role(item.get(role_key), f"{where}.{role_key}", SPEAKERS if role_key == "from" else ROLE_NAMES)
        part = f"{where}.{text_key}"
        given = _parts(item.get(text_key), part)
        messages.append(Message(role, _answer(given, part) if role == "assistant" else _text(given, part)))
        extra |= {f"{key}[].{name}" for name in set(item) - {role_key, text_key, "tool_calls", "function_call"}}
    _check_turns([message.role for message in messages], key)
    return tuple(messages)


def _role(value: object, where: str, allowed: dict[str, str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        near = did_you_mean(value, allowed) if isinstance(value, str) else ""
        raise Refused("role", f'"{where}" is {_shown(value)}; allowed: {", ".join(allowed)}{near}')
    return allowed[value]


def _check_turns(roles: list[str], key: str) -> None:
    if roles[-1] != "assistant":
        raise Refused("no answer", f'"{key}" ends with the role {roles[-1]}, without an answer')
    if "user" not in roles[: roles.index("assistant")]:
        raise Refused("role", f'"{key}": the assistant speaks before any user message')


def _parts(value: object, where: str) -> object:
    """Return the joined text of a list of text parts; any other value as it is."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise Refused("wrong type", f'"{where}" holds a part that is not text: {kind}')
    return "".join(_text(part.get("text"), f"{where}[].text") for part in value)


def _answer(value: object, key: str) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise Refused("no answer", f'"{key}" is {"null or missing" if value is None else "empty"}')
    return _text(value, key)


def _text(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise Refused("wrong type", f'"{key}" is {_shown(value)}; text is needed')
    if "\0" in value:
        raise Refused("NUL character", f'"{key}" holds a NUL character')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Refused("lone surrogate", f'"{key}" holds the lone surrogate U+{ord(value[error.start]):04X}') from None
    return value


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number"}
    if value is None:
        return "null or missing"
    return "an empty list" if value == [] else names.get(type(value), f"a {type(value).__name__}")


def _shown(value: object) -> str:
    simple = isinstance(value, str | int | float) and len(str(value)) <= 40
    return f"{_kind(value)} ({json.dumps(value)})" if simple else _kind(value)
