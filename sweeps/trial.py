"""A trial on its way: the job that is handed out, and the ending that comes back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sweeps.search import Kind
from trainers.diagnose import Fault


@dataclass(frozen=True)
class Job:
    """One trial to run."""

    trial_id: str
    attempt: int
    candidate_id: str
    num_workers: int
    seq_len: int
    config: Mapping[str, Any]  # a TrialConfig's tree
    started_at: float
    repeats: str | None = None  # the trial that is only timed again
    kind: Kind = "quality"
    why: str = ""  # what it is expected to show

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Ending:
    """How a job ended: what it measured (TrialResult.to_json), or why it failed."""

    result: Mapping[str, Any] | None = None
    fault: Fault | None = None

    def to_json(self) -> dict[str, Any]:
        return {"result": self.result, "fault": dataclasses.asdict(self.fault) if self.fault else None}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Ending:
        return Ending(data["result"], Fault.from_json(data["fault"]) if data["fault"] else None)
