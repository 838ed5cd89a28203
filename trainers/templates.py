"""Rows rendered by a template and tokenised, with the tokens of their answers marked.

The tokens before an answer are those that inference computes for its prompt, and an answer ends with one end token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from trainers.errors import UserError
from trainers.formats import Row
from trainers.row_faults import Refused, RowFault
from trainers.rows import Rows

Template = Literal["auto", "chat", "plain"]
ROWS_AT_ONCE = 256
STAND_IN = "answer7f3a9c51"
"""Rendered in an answer's place to find where the template puts it: templates trim and split what they are given."""


def choose_template(rows: Rows, tokenizer: Any, template: Template = "auto") -> Literal["chat", "plain"]:
    """Return the template that `rows` get; UserError where the tokenizer or the data do not allow it."""
    conversations = any(row.prompt is None for row in rows)
    has_chat = bool(getattr(tokenizer, "chat_template", None))
    if template != "plain" and not has_chat and (conversations or template == "chat"):
        data = f"{rows.source} holds conversations" if conversations else "the chat template is asked for"
        raise UserError(
            f"{data} and the tokenizer has no chat template: use a model whose tokenizer has one (usually its "
            "-Instruct version), or give the data as prompt and completion with the plain template"
        )
    if template == "plain" and conversations:
        raise UserError(f"{rows.source} holds conversations; the plain template needs rows of prompt and completion")
    return "chat" if has_chat and template != "plain" else "plain"


Sample = tuple[int, np.ndarray, np.ndarray]
"""The line, the tokens and the targets of one row."""


@dataclass(frozen=True)
class _Rendered:
    """The text of one row; `spans` are the characters of its answers, end markers included.

    `end_id` is the token of the end marker in the text, None where the end token has yet to be appended.
    """

    line: int
    text: str
    spans: tuple[tuple[int, int], ...]
    end_id: int | None


class Encoder:
    """Renders and tokenises rows, `ROWS_AT_ONCE` at a time; `notes` tells what it found on the way."""

    def __init__(self, tokenizer: Any, template: Literal["chat", "plain"]) -> None:
        self.tokenizer = tokenizer
        self.eos_id: int | None = tokenizer.eos_token_id
        self.bos_id = self._added_bos()
        self.notes: list[str] = []
        self._render = self._plain if template == "plain" else self._chat
        self._chat_markers = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}

    def encode(self, rows: Sequence[Row]) -> Iterator[Sample | RowFault]:
        """Yield the tokens or the fault of each row; a chunk's faults come before its samples."""
        for first in range(0, len(rows), ROWS_AT_ONCE):
            rendered: list[_Rendered] = []
            for row in rows[first : first + ROWS_AT_ONCE]:
                try:
                    rendered.append(self._render(row))
                except Refused as refused:
                    yield RowFault(row.line, *refused.args)
            yield from self._tokens(rendered)

    def _added_bos(self) -> int | None:
        """Return the BOS token that the tokenizer puts in front of a text by itself, None if it does not."""
        bos = self.tokenizer.bos_token_id
        ids = self.tokenizer("a")["input_ids"]
        return bos if bos is not None and ids and ids[0] == bos else None

    def _plain(self, row: Row) -> _Rendered:
        assert row.prompt is not None, "choose_template lets no conversation through"
        text = row.prompt + row.answer
        return _Rendered(row.line, text, ((len(row.prompt), len(text)),), None)

    def _chat(self, row: Row) -> _Rendered:
        messages = [{"role": message.role, "content": message.content} for message in row.messages]
        full = self._apply(messages, **_thinking(row.answer))
        spans: list[tuple[int, int]] = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                spans.append(self._answer_span(full, messages, index))
        # The last answer tells the marker: after an earlier one, the first special token may open the next turn.
        marker = self._marker(full[spans[-1][1] :])
        if marker is None:
            return _Rendered(row.line, full[: spans[-1][1]], tuple(spans), None)
        ends = [_end_with(full, end, marker) for _, end in spans]
        marked = tuple((start, end) for (start, _), end in zip(spans, ends, strict=True))
        return _Rendered(row.line, full, marked, self._chat_markers[marker])

    def _answer_span(self, full: str, messages: list[dict[str, str]], index: int) -> tuple[int, int]:
        """Return where answer `index` starts (what the generation prompt supplies is not part of it) and ends."""
        own, last = (_thinking(messages[i]["content"]) for i in (index, -1))
        stand_in = [*messages[:index], {"role": "assistant", "content": STAND_IN}, *messages[index + 1 :]]
        before, found, after = self._apply(stand_in, **last).partition(STAND_IN)
        if not found or STAND_IN in after or not full.endswith(after):
            raise Refused("chat template", f"the chat template does not render message {index} once and as it is")
        # Some templates write an earlier turn otherwise than when it was the last one (they move the system message,
        # drop thinking tags); what parts there may be the user's text, so then the answer starts at its own text.
        start = _common(full, before)
        for options in (own, last):
            prompt = self._apply(messages[:index], add_generation_prompt=True, **options)
            if full.startswith(prompt):
                start = len(prompt)
                break
        end = len(full) - len(after)
        if start >= end:
            raise Refused("chat template", f"the chat template renders nothing of message {index}")
        return start, end

    def _apply(self, messages: list[dict[str, str]], **options: bool) -> str:
        from jinja2 import TemplateError

        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except (TemplateError, TypeError) as error:
            raise Refused("chat template", f"the chat template refuses it: {error}") from None

    def _marker(self, tail: str) -> str | None:
        """Return the special token that `tail` starts with, white space aside."""
        found = [marker for marker in self._chat_markers if marker.strip() and tail.lstrip().startswith(marker)]
        return max(found, key=len, default=None)

    def _tokens(self, rendered: Sequence[_Rendered]) -> Iterator[Sample | RowFault]:
        if not rendered:
            return
        whole = self._ids([item.text for item in rendered])
        heads = iter(self._ids([item.text[:start] for item in rendered for start, _ in item.spans]))
        for item, (ids, ends) in zip(rendered, whole, strict=True):
            prefixes = [next(heads)[0] for _ in item.spans]
            starts = [len(prefix) for prefix in prefixes]
            if any(ids[: len(prefix)] != prefix for prefix in prefixes):
                ids, ends, starts = self._pieces(item)
            stops = [int(np.searchsorted(ends, end, side="right")) for _, end in item.spans]
            try:
                yield self._sample(item, ids, list(zip(starts, stops, strict=True)))
            except Refused as refused:
                yield RowFault(item.line, *refused.args)

    def _ids(self, texts: list[str]) -> list[tuple[list[int], np.ndarray]]:
        """Return the tokens of each text and the position in it where each token ends."""
        coded = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = (np.array([end for _, end in pairs], dtype=np.int64) for pairs in coded["offset_mapping"])
        return list(zip(coded["input_ids"], offsets, strict=True))

    def _pieces(self, item: _Rendered) -> tuple[list[int], np.ndarray, list[int]]:
        """Tokenise a text whose answer starts inside a token: cut there, since inference sees the prompt alone."""
        cuts = [0, *(start for start, _ in item.spans), len(item.text)]
        ids: list[int] = []
        ends: list[np.ndarray] = []
        starts: list[int] = []
        pieces = self._ids([item.text[a:b] for a, b in pairwise(cuts)])
        for cut, (piece, piece_ends) in zip(cuts, pieces, strict=False):
            starts.append(len(ids))
            ids = ids + piece
            ends.append(piece_ends + cut)
        return ids, np.concatenate(ends), starts[1:]

    def _sample(self, item: _Rendered, ids: list[int], spans: list[tuple[int, int]]) -> Sample:
        for start, stop in spans:
            if {item.end_id, self.eos_id} & set(ids[start : stop - 1]):
                raise Refused("end token in the answer", "the text of an answer holds the end token")
        if item.end_id is None and ids[-1] != self.eos_id:
            if self.eos_id is None:
                raise Refused("no end token", "neither the template nor the tokenizer has an end token")
            ids = [*ids, self.eos_id]
            spans[-1] = (spans[-1][0], len(ids))
        targets = np.zeros(len(ids), dtype=bool)
        for start, stop in spans:
            targets[start:stop] = True
        if self.bos_id is not None and ids[0] != self.bos_id:
            ids = [self.bos_id, *ids]
            targets = np.concatenate([[False], targets])
            self._note_bos()
        targets[0] = False
        return item.line, np.array(ids, dtype=np.int32), targets

    def _note_bos(self) -> None:
        note = "the chat template renders no BOS token, which the tokenizer adds to other texts: it was put in front"
        if self._render == self._chat and note not in self.notes:
            self.notes.append(note)


def _thinking(answer: str) -> dict[str, bool]:
    """Return the template option under which `answer` is given: one with reasoning must learn to open it."""
    return {} if "</think>" in answer else {"enable_thinking": False}


def _common(a: str, b: str) -> int:
    """Return the length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _end_with(full: str, end: int, marker: str) -> int:
    """Return the end of the marker that follows position `end`, white space aside, or `end` if there is none."""
    tail = full[end:]
    rest = tail.lstrip()
    return end + len(tail) - len(rest) + len(marker) if rest.startswith(marker) else end
