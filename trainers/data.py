"""Tokenised data sets: truncation, the preflight table, the split into train and eval, padded batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainers.batch import Samples
from trainers.errors import UserError
from trainers.row_faults import Fault, OnError, count_rows, name_lines, settle
from trainers.rows import Rows
from trainers.templates import Encoder, Sample, Template, choose_template

if TYPE_CHECKING:
    import torch

IGNORED = -100
"""The label of a position that carries no loss."""


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
    encoder = Encoder(tokenizer, chosen)
    whole: list[Sample] = []
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


def _pack(samples: Sequence[Sample], source: str) -> TokenizedDataset:
    lengths = [len(tokens) for _, tokens, _ in samples]
    return TokenizedDataset(
        tokens=np.concatenate([np.empty(0, np.int32), *(tokens for _, tokens, _ in samples)]),
        is_target=np.concatenate([np.empty(0, bool), *(targets for _, _, targets in samples)]),
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]),
        lines=np.array([line for line, _, _ in samples], dtype=np.int64),
        source=source,
    )


def _without_targets(whole: Sequence[Sample], seq_len: int, rows: Rows, on_error: OnError) -> str:
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
    rows: Rows, whole: Sequence[Sample], dataset: TokenizedDataset, seq_len: int, notes: Sequence[str]
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
