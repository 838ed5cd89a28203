"""Rows into tokens: templates, targets, truncation, the preflight table, the eval split, padded batches.

The tokens before an answer are those that inference computes for its prompt, and an answer ends with one end token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trainers.batch import Samples
from trainers.errors import UserError
from trainers.rows import Fault, OnError, Refused, Row, Rows, count_rows, name_lines, settle

if TYPE_CHECKING:
    import torch

Template = Literal["auto", "chat", "plain"]

IGNORED = -100
"""The label of a position that carries no loss."""
ROWS_AT_ONCE = 256
STAND_IN = "answer7f3a9c51"
"""Rendered in an answer's place to find where the template puts it: templates trim and split what they are given."""


@dataclass(frozen=True, eq=False)
class TokenizedDataset:
    """n samples end to end: sample i is `offsets[i]:offsets[i + 1]` of `tokens` (int32) and `is_target` (bool).

    `is_target[t]` says that token t carries loss as a label; never the first of a sample, which nothing predicts.
    `offsets` is int64 [n + 1], `lines` int64 [n] the `Row.line` of each sample in `source`.
    """

    tokens: np.ndarray
    is_target: np.ndarray
    offsets: np.ndarray
    lines: np.ndarray
    source: str

    def __len__(self) -> int:
        return len(self.lines)

    def sample(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and targets of sample i as views."""
        part = slice(self.offsets[i], self.offsets[i + 1])
        return self.tokens[part], self.is_target[part]

    def samples(self) -> Samples:
        """Return the number of tokens and of targets of each sample, as Python integers."""
        targets_before = np.concatenate([[0], np.cumsum(self.is_target)])[self.offsets]
        return Samples(np.diff(self.offsets).tolist(), np.diff(targets_before).tolist())

    @property
    def fingerprint(self) -> str:
        """16 hex digits over tokens, targets and offsets: equal means that the same is learned."""
        parts = (self.tokens.astype("<i4"), self.is_target.astype("?"), self.offsets.astype("<i8"))
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:16]

    def subset(self, ids: Sequence[int]) -> TokenizedDataset:
        """Return the samples `ids`, in that order."""
        return _pack([(int(self.lines[i]), *self.sample(i)) for i in ids], self.source)

    def save(self, path: str | Path) -> None:
        """Write one .npz file, under exactly this name."""
        names = ("tokens", "is_target", "offsets", "lines")
        with open(path, "wb") as file:
            np.savez(file, source=np.array(self.source), **{name: getattr(self, name) for name in names})

    @classmethod
    def load(cls, path: str | Path) -> TokenizedDataset:
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ("tokens", "is_target", "offsets", "lines")}
            return cls(**arrays, source=str(file["source"]))


@dataclass(frozen=True)
class DataReport:
    """The preflight table of one data set. Lengths are in tokens, before truncation.

    `tokens_lost` = what truncation cut off, and the whole of each row that it left without a target (such a row is
    dropped and not among `rows_truncated`).
    `duplicates` counts the rows whose digest an earlier row has. `longest_line` is the line of the longest row.
    """

    source: str
    seq_len: int
    rows_read: int
    rows_kept: int
    rows_without_targets: int
    rows_truncated: int
    tokens_kept: int
    tokens_lost: int
    length_p50: int
    length_p99: int
    length_max: int
    longest_line: int
    target_share: float
    duplicates: int
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the table, a line each, then the notes."""
        lengths = f"{self.length_p50:,} / {self.length_p99:,} / {self.length_max:,} (row at {self.longest_line})"
        table = {
            "rows kept": f"{self.rows_kept:,} of {self.rows_read:,}",
            "rows without targets": f"{self.rows_without_targets:,} (dropped)",
            "rows truncated": f"{self.rows_truncated:,} at seq_len {self.seq_len:,}",
            "tokens lost": f"{self.tokens_lost:,} of {self.tokens_kept + self.tokens_lost:,}",
            "length p50 / p99 / max": lengths,
            "targets": f"{self.target_share:.1%} of the tokens",
            "duplicate rows": f"{self.duplicates:,}",
        }
        width = max(map(len, table))
        return [self.source, *(f"  {key:<{width}}  {value}" for key, value in table.items()), *self.notes]


def tokenize(
    rows: Rows, tokenizer: Any, *, seq_len: int, template: Template = "auto", on_error: OnError = "refuse"
) -> tuple[TokenizedDataset, DataReport]:
    """Return the tokens of `rows`, each truncated on the right to `seq_len`, and the preflight table.

    UserError: a template that does not suit the data, rows that the chat template refuses, rows without a target
    within `seq_len` (each row only with "refuse"), or no row left.
    """
    chosen = choose_template(rows, tokenizer, template)
    if seq_len < 2:
        raise UserError(f"learning.seq_len={seq_len}: at least 2 tokens are needed, one to predict the other")
    if not tokenizer.is_fast:
        raise UserError("the tokenizer has no fast version (tokenizer.json), which is needed to find the answers")
    encoder = _Encoder(tokenizer, chosen)
    whole: list[_Sample] = []
    faults: list[Fault] = []
    for item in encoder.encode(rows.rows):
        faults.append(item) if isinstance(item, Fault) else whole.append(item)
    faults.sort(key=lambda fault: fault.line)
    problems: list[str] = []
    notes = [*rows.notes, *encoder.notes]
    try:
        notes += settle(faults, len(rows), rows.source, rows.unit, on_error)
    except UserError as error:
        problems += error.faults
    kept = [(line, ids[:seq_len], targets[:seq_len]) for line, ids, targets in whole if targets[:seq_len].any()]
    if len(kept) < len(whole):
        sentence = _without_targets(whole, seq_len, rows, on_error)
        notes.append(sentence) if on_error == "drop" and kept else problems.append(sentence)
    if problems:
        raise UserError(problems)
    dataset = _pack(kept, rows.source)
    return dataset, _report(rows, whole, dataset, seq_len, notes)


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


def split_eval(rows: Rows, fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Return (train, eval): about `fraction` of the rows for eval, duplicates of a row all on one side.

    Depends on the content of the rows and the seed only. UserError: no row would be left on one side.
    """
    if not 0 < fraction < 1:
        raise UserError(f"the eval share is {fraction}; it must lie between 0 and 1")
    groups: dict[str, int] = {}
    for row in rows:
        groups[row.digest] = groups.get(row.digest, 0) + 1
    if len(groups) < 2:
        raise UserError(f"{rows.source} has {len(groups)} distinct row; a split into train and eval needs two")
    order = sorted(groups, key=lambda digest: hashlib.sha256(f"{seed}/{digest}".encode()).digest())
    wanted = min(max(1, round(fraction * len(rows))), len(rows) - 1)
    chosen: set[str] = set()
    taken = 0
    for digest in order:
        if taken + groups[digest] <= wanted:
            chosen.add(digest)
            taken += groups[digest]
    chosen = chosen or {min(order, key=groups.__getitem__)}
    train = tuple(row for row in rows if row.digest not in chosen)
    return replace(rows, rows=train), replace(rows, rows=tuple(row for row in rows if row.digest in chosen))


def overlap(train_rows: Rows, eval_rows: Rows) -> list[tuple[int, int]]:
    """Return (train line, eval line) of each pair of rows with equal content, in the order of the eval rows."""
    lines: dict[str, list[int]] = {}
    for row in train_rows:
        lines.setdefault(row.digest, []).append(row.line)
    return [(line, row.line) for row in eval_rows for line in lines.get(row.digest, [])]


def collate(dataset: TokenizedDataset, ids: Sequence[int], pad_id: int) -> dict[str, torch.Tensor]:
    """Return `input_ids`, `attention_mask` and `labels`, each int64 [len(ids), longest], padded on the right.

    `labels[t]` is `input_ids[t]` where token t is a target, else -100 (not shifted). No ids: one row of one pad
    token with attention 1, since attention over nothing is NaN.
    """
    import torch

    samples = [dataset.sample(i) for i in ids]
    shape = (len(samples), max(len(tokens) for tokens, _ in samples)) if samples else (1, 1)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    attention = np.full(shape, 0 if samples else 1, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    for row, (tokens, targets) in enumerate(samples):
        size = len(tokens)
        input_ids[row, :size] = tokens
        attention[row, :size] = 1
        labels[row, :size] = np.where(targets, tokens, IGNORED)
    arrays = {"input_ids": input_ids, "attention_mask": attention, "labels": labels}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


_Sample = tuple[int, np.ndarray, np.ndarray]
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


class _Encoder:
    """Renders and tokenises rows, `ROWS_AT_ONCE` at a time; `notes` tells what it found on the way."""

    def __init__(self, tokenizer: Any, template: Literal["chat", "plain"]) -> None:
        self.tokenizer = tokenizer
        self.eos_id: int | None = tokenizer.eos_token_id
        self.bos_id = self._added_bos()
        self.notes: list[str] = []
        self._render = self._plain if template == "plain" else self._chat
        self._chat_markers = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}

    def encode(self, rows: Sequence[Row]) -> Iterator[_Sample | Fault]:
        """Yield the tokens or the fault of each row; a chunk's faults come before its samples."""
        for first in range(0, len(rows), ROWS_AT_ONCE):
            rendered: list[_Rendered] = []
            for row in rows[first : first + ROWS_AT_ONCE]:
                try:
                    rendered.append(self._render(row))
                except Refused as refused:
                    yield Fault(row.line, *refused.args)
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

    def _tokens(self, rendered: Sequence[_Rendered]) -> Iterator[_Sample | Fault]:
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
                yield Fault(item.line, *refused.args)

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

    def _sample(self, item: _Rendered, ids: list[int], spans: list[tuple[int, int]]) -> _Sample:
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


def _pack(samples: Sequence[_Sample], source: str) -> TokenizedDataset:
    lengths = [len(tokens) for _, tokens, _ in samples]
    return TokenizedDataset(
        tokens=np.concatenate([np.empty(0, np.int32), *(tokens for _, tokens, _ in samples)]),
        is_target=np.concatenate([np.empty(0, bool), *(targets for _, _, targets in samples)]),
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]),
        lines=np.array([line for line, _, _ in samples], dtype=np.int64),
        source=source,
    )


def _without_targets(whole: Sequence[_Sample], seq_len: int, rows: Rows, on_error: OnError) -> str:
    """Say which rows keep no target, and the smallest seq_len at which every row keeps one."""
    lines = [line for line, _, targets in whole if not targets[:seq_len].any()]
    needed = max(int(targets.argmax()) + 1 for _, _, targets in whole)
    found = f"{rows.source}: {count_rows(len(lines))} of {len(rows)} without a target ({name_lines(lines, rows.unit)})"
    why = f"the prompt alone fills learning.seq_len={seq_len}"
    remedy = f"learning.seq_len={needed} keeps every row"
    if on_error == "drop":
        return f"{found}: {why}; dropped; {remedy}"
    return f"{found}: {why}; {remedy}, or data_on_error=drop leaves them out"


def _report(
    rows: Rows, whole: Sequence[_Sample], dataset: TokenizedDataset, seq_len: int, notes: Sequence[str]
) -> DataReport:
    lengths = np.array([len(tokens) for _, tokens, _ in whole])
    p50, p99 = (int(np.quantile(lengths, q, method="inverted_cdf")) for q in (0.5, 0.99))
    return DataReport(
        source=rows.source,
        seq_len=seq_len,
        rows_read=len(rows),
        rows_kept=len(dataset),
        rows_without_targets=len(whole) - len(dataset),
        rows_truncated=int((lengths > seq_len).sum()) - (len(whole) - len(dataset)),
        tokens_kept=len(dataset.tokens),
        tokens_lost=int(lengths.sum()) - len(dataset.tokens),
        length_p50=p50,
        length_p99=p99,
        length_max=int(lengths.max()),
        longest_line=whole[int(lengths.argmax())][0],
        target_share=float(dataset.is_target.mean()),
        duplicates=len(rows) - len({row.digest for row in rows}),
        notes=tuple(notes),
    )
