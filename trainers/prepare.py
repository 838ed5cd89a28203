"""From a config's data names to token arrays: read, split, tokenise. Done once per sweep, shared by all trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainers import rows as reading
from trainers.config import TrialConfig
from trainers.data import DataReport, TokenizedDataset, overlap, split_eval, tokenize
from trainers.embedded import task
from trainers.embedded.model import EMBEDDED
from trainers.errors import UserError
from trainers.rows import OnError, Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TrialData:
    """Tokenised training and evaluation data, and what a person should know of them."""

    train: TokenizedDataset
    eval: TokenizedDataset
    pad_id: int
    notes: tuple[str, ...] = ()


def prepare(config: TrialConfig, tokenizer: PreTrainedTokenizerBase) -> TrialData:
    """Read and tokenise training and evaluation data. Raises UserError with every fault that was found."""
    data = read(config.data, config.data_on_error)
    if config.eval_data is None:
        share = min(config.eval_fraction, config.max_eval_rows / len(data))
        train_rows, eval_rows = split_eval(data, share, seed=0)
    else:
        train_rows, eval_rows = data, read(config.eval_data, config.data_on_error)
        refuse_overlap(overlap(train_rows, eval_rows), config)
    train, train_report = _tokenize(train_rows, tokenizer, config)
    held, held_report = _tokenize(eval_rows, tokenizer, config)
    pad = tokenizer.pad_token_id
    assert isinstance(pad, int), "model.tokenizer() sees to a pad token"
    return TrialData(train, held, pad, (*train_report.lines(), f"evaluation: {held_report.rows_kept:,} rows"))


def read(source: str, on_error: OnError) -> Rows:
    """Read a data source by name: the embedded set, a file or a hub data set."""
    return reading.from_records(task.rows(), EMBEDDED) if source == EMBEDDED else reading.read(source, on_error)


def refuse_overlap(pairs: Sequence[tuple[int, int]], config: TrialConfig) -> None:
    """Refuse evaluation rows that are trained on: the eval loss, and every cost per quality, would be too good."""
    if pairs:
        first = ", ".join(f"line {a} = eval line {b}" for a, b in pairs[:3])
        raise UserError(
            f"eval_data={config.eval_data}: {len(pairs)} of its rows are also in data={config.data} "
            f"({first}); cost per quality means nothing on rows that were trained on: remove them"
        )


def _tokenize(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, config: TrialConfig
) -> tuple[TokenizedDataset, DataReport]:
    return tokenize(
        rows, tokenizer, seq_len=config.learning.seq_len, template=config.data_template, on_error=config.data_on_error
    )


def locate_data(name: str) -> str:
    """Return a data name with an existing path made absolute; other names are left to the reader."""
    path = Path(name).expanduser()
    try:
        return str(path.resolve()) if name != EMBEDDED and path.exists() else name
    except OSError:  # a folder on the way cannot be read: the reader says so
        return name
