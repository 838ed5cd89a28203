"""SFT data into rows: JSONL, a JSON array, either gzipped, or a data set of the Hugging Face hub. Standard library.

Nothing is repaired and nothing becomes text that was not text: a row that is not what its format says is a fault
with its line. All faults of a file come as one UserError, or are dropped and counted when asked.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainers.errors import UserError, did_you_mean
from trainers.formats import Message, Row, format_of, no_format, to_row
from trainers.row_faults import Found, OnError, Refused, RowFault, settle
from trainers.strict_json import read_array, read_lines

__all__ = [
    "Message",
    "OnError",
    "Row",
    "Rows",
    "from_records",
    "read",
]

HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+))?")
FILE_SUFFIXES = {".jsonl", ".json", ".gz", ".ndjson", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".zst", ".zip"}


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


def _file(path: Path, source: str, notes: list[str]) -> tuple[str, Found]:
    try:
        data = path.read_bytes()
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{source} cannot be read: {error}") from None
    data = data.removeprefix(b"\xef\xbb\xbf")
    if data.lstrip().startswith(b"["):
        return "row", read_array(data, source)
    return "line", read_lines(data, source, notes)


def _hub(source: str) -> Found:
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


def _rows(found: Found, source: str, unit: str, notes: list[str], on_error: OnError) -> Rows:
    formats = ((line, format_of(record)) for line, record in found)
    first, known = next(((line, known) for line, known in formats if known), (0, None))
    if known is None:
        faults = [record for _, record in found if isinstance(record, RowFault)]
        if len(faults) == len(found):
            settle(faults, len(found), source, unit, on_error)
        raise UserError(no_format(found, source, unit))
    rows: list[Row] = []
    faults = []
    extra: set[str] = set()
    for line, record in found:
        if isinstance(record, RowFault):
            faults.append(record)
            continue
        try:
            rows.append(to_row(line, record, known, f"{unit} {first}", extra))
        except Refused as refused:
            faults.append(RowFault(line, *refused.args))
    notes += settle(faults, len(found), source, unit, on_error)
    if extra:
        notes.append(f"keys not used: {', '.join(sorted(extra))}")
    return Rows(tuple(rows), source, known.name, tuple(notes), unit)
