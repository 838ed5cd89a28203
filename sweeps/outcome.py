"""How a trial ended: one value, one line of the journal."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator

from sweeps.parity import Parity
from sweeps.spec import Frozen
from trainers.result import TrialResult

SCHEMA = 2
Status = Literal["COMPLETED", "OOM", "INFEASIBLE", "FAILED", "STOPPED"]
ReasonKind = Literal[
    "device_oom",
    "host_oom",
    "library_oom",
    "killed_unproved",
    "illegal_config",
    "crash",
    "timeout",
    "nan",
    "diverged",
    "budget",
    "dominated",
]


class TrialOutcome(Frozen):
    """One finished trial. `metrics` hold finite numbers only; a figure without a value is absent."""

    schema_: int = Field(SCHEMA, alias="schema")
    sweep_id: str
    trial_id: str
    """position in the sweep, as three digits"""
    candidate_id: str
    attempt: int = 1
    kind: Literal["probe", "quality", "confirmation"] = "quality"
    repeats: str | None = None
    """the trial whose configuration was only timed again: a probe for drift, no trial of the search"""
    status: Status
    reason_kind: ReasonKind | None = None
    reason: str = ""
    """one sentence; empty where there is nothing to say"""
    details: tuple[str, ...] = ()
    """what else is known of a failure, a phrase each: the request that failed, the account that grew, consequences"""
    traceback: str = ""
    """of the rank that failed first"""
    phase: str | None = None
    """where it failed, or where memory peaked"""
    rank: int | None = None
    started_at: float
    """seconds since the epoch"""
    ended_at: float
    num_workers: int
    config: dict[str, Any]
    """axes of the candidate, flat, and what was derived"""
    trial_config: dict[str, Any] = Field(default_factory=dict)
    """the job's complete config, in file form"""
    metrics: dict[str, float] = Field(default_factory=dict)
    parity: Parity | None = None
    """whether its first updates are those of its learning configuration; null: nothing was measured"""
    result: dict[str, Any] | None = None
    """what the job measured, as TrialResult.to_json"""
    composed_with: str | None = None
    """the trial whose learning its cost is composed with; never in the journal, which holds what was measured"""

    model_config = ConfigDict(populate_by_name=True)

    @field_validator("schema_")
    @classmethod
    def _known(cls, given: int) -> int:
        if given != SCHEMA:
            raise ValueError(f"it was written by another version (schema {given}; this one reads {SCHEMA})")
        return given

    @property
    def differs(self) -> bool:
        """Tell whether the trial took other steps than its learning configuration means."""
        return self.parity is not None and self.parity.verdict == "SEMANTICS_DIFFER"

    @property
    def competes(self) -> bool:
        """Tell whether the trial may be on the frontier: it ran through, and took the steps that it should have."""
        return self.status == "COMPLETED" and not self.differs and self.repeats is None

    @property
    def cut_short(self) -> bool:
        """Tell whether the sweep's time ended the trial: a resumed sweep runs it again, as its next attempt."""
        return self.status == "STOPPED" and self.reason_kind == "budget"

    @property
    def wall_s(self) -> float:
        return self.ended_at - self.started_at

    @property
    def gpu_hours(self) -> float:
        """Reserved devices × hours, start-up included."""
        return self.num_workers * self.wall_s / 3600

    @property
    def curve(self) -> tuple[tuple[int, float], ...]:
        """Tokens and eval loss, evaluation by evaluation."""
        evaluations = (self.result or {}).get("evaluations") or ()
        known = ((e["consumed_tokens"], e["loss"]) for e in evaluations)
        return tuple((int(tokens), float(loss)) for tokens, loss in known if loss is not None)

    @property
    def measured(self) -> TrialResult | None:
        """What the job measured; a figure that was not finite is null in the journal, and NaN here."""
        return TrialResult.from_json(self.result) if self.result is not None else None

    def to_line(self) -> str:
        """Return the outcome as one line of JSON."""
        return self.model_dump_json(by_alias=True, exclude={"composed_with"}) + "\n"
