"""A screen that shows nothing and remembers its notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sweeps.candidates import Candidate
from sweeps.outcome import TrialOutcome
from sweeps.standing import Standing
from sweeps.trial import Job


class SilentScreen:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def planned(self, candidates: Sequence[Candidate], to_run: int) -> None: ...

    def started(self, job: Job, candidate: Candidate) -> None: ...

    def progress(self, trial_id: str, facts: Mapping[str, Any]) -> None: ...

    def ended(self, outcome: TrialOutcome) -> None: ...

    def stands(self, standing: Standing) -> None: ...
