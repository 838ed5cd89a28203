"""The formats of SFT records, and how a record of one becomes a row. Standard library only."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

from trainers.errors import did_you_mean, nearest
from trainers.row_faults import Found, Refused, RowFault

ROLES = ("system", "user", "assistant")
ROLE_NAMES = {role: role for role in ROLES}
SPEAKERS = {"human": "user", "gpt": "assistant"} | ROLE_NAMES
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
class Format:
    """A format by the keys that its records have; the last required one holds the answer or the whole conversation."""

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


FORMATS = (
    Format("messages", ("messages",)),
    Format("conversations", ("conversations",)),
    *(Format(f"prompt/{answer}", ("prompt", answer)) for answer in ("completion", "answer", "response")),
    Format("question/answer", ("question", "answer")),
    Format("instruction/output", ("instruction", "output"), ("input",)),
)


def format_of(record: object) -> Format | None:
    """Return the first format that `record` has all the keys of."""
    if not isinstance(record, dict):
        return None
    return next((known for known in FORMATS if all(key in record for key in known.required)), None)


def no_format(found: Found, source: str, unit: str) -> str:
    """Say that no record has a known format, and which key may be misspelt."""
    line, record = next(item for item in found if not isinstance(item[1], RowFault))
    shapes = "; ".join(" + ".join(known.required) for known in FORMATS)
    if not isinstance(record, dict):
        return f"{source}, {unit} {line}: a row is an object, this is {_kind(record)}; known keys: {shapes}"
    wanted = {key for known in FORMATS for key in known.required} - set(record)
    near = next((f'; did you mean "{name}" by "{key}"?' for key in record if (name := nearest(key, wanted))), "")
    keys = ", ".join(map(str, record)) or "none"
    return f"{source}, {unit} {line}: keys {keys} are no known format{near}; known: {shapes}"


def to_row(line: int, record: object, known: Format, known_from: str, extra: set[str]) -> Row:
    """Return the row of a record; Refused if it is not what the format says that was found at `known_from`.

    Keys that are not used go to `extra`.
    """
    if not isinstance(record, dict):
        raise Refused("wrong type", f"a row is an object, this is {_kind(record)}")
    answer = known.required[-1]
    for key in known.required:
        if key not in record:
            if other := format_of(record):
                mixed = f"the format is {other.name} here and {known.name} at {known_from}; a source has one format"
                raise Refused("another format", mixed)
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
