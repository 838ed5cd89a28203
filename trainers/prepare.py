"""From a config's data names to token arrays: read, split, tokenise. Done once per sweep, shared by all trials."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trainers import rows as reading
from trainers.config import TrialConfig
from trainers.data import DataReport, EncodedRows, TokenizedDataset, encode, overlap, truncate
from trainers.embedded import task
from trainers.embedded.model import EMBEDDED
from trainers.errors import UserError
from trainers.row_faults import count_rows
from trainers.rows import OnError, Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


@dataclass(frozen=True)
class TrialData:
    """Tokenised training and evaluation data, and what a person should know of them."""

    train: TokenizedDataset
    eval: TokenizedDataset
    pad_id: int
    notes: tuple[str, ...] = ()


def prepare(
    config: TrialConfig, tokenizer: PreTrainedTokenizerBase, seq_lens: Sequence[int] | None = None
) -> dict[int, TrialData]:
    """Read and encode training and evaluation data once; return them truncated to each of `seq_lens`.

    Without `seq_lens`, to the config's own. The notes of the first hold the preflight table, those of the others a
    line of what is different. Raises UserError with every fault that was found.
    """
    lengths = list(dict.fromkeys([config.learning.seq_len] if seq_lens is None else seq_lens))
    pad = tokenizer.pad_token_id
    assert isinstance(pad, int), "model.tokenizer() sees to a pad token"
    train, held = _encode(config, tokenizer, lengths)
    found: dict[int, TrialData] = {}
    for seq_len, cut in zip(lengths, _each(partial(_truncate, train, held, n) for n in lengths), strict=True):
        (train_set, train_report), (eval_set, eval_report) = cut
        found[seq_len] = TrialData(train_set, eval_set, pad, tuple(_notes(train_report, eval_report, bool(found))))
    return found


def read(source: str, on_error: OnError) -> Rows:
    """Read a data source by name: the embedded set, a file or a hub data set."""
    return reading.from_records(task.rows(), EMBEDDED) if source == EMBEDDED else reading.read(source, on_error)


def _encode(
    config: TrialConfig, tokenizer: PreTrainedTokenizerBase, seq_lens: Sequence[int]
) -> tuple[EncodedRows, EncodedRows]:
    """Return the rows to train on and those to evaluate on; UserError if they cannot be truncated to `seq_lens`."""
    on_error = config.data_on_error
    names = [name for name in (config.data, config.eval_data) if name is not None]
    sources = _each(partial(read, name, on_error) for name in names)
    known = _overlap(sources[0], sources[1], config) if len(sources) == 2 else []
    template = config.data_template
    steps = [partial(encode, rows, tokenizer, seq_lens, template=template, on_error=on_error) for rows in sources]
    train, *held = _each(steps, known)
    if held:
        return train, held[0]
    share = min(config.eval_fraction, config.max_eval_rows / len(train.rows))
    return train.split(share, seed=0)


def _overlap(train: Rows, held: Rows, config: TrialConfig) -> list[str]:
    """Return the fault of evaluation rows that are trained on: every cost per quality would be too good."""
    pairs = overlap(train, held)
    first = ", ".join(f"line {a} = eval line {b}" for a, b in pairs[:3])
    fault = (
        f"eval_data={config.eval_data}: {len(pairs)} of its rows are also in data={config.data} "
        f"({first}); cost per quality means nothing on rows that were trained on: remove them"
    )
    return [fault] if pairs else []


def _truncate(train: EncodedRows, held: EncodedRows, seq_len: int) -> list[tuple[TokenizedDataset, DataReport]]:
    return _each(partial(truncate, encoded, seq_len) for encoded in (train, held))


def _notes(train: DataReport, held: DataReport, again: bool) -> list[str]:
    """Return what a person should know; in short where another seq_len has told all about these rows."""
    evaluation = f"evaluation: {count_rows(held.rows_kept)}"
    if again:
        return [f"{train.line()}; {evaluation}"]
    return [*train.lines(), evaluation, *(f"evaluation: {note}" for note in held.notes)]


def _each(steps: Iterable[Callable[[], T]], known: Sequence[str] = ()) -> list[T]:
    """Return what the steps return; one UserError with the `known` faults and those of all steps, each once."""
    done: list[T] = []
    faults = list(known)
    for step in steps:
        try:
            done.append(step())
        except UserError as error:
            faults += [fault for fault in error.faults if fault not in faults]
    if faults:
        raise UserError(faults)
    return done


def locate_data(name: str) -> str:
    """Return a data name with an existing path made absolute; other names are left to the reader."""
    path = Path(name).expanduser()
    try:
        return str(path.resolve()) if name != EMBEDDED and path.exists() else name
    except OSError:  # a folder on the way cannot be read: the reader says so
        return name
