"""The sweep's folder: its spec, its candidates, and one line per finished trial, written as it happens."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from pydantic import ValidationError

from sweeps import space
from sweeps.candidates import Candidate
from sweeps.outcome import TrialOutcome
from sweeps.spec import SweepSpec
from trainers import yaml_text
from trainers.errors import UserError, did_you_mean


class Journal:
    """`runs/<sweep id>/`. What is in it is the truth; everything else is made from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sweep_id = folder.name
        self.outcomes: list[TrialOutcome] = []
        self._lock: TextIO | None = None  # held open: the lock goes with it, however the process ends

    @staticmethod
    def create(spec: SweepSpec) -> Journal:
        """Make the folder of a new sweep, `<space>-<date>-<n>`."""
        runs = Path(spec.runs_dir)
        date = datetime.datetime.now().strftime("%Y%m%d")
        n = 1
        while True:
            folder = runs / f"{spec.space}-{date}-{n}"
            try:
                folder.mkdir(parents=True)
                break
            except FileExistsError:
                n += 1
        stored = folder / "spec.yaml"
        stored.touch(mode=0o600 if spec.env else 0o644)  # a variable of the environment may be a secret
        stored.write_text(space.to_yaml(spec), encoding="utf-8")
        return Journal(folder).open()

    @staticmethod
    def find(name: str, runs: Path, asked: str = "resume") -> Journal:
        """Return the sweep `name`, or the newest one for "latest", not opened yet; `asked`: the key that names it."""
        found = sorted((p.parent for p in runs.glob("*/spec.yaml")), key=lambda p: (p / "spec.yaml").stat().st_mtime)
        if not found:
            raise UserError(f"{asked}={name}: there are no sweeps in {runs}")
        names = {p.name: p for p in found}
        if name != "latest" and name not in names:
            raise UserError(
                f"{asked}={name}: no such sweep in {runs}{did_you_mean(name, names)}; "
                f"there are: {', '.join(sorted(names))}"
            )
        return Journal(found[-1] if name == "latest" else names[name])

    def open(self) -> Journal:
        """Make this process the only one that runs the sweep, and read its outcomes.

        A line that was cut off by a crash is dropped from the file. Raises UserError if another process runs the sweep.
        """
        self._lock = (self.folder / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{self.sweep_id} is being run by another process; wait for it, or stop it first") from None
        whole = self._whole_lines()
        if self.trials.is_file():
            os.truncate(self.trials, len(whole))
        self.outcomes = self._parsed(whole)
        return self

    def close(self) -> None:
        """Let another process run the sweep."""
        if self._lock is not None:
            self._lock.close()

    @property
    def trials(self) -> Path:
        return self.folder / "trials.jsonl"

    def spec_tree(self) -> dict[str, Any]:
        """Return the spec that the sweep was started with, in file form."""
        tree = yaml_text.read(self.folder / "spec.yaml")
        assert isinstance(tree, dict), "spec.yaml is written by create()"
        return tree

    def append(self, outcome: TrialOutcome) -> None:
        """Write one outcome, durably."""
        with self.trials.open("a", encoding="utf-8") as file:
            file.write(outcome.to_line())
            file.flush()
            os.fsync(file.fileno())
        self.outcomes.append(outcome)

    def read(self) -> list[TrialOutcome]:
        """Return the outcomes of the file, without a last line that is not whole."""
        return self._parsed(self._whole_lines())

    def _whole_lines(self) -> bytes:
        text = self.trials.read_bytes() if self.trials.is_file() else b""
        return text[: text.rfind(b"\n") + 1]

    def _parsed(self, whole: bytes) -> list[TrialOutcome]:
        outcomes = []
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                outcomes.append(TrialOutcome.model_validate_json(line))
            except ValidationError as error:
                raise UserError(
                    f"{self.trials} line {number} is not a trial outcome: {error.errors()[0]['msg']}"
                ) from None
        return outcomes

    def write_candidates(self, candidates: Iterable[Candidate], states: Mapping[str, str]) -> None:
        """Write every candidate with its state: pruned with its rules, a trial's status, or untried."""
        lines = [
            json.dumps(
                {
                    "id": c.id,
                    "state": states.get(c.id, "untried") if c.legal else "pruned",
                    "reasons": list(c.reasons),
                    "gradient_accumulation_steps": c.gradient_accumulation_steps,
                    "config": c.flat,
                },
                ensure_ascii=False,
            )
            for c in candidates
        ]
        self._write("candidates.jsonl", "\n".join(lines) + "\n")

    def write_json(self, name: str, value: Mapping[str, Any] | Sequence[Any]) -> None:
        """Write a JSON file of the folder."""
        self._write(name, json.dumps(value, indent=1, allow_nan=False) + "\n")

    def _write(self, name: str, text: str) -> None:
        """Write a file of the folder; it appears whole or not at all."""
        partial = self.folder / f".{name}.{time.time_ns()}"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.folder / name)


def check_writable(runs: Path) -> None:
    """Raise UserError when the sweep's folder could not be made; leaves nothing behind."""
    nearest = next(p for p in (runs, *runs.parents) if os.path.exists(p))
    try:
        with tempfile.TemporaryDirectory(dir=nearest):  # asking is not enough: root is allowed what a mount refuses
            return
    except OSError:
        raise UserError(
            f"cannot write to {nearest}: the sweep's results go to {runs}; run in another directory, or "
            "give runs_dir=<a folder you can write to>"
        ) from None
