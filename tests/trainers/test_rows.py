"""Reading SFT data: what is accepted, and the one error that names every fault with its line."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainers.errors import UserError
from trainers.rows import Message, Rows, read

GOOD = '{"prompt": "p", "completion": "c"}'
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(data: str | bytes, name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return str(path)

    return _write


def faults(source: str, on_error: str = "refuse") -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        read(source, on_error)
    return caught.value.faults


def one(write: Write, record: object) -> Rows:
    return read(write(json.dumps(record)))


def refused(write: Write, record: object) -> str:
    """Return the fault of `record` as line 2 of a file whose first row has the format that it must have."""
    first = {"messages": MESSAGES} if isinstance(record, dict) and "messages" in record else json.loads(GOOD)
    summary, fault = faults(write(f"{json.dumps(first)}\n{json.dumps(record)}\n"))
    assert "1 of 2 rows" in summary
    assert "data.jsonl, line 2: " in fault
    return fault.split("line 2: ")[1]


MESSAGES = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "c"}]
CHAT = json.dumps({"messages": MESSAGES})
PAIR = (Message("user", "p"), Message("assistant", "c"))


# Formats


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "p", "completion": "c"},
        {"prompt": "p", "answer": "c"},
        {"prompt": "p", "response": "c"},
        {"question": "p", "answer": "c"},
        {"instruction": "p", "input": "", "output": "c"},
        {"messages": MESSAGES},
        {"conversations": [{"from": "human", "value": "p"}, {"from": "gpt", "value": "c"}]},
    ],
)
def test_each_format_gives_the_same_messages_and_digest(write: Write, record: dict[str, object]) -> None:
    rows = one(write, record)
    assert rows.rows[0].messages == PAIR
    assert rows.rows[0].digest == read(write(GOOD, "other.jsonl")).rows[0].digest
    is_conversation = len(record) == 1
    assert (rows.rows[0].prompt is None) == is_conversation
    assert rows.format == "/".join(key for key in record if key != "input")


def test_alpaca_text_is_the_prompt_of_the_plain_template_only(write: Write) -> None:
    row = one(write, {"instruction": "Add.", "input": "1, 2", "output": "3"}).rows[0]
    assert row.messages == (Message("user", "Add.\n\n1, 2"), Message("assistant", "3"))
    assert row.prompt == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n### Response:\n"
    )
    assert one(write, {"instruction": "{x}", "output": "3"}).rows[0].prompt == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\n{x}\n\n### Response:\n"
    )


def test_extra_keys_are_noted_and_an_unknown_format_names_the_nearest_key(write: Write) -> None:
    assert one(write, {**json.loads(GOOD), "id": 7, "a": None}).notes == ("keys not used: a, id",)
    assert one(write, {"messages": [MESSAGES[0], {**MESSAGES[1], "weight": 0}]}).notes == (
        "keys not used: messages[].weight",
    )
    (fault,) = faults(write('{"prompt": "p", "compleetion": "c"}\n'))
    assert 'line 1: keys prompt, compleetion are no known format; did you mean "completion" by "compleetion"?' in fault
    assert 'the key "completion" is missing; did you mean it by "completoin"?' in refused(
        write, {"prompt": "p", "completoin": "c"}
    )


def test_digest_ignores_white_space_only(write: Write) -> None:
    rows = read(write(f'{GOOD}\n{{"prompt": " p\\n", "completion": "c "}}\n{{"prompt": "p", "completion": "C"}}\n'))
    first, spaced, other = (row.digest for row in rows)
    assert first == spaced != other
    assert len(first) == 16


# Files


@pytest.mark.parametrize(
    ("text", "lines", "notes"),
    [
        (f"{GOOD}\n\n{GOOD}\n", [1, 3], ("1 blank line skipped",)),
        (f"\n{GOOD}\n  \t\n{GOOD}\n\n", [2, 4], ("3 blank lines skipped",)),
        (f"{GOOD}\r\n{GOOD}\r\n", [1, 2], ()),
        (f"{GOOD}\n{GOOD}", [1, 2], ()),
        (f"\ufeff{GOOD}\n{GOOD}", [1, 2], ()),
    ],
)
def test_f02_blank_lines_crlf_and_no_final_newline(
    write: Write, text: str, lines: list[int], notes: tuple[str, ...]
) -> None:
    rows = read(write(text))
    assert [row.line for row in rows] == lines
    assert rows.notes == notes


def test_f03_invalid_utf8_names_file_line_and_byte(write: Write) -> None:
    data = [GOOD.encode()] * 60
    data[56] = b'{"prompt": "\xff", "completion": "c"}'
    source = write(b"\n".join(data))
    assert faults(source)[1] == f"{source}, line 57: byte 13 of the line, 0xFF, is not UTF-8"
    rows = read(source, "drop")
    assert len(rows) == 59
    assert rows.notes == ("dropped: invalid UTF-8 in 1 row (line 57)",)
    array = b"[" + GOOD.encode() + b',\n{"prompt": "\xfe"}]'
    assert "line 2: byte 13 of the line, 0xFE, is not UTF-8" in faults(write(array))[0]


def test_f04_a_json_array_is_accepted_under_either_name(write: Write) -> None:
    records = [{"instruction": "p", "input": "", "output": "c"}, {"instruction": "p2", "output": "c2"}]
    array = json.dumps(records, indent=1)
    for name in ("data.jsonl", "data.json"):
        rows = read(write(array, name))
        assert [(row.line, row.answer) for row in rows] == [(1, "c"), (2, "c2")]
        assert rows.unit == "row"
    assert len(read(write(f"{GOOD}\n{GOOD}\n", "lines.json"))) == 2


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (f"[{GOOD}, {GOOD}", "after row 2 a comma or ] is missing (line 1)"),
        (f'[{GOOD},\n{{"prompt": "p', "line 2, column 12: Unterminated string"),
        (f"[{GOOD}]\n[{GOOD}]", "more text after its end (line 1)"),
        (f"[{GOOD},]", "Expecting value"),
        ("[]", "has 0 rows"),
        ("[[1], [2]]", "row 1: a row is an object, this is a list"),
    ],
)
def test_broken_arrays(write: Write, array: str, told: str) -> None:
    (fault,) = faults(write(array))
    assert told in fault


def test_array_faults_name_the_row(write: Write) -> None:
    array = f'[{GOOD}, {{"prompt": "p", "prompt": "q", "completion": "c"}}, {{"prompt": "p", "completion": null}}]'
    summary, first, second = faults(write(array))
    assert first.endswith('row 2: the key "prompt" stands twice')
    assert second.endswith('row 3: "completion" is null or missing')
    assert "2 of 3 rows are refused: duplicate key in 1 row (row 2), no answer in 1 row (row 3)" in summary


def test_f07_a_line_separator_stays_inside_its_row(write: Write) -> None:
    rows = read(write(f'{{"prompt": "p", "completion": "a\u2028b\u2029c\x85d"}}\n{GOOD}\n'))
    assert [row.answer for row in rows] == ["a\u2028b\u2029c\x85d", "c"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"prompt": "p", "completion": "\\ud800"}', '"completion" holds the lone surrogate U+D800'),
        ('{"prompt": "p\\u0000", "completion": "c"}', '"prompt" holds a NUL character'),
        ('{"prompt": "p", "completion": "c", "completion": "d"}', 'the key "completion" stands twice'),
        ('{"prompt": "p", "completion": NaN}', "NaN is not JSON"),
        ('{"prompt": "p", "completion": "c", "score": -Infinity}', "-Infinity is not JSON"),
        ('{"prompt": "p", "completion": "c"} {', "column 35: more text after the object"),
        ('{"prompt": "p", "compl', "column 17: Unterminated string starting at; the file ends here, perhaps cut off"),
        ("[" * 100_000, "recursion"),
        ('{"prompt": ' + "1" * 5_000 + "}", "Exceeds the limit"),
    ],
    ids=["surrogate", "nul", "duplicate", "nan", "infinity", "extra", "truncated", "deep", "long number"],
)
def test_f08_a_malformed_row_is_one_line_with_its_place(write: Write, line: str, told: str) -> None:
    summary, fault = faults(write(f"{GOOD}\n\n{line}"))
    assert "data.jsonl, line 3: " in fault
    assert told in fault
    assert "\n" not in fault
    assert "1 of 2 rows" in summary
    assert len(read(write(f"{GOOD}\n{line}"), "drop")) == 1


def test_f08_gzip_by_name_and_by_content(write: Write) -> None:
    packed = gzip.compress(f"{GOOD}\n{GOOD}\n".encode())
    assert len(read(write(packed, "data.jsonl.gz"))) == 2
    assert len(read(write(packed, "data.jsonl"))) == 2
    assert "cannot be read" in faults(write(packed[:-9]))[0]


@pytest.mark.parametrize("data", [b"", b"\n \n", gzip.compress(b"", mtime=0)], ids=["empty", "blank", "gzip"])
def test_f08_an_empty_file_has_0_rows(write: Write, data: bytes) -> None:
    source = write(data)
    assert faults(source) == (f"{source} has 0 rows",)


def test_a_file_that_is_no_json_at_all_is_one_sentence(write: Write) -> None:
    (fault,) = faults(write("prompt,completion\np,c\n", "data.csv"))
    assert "line 1: column 1: Expecting value; no line of the file is a row" in fault
    (fault,) = faults(write(json.dumps(json.loads(GOOD), indent=1)))
    assert "one JSON object a line, or a JSON array, is needed" in fault


def test_sources_that_are_not_there(write: Write, tmp_path: Path) -> None:
    write(GOOD, "train.jsonl")
    missing = str(tmp_path / "trian.jsonl")
    assert faults(missing) == (f"data not found: {missing} (did you mean train.jsonl?)",)
    assert "is a folder" in faults(str(tmp_path))[0]
    assert "there is no folder" in faults("nowhere/data.jsonl")[0]


# Rows


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"prompt": "p", "completion": 42}, '"completion" is a number (42); text is needed'),
        ({"prompt": True, "completion": "c"}, '"prompt" is a boolean (true); text is needed'),
        ({"prompt": ["p"], "completion": "c"}, '"prompt" is a list; text is needed'),
        ({"prompt": "p", "completion": {"a": 1}}, '"completion" is an object; text is needed'),
        ({"prompt": None, "completion": "c"}, '"prompt" is null or missing; text is needed'),
        (["p", "c"], "a row is an object, this is a list"),
        ({"messages": "[]"}, '"messages" is text; a list of messages is needed'),
        ({"messages": []}, '"messages" is an empty list; a list of messages is needed'),
        ({"messages": ["hi"]}, '"messages[0]" is text; an object is needed'),
        ({"messages": [{"role": "usr", "content": "p"}]}, "allowed: system, user, assistant (did you mean user?)"),
    ],
)
def test_f05_a_wrong_type_names_line_and_key(write: Write, record: object, told: str) -> None:
    assert told in refused(write, record)


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"prompt": "p"}, 'the key "completion" is missing; its keys: prompt'),
        ({"prompt": "p", "completion": None}, '"completion" is null or missing'),
        ({"prompt": "p", "completion": ""}, '"completion" is empty'),
        ({"prompt": "p", "completion": " \n"}, '"completion" is empty'),
        ({"messages": [MESSAGES[0]]}, '"messages" ends with the role user, without an answer'),
        ({"messages": [MESSAGES[0], {"role": "assistant"}]}, '"messages[1].content" is null or missing'),
        ({"messages": [MESSAGES[1]]}, "the assistant speaks before any user message"),
    ],
)
def test_f09_a_missing_answer_is_refused(write: Write, record: object, told: str) -> None:
    assert told in refused(write, record)


def test_f09_missing_answers_are_counted(write: Write) -> None:
    bad = ['{"question": "q"}', '{"question": "q", "answer": null}', '{"question": "q", "answer": ""}']
    source = write("\n".join([*bad, '{"question": "q", "answer": "a"}', '{"question": 1, "answer": "a"}']))
    summary, *each = faults(source)
    assert len(each) == 4
    counts = "no answer in 3 rows (lines 1, 2, 3), wrong type in 1 row (line 5)"
    assert summary == f"{source}: 4 of 5 rows are refused: {counts}; data_on_error=drop leaves them out"
    rows = read(source, "drop")
    assert [row.line for row in rows] == [4]
    assert rows.notes == (
        "dropped: no answer in 3 rows (lines 1, 2, 3)",
        "dropped: wrong type in 1 row (line 5)",
    )


def test_equal_faults_are_told_once_and_all_rows_faulty_is_refused_even_with_drop(write: Write) -> None:
    source = write('{"prompt": "p", "completion": ""}\n' * 33)
    lines = "lines 1, 2, 3, 4, 5 and 28 more"
    assert faults(source, "drop") == (
        f"{source}: 33 of 33 rows are refused: no answer in 33 rows ({lines}); no row is left",
        f'{source}, {lines}: "completion" is empty',
    )


def test_the_summary_comes_first_and_then_five_different_faults(write: Write) -> None:
    source = write(GOOD + "".join(f'\n{{"prompt": "p", "completion": {i // 2}}}' for i in range(16)))
    summary, *each, more = faults(source)
    counts = "wrong type in 16 rows (lines 2, 3, 4, 5, 6 and 11 more)"
    assert summary == f"{source}: 16 of 17 rows are refused: {counts}; data_on_error=drop leaves them out"
    assert each == [
        f'{source}, lines {2 + 2 * i}, {3 + 2 * i}: "completion" is a number ({i}); text is needed' for i in range(5)
    ]
    assert more == f"{source}: and 6 rows more with other faults"


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([GOOD, CHAT, GOOD, CHAT], "lines 2, 4: the format is messages here and prompt/completion at line 1"),
        (["", CHAT, GOOD], "line 3: the format is prompt/completion here and messages at line 2"),
        ([GOOD, '{"prompt": "p", "answer": "a"}'], "line 2: the format is prompt/answer here and prompt/completion at"),
        ([f"[{GOOD}, {CHAT}]"], "row 2: the format is messages here and prompt/completion at row 1"),
    ],
)
def test_mixed_formats_are_one_sentence_with_the_first_line_of_each(write: Write, lines: list[str], told: str) -> None:
    source = write("\n".join(lines))
    summary, mixed = faults(source)
    assert "another format in" in summary
    assert mixed.startswith(f"{source}, {told}")
    assert mixed.endswith("; a source has one format")
    assert "another format in" in read(source, "drop").notes[-1]


def test_f17_text_parts_are_joined_and_everything_else_is_refused(write: Write) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]
    answer = {"role": "assistant", "content": parts, "tool_calls": None}
    row = one(write, {"messages": [{"role": "user", "content": parts}, answer]}).rows[0]
    assert [message.content for message in row.messages] == ["a b", "a b"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"content": [{"type": "image_url", "image_url": "x"}]}, "holds a part that is not text: image_url"),
        ({"content": ["a"]}, "holds a part that is not text: text"),
        ({"content": [{"type": "text", "text": 3}]}, "is a number (3); text is needed"),
        ({"content": []}, '"messages[1].content" is empty'),
        ({"content": None}, '"messages[1].content" is null or missing'),
        ({"content": {"a": 1}}, "is an object; text is needed"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}, "holds tool calls"),
        ({"content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}, "holds tool calls"),
        ({"role": "tool"}, '"messages[1].role" is text ("tool")'),
    ],
)
def test_f17_no_python_repr_enters_the_text(write: Write, change: dict[str, object], told: str) -> None:
    assert told in refused(write, {"messages": [MESSAGES[0], {**MESSAGES[1], **change}]})


@pytest.mark.parametrize("text", ["List(Value('string'))", "['a']", '[{"role": "user"}]', "int64", "2024-01-01", "7"])
def test_f19_text_that_looks_like_a_type_stays_text(write: Write, text: str) -> None:
    assert one(write, {"prompt": text, "completion": text}).rows[0].answer == text


# The hub


def test_hub_data_set_with_its_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, *, split: str) -> list[dict[str, str]]:
        asked.append((name, split))
        return [{"question": "q", "answer": "a"}, {"question": "q2", "answer": "b"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    rows = read("org/name")
    assert [(row.line, row.answer) for row in rows] == [(1, "a"), (2, "b")]
    assert (rows.unit, rows.format) == ("row", "question/answer")
    read("org/name:test_sft")
    assert asked == [("org/name", "train"), ("org/name", "test_sft")]


def test_an_unreachable_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, *, split: str) -> None:
        raise ConnectionError("Couldn't reach 'org/name' on the Hub\nmore")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    (fault,) = faults("org/name")
    assert fault.endswith("the hub gave no such data set: Couldn't reach 'org/name' on the Hub")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in faults("org/name")[0]


@pytest.mark.skipif(not os.environ.get("SWEEPS_REAL_DATA"), reason="SWEEPS_REAL_DATA names no folder")
@pytest.mark.parametrize(("name", "count"), [("gsm8k_test", 1319), ("selfinstruct_seed", 175), ("humaneval", 164)])
def test_real_files(name: str, count: int) -> None:
    rows = read(str(Path(os.environ["SWEEPS_REAL_DATA"], f"{name}.jsonl")))
    assert (len(rows), rows.format, rows.notes) == (count, "prompt/completion", ())
    assert len({row.digest for row in rows}) == count
