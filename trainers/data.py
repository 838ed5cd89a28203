"""Tokenised data sets: truncation, the preflight table, the split into train and eval, padded batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trainers.batch import Samples
from trainers.errors import UserError
from trainers.row_faults import OnError, RowFault, count_rows, name_lines, settle
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


@dataclass(frozen=True, eq=False)
class EncodedRows:
    """The rows of one source that have tokens, before any truncation: `samples[i]` is that of `rows.rows[i]`.

    `rows_read` counts the rows without tokens too, but not the `held_out` ones that a split gave to evaluation.
    """

    rows: Rows
    samples: tuple[Sample, ...]
    rows_read: int
    held_out: int = 0

    def split(self, fraction: float, seed: int) -> tuple[EncodedRows, EncodedRows]:
        """Return (train, eval) as `split_eval` does; the notes stay with train."""
        train, held = split_eval(self.rows, fraction, seed)
        held = replace(held, source=f"{held.source} (held out)", notes=())
        samples = {sample[0]: sample for sample in self.samples}
        of_train, of_held = (tuple(samples[row.line] for row in part) for part in (train, held))
        rows_read = self.rows_read - len(held)
        return EncodedRows(train, of_train, rows_read, len(held)), EncodedRows(held, of_held, len(held))


@dataclass(frozen=True)
class DataReport:
    """The preflight table of one data set. Lengths are in tokens, before truncation.

    `tokens_lost` = what truncation cut off, and the whole of each row that it left without a target (such a row is
    dropped and not among `rows_truncated`). `held_out` rows of the same source went to evaluation: not in any count.
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
    held_out: int = 0
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the table, a line each, then the notes."""
        lengths = f"{self.length_p50:,} / {self.length_p99:,} / {self.length_max:,} (row at {self.longest_line})"
        held_out = f" ({self.held_out:,} more held out for evaluation)" if self.held_out else ""
        table = {
            "rows kept": f"{self.rows_kept:,} of {self.rows_read:,}{held_out}",
            "rows without targets": f"{self.rows_without_targets:,} (dropped)",
            "rows truncated": f"{self.rows_truncated:,} at seq_len {self.seq_len:,}",
            "tokens lost": self._lost(),
            "length p50 / p99 / max": lengths,
            "targets": f"{self.target_share:.1%} of the tokens",
            "duplicate rows": f"{self.duplicates:,}",
        }
        width = max(map(len, table))
        return [self.source, *(f"  {key:<{width}}  {value}" for key, value in table.items()), *self.notes]

    def line(self) -> str:
        """Return in one line what another seq_len changes in the table."""
        truncated = f"{count_rows(self.rows_truncated)} truncated, {self._lost()} tokens lost"
        dropped = f"{count_rows(self.rows_without_targets)} without targets (dropped)"
        return f"seq_len {self.seq_len:,}: {truncated}, {dropped}"

    def _lost(self) -> str:
        return f"{self.tokens_lost:,} of {self.tokens_kept + self.tokens_lost:,}"


def tokenize(
    rows: Rows, tokenizer: Any, *, seq_len: int, template: Template = "auto", on_error: OnError = "refuse"
) -> tuple[TokenizedDataset, DataReport]:
    """Return the tokens of `rows`, each truncated on the right to `seq_len`, and the preflight table.

    UserError: as `encode`.
    """
    return truncate(encode(rows, tokenizer, [seq_len], template=template, on_error=on_error), seq_len)


def encode(
    rows: Rows, tokenizer: Any, seq_lens: Sequence[int], *, template: Template = "auto", on_error: OnError = "refuse"
) -> EncodedRows:
    """Return the tokens of `rows`, whole, once it is known that they can be truncated to each of `seq_lens`.

    UserError: a template that does not suit the data, rows that the chat template refuses, rows without a target
    within a seq_len (each row only with "refuse"), or no row left.
    """
    chosen = choose_template(rows, tokenizer, template)
    if short := [seq_len for seq_len in seq_lens if seq_len < 2]:
        needed = "at least 2 tokens are needed, one to predict the other"
        raise UserError([f"learning.seq_len={seq_len}: {needed}" for seq_len in short])
    if not tokenizer.is_fast:
        raise UserError("the tokenizer has no fast version (tokenizer.json), which is needed to find the answers")
    encoder = Encoder(tokenizer, chosen)
    samples, faults = _sorted_out(encoder.encode(rows.rows))
    problems: list[str] = []
    notes = [*rows.notes, *encoder.notes]
    try:
        notes += settle(faults, len(rows), rows.source, rows.unit, on_error)
    except UserError as error:
        problems += error.faults
    faulty = {fault.line for fault in faults}
    good = replace(rows, rows=tuple(row for row in rows if row.line not in faulty), notes=tuple(notes))
    encoded = EncodedRows(good, samples, len(rows))
    for seq_len in seq_lens:
        kept = _within(samples, seq_len)
        if len(kept) < len(samples) and (on_error == "refuse" or not kept):
            problems.append(_without_targets(encoded, seq_len, on_error))
    if problems:
        raise UserError(problems)
    return encoded


def truncate(encoded: EncodedRows, seq_len: int) -> tuple[TokenizedDataset, DataReport]:
    """Return samples of at most `seq_len` tokens, those left without a target dropped, and the preflight table.

    UserError: no row is left.
    """
    kept = _within(encoded.samples, seq_len)
    notes = list(encoded.rows.notes)
    if len(kept) < len(encoded.samples):
        notes.append(_without_targets(encoded, seq_len, "drop"))
    if not kept:
        raise UserError(notes[-1])
    dataset = _pack(kept, encoded.rows.source)
    return dataset, _report(encoded, dataset, seq_len, notes)


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
    """Return `input_ids` and `labels`, each int64 [len(ids), longest], padded on the right.

    `labels[t]` is `input_ids[t]` where token t is a target, else -100 (not shifted). No ids: one row of one pad token.
    """
    import torch

    samples = [dataset.sample(i) for i in ids]
    shape = (len(samples), max(len(tokens) for tokens, _ in samples)) if samples else (1, 1)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    for row, (tokens, targets) in enumerate(samples):
        size = len(tokens)
        input_ids[row, :size] = tokens
        labels[row, :size] = np.where(targets, tokens, IGNORED)
    return {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}


def _pack(samples: Sequence[Sample], source: str) -> TokenizedDataset:
    lengths = [len(tokens) for _, tokens, _ in samples]
    return TokenizedDataset(
        tokens=np.concatenate([np.empty(0, np.int32), *(tokens for _, tokens, _ in samples)]),
        is_target=np.concatenate([np.empty(0, bool), *(targets for _, _, targets in samples)]),
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]),
        lines=np.array([line for line, _, _ in samples], dtype=np.int64),
        source=source,
    )


def _sorted_out(found: Iterable[Sample | RowFault]) -> tuple[tuple[Sample, ...], list[RowFault]]:
    """Return the samples, and the faults in the order of their lines."""
    samples: list[Sample] = []
    faults: list[RowFault] = []
    for item in found:
        faults.append(item) if isinstance(item, RowFault) else samples.append(item)
    return tuple(samples), sorted(faults, key=lambda fault: fault.line)


def _within(samples: Sequence[Sample], seq_len: int) -> list[Sample]:
    """Return the samples truncated to `seq_len` tokens, without those that then have no target."""
    return [(line, ids[:seq_len], targets[:seq_len]) for line, ids, targets in samples if targets[:seq_len].any()]


def _without_targets(encoded: EncodedRows, seq_len: int, on_error: OnError) -> str:
    """Say which rows keep no target, and the smallest seq_len at which every row keeps one."""
    rows, samples = encoded.rows, encoded.samples
    lines = [line for line, _, targets in samples if not targets[:seq_len].any()]
    needed = max(int(targets.argmax()) + 1 for _, _, targets in samples)
    count = f"{count_rows(len(lines))} of {encoded.rows_read}"
    found = f"{rows.source}: {count} without a target ({name_lines(lines, rows.unit)})"
    why = f"the prompt alone fills learning.seq_len={seq_len}"
    remedy = f"learning.seq_len={needed} keeps every row"
    if len(lines) == len(samples):
        return f"{found}: {why}; no row is left; {remedy}"
    if on_error == "drop":
        return f"{found}: {why}; dropped; {remedy}"
    return f"{found}: {why}; {remedy}, or data_on_error=drop leaves them out"


def _report(encoded: EncodedRows, dataset: TokenizedDataset, seq_len: int, notes: Sequence[str]) -> DataReport:
    rows, samples = encoded.rows, encoded.samples
    lengths = np.array([len(tokens) for _, tokens, _ in samples])
    p50, p99 = (int(np.quantile(lengths, q, method="inverted_cdf")) for q in (0.5, 0.99))
    return DataReport(
        source=rows.source,
        seq_len=seq_len,
        rows_read=encoded.rows_read,
        rows_kept=len(dataset),
        rows_without_targets=len(samples) - len(dataset),
        rows_truncated=int((lengths > seq_len).sum()) - (len(samples) - len(dataset)),
        tokens_kept=len(dataset.tokens),
        tokens_lost=int(lengths.sum()) - len(dataset.tokens),
        length_p50=p50,
        length_p99=p99,
        length_max=int(lengths.max()),
        longest_line=samples[int(lengths.argmax())][0],
        target_share=float(dataset.is_target.mean()),
        duplicates=len(rows) - len({row.digest for row in rows}),
        held_out=encoded.held_out,
        notes=tuple(notes),
    )
