"""Small specs, candidates, results and outcomes for the tests of sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sweeps import space
from sweeps.candidates import Candidate, Cluster, Context, enumerate_candidates
from sweeps.outcome import TrialOutcome
from sweeps.spec import SweepSpec
from trainers.result import Evaluation, Save, TrialResult, Update
from trainers.shape import ModelShape

# Conditional axes on both sides: 2 learning rates × (full + lora × 2 ranks) × 2 micro batches = 12 candidates.
CONDITIONAL = {
    "learning": {"adapter": ["full", "lora"], "lora_rank": ["4", "8"], "learning_rate": ["1e-4", "1e-3"]},
    "system": {"micro_batch_size": ["1", "2"]},
}


def make_spec(tree: Mapping[str, Any] | None = None) -> SweepSpec:
    """Return the spec of a tree in file form."""
    return space.validate({"space": "test", **(tree or {})}, base=Path.cwd(), given={})


# Of lora_small what is not about strategies: one of them, in the order of the axes, and without its proof.
ONE_WAY = {
    "system.strategy": "ddp",
    "system.activation_checkpointing": "none",
    "searcher": "grid",
    "seed": "0",
    "proof": "none",
    "measure_seconds": "0",
}


def make_context(
    device: str = "cpu",
    workers: int = 8,
    shape: ModelShape | None = None,
    positions: int | None = None,
    launcher: str = "ray",
) -> Context:
    return Context(Cluster(device, workers, f"{workers} {device}"), shape, positions, launcher)


def make_candidates(tree: Mapping[str, Any] | None = None, context: Context | None = None) -> list[Candidate]:
    return enumerate_candidates(make_spec(tree), context or make_context())


def make_outcome(
    candidate: Candidate | str = "c0",
    trial_id: str = "000",
    status: str = "COMPLETED",
    metrics: Mapping[str, float] | None = None,
    **more: Any,
) -> TrialOutcome:
    """Return an outcome; `candidate` may be an id alone."""
    known: dict[str, Any] = {
        "sweep_id": "test-20250101-1",
        "trial_id": trial_id,
        "candidate_id": candidate if isinstance(candidate, str) else candidate.id,
        "status": status,
        "started_at": 1000.0,
        "ended_at": 1060.0,
        "num_workers": 1 if isinstance(candidate, str) else candidate.num_workers,
        "config": {} if isinstance(candidate, str) else candidate.flat,
        "metrics": dict(metrics or {}),
    }
    return TrialOutcome(**{**known, **more})


def make_update(step_time_s: float, tokens: int = 100, loss: float = 2.0, **more: Any) -> Update:
    known: dict[str, Any] = {
        "update": 1,
        "consumed_tokens": tokens,
        "tokens": tokens,
        "targets": tokens // 2,
        "slots": tokens,
        "loss": loss,
        "grad_norm": 1.0,
        "learning_rate": 1e-4,
        "step_time_s": step_time_s,
    }
    return Update(**{**known, **more})


def make_result(
    evaluations: Sequence[Evaluation] = (),
    updates: Sequence[Update] = (),
    saves: Sequence[Save] = (),
    num_workers: int = 1,
    **more: Any,
) -> TrialResult:
    known: dict[str, Any] = {
        "stop_reason": "budget",
        "updates": tuple(updates),
        "evaluations": tuple(evaluations),
        "saves": tuple(saves),
        "memory": {},
        "host_peak_bytes": 0,
        "fingerprints": (),
        "seconds": {},
        "num_workers": num_workers,
        "effective_config": {},
    }
    return TrialResult(**{**known, **more})


def evaluations(*points: tuple[int, float] | tuple[int, float, float]) -> list[Evaluation]:
    """Return evaluations from (consumed tokens, loss[, seconds])."""
    return [Evaluation(n, int(p[0]), p[1], p[2] if len(p) > 2 else 0.0) for n, p in enumerate(points)]
