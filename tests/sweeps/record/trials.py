"""Trials to record, and a database of its own to record them in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sweeps.mlflow_store import make_client
from sweeps.objectives import OBJECTIVES
from sweeps.outcome import TrialOutcome
from sweeps.pareto import Frontier, frontier
from sweeps.record import Recorder, tracking_uri
from sweeps.spec import SweepSpec
from trainers.result import Accounts, Evaluation, PhaseMemory, RankMemory, Save, TrialResult, Update

SWEEP = "lora_small-20250101-1"
T0 = 1_700_000_000.25
SPEC = SweepSpec.model_validate(
    {"space": "lora_small", "system": {"micro_batch_size": [1, 2, 4]}, "learning": {"learning_rate": [1e-4, 2e-4]}}
)


def measured(updates: int = 3) -> TrialResult:
    return TrialResult(
        stop_reason="budget",
        updates=tuple(Update(k, 100 * k, 100, 60, 120, 2.0 / k, 1.0, 1e-5, 0.5) for k in range(1, updates + 1)),
        evaluations=(Evaluation(0, 0, 3.0, 0.2), Evaluation(updates, 100 * updates, 1.23456789, 0.2)),
        saves=(Save(100 * updates, 0.1, 2**20),),
        memory={"forward": PhaseMemory((RankMemory(2**30, 2**30, Accounts(weights=2**30)),))},
        host_peak_bytes=2**30,
        fingerprints=("a",) * updates,
        seconds={"model": 1.0},
        num_workers=2,
        effective_config={},
    )


def outcome(
    n: int, *, memory: float = 1.0, cost: float | None = 0.5, speed: float = 1000.0, **changes: Any
) -> TrialOutcome:
    metrics = {
        "peak_memory_gib": memory,
        "target_tokens_per_second": speed,
        "eval_loss": 1.23456789,
        "consumed_tokens": 1_234_567.0,
    }
    fields: dict[str, Any] = {
        "sweep_id": SWEEP,
        "trial_id": f"{n:03d}",
        "candidate_id": f"c{n}",
        "status": "COMPLETED",
        "num_workers": 2,
        "started_at": T0 + 10 * n,
        "ended_at": T0 + 10 * n + 9,
        "config": {"strategy": "ddp", "micro_batch_size": 4, "learning_rate": 1e-4, "lora_rank": None},
        "trial_config": {"model": "embedded", "learning": {"learning_rate": 1e-4}},
        "metrics": metrics | ({} if cost is None else {"cost_per_quality_usd": cost}),
        "result": measured().to_json(),
    }
    return TrialOutcome.model_validate(fields | changes)


def failed(n: int, status: str = "FAILED", **changes: Any) -> TrialOutcome:
    return outcome(n, status=status, reason_kind="crash", reason="exit code 1", result=None, **changes)


def front(outcomes: Sequence[TrialOutcome]) -> Frontier:
    trials = {o.trial_id: o.metrics for o in outcomes if o.status == "COMPLETED"}
    return frontier(trials, [OBJECTIVES[name] for name in SPEC.objectives])


class Store:
    """A database of its own for one test, and what is in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def recorder(self, spec: SweepSpec = SPEC, sweep: str = SWEEP, folder: Path | None = None) -> Recorder:
        made = Recorder(spec, sweep, folder or self.folder / "runs" / sweep)
        made.check()
        made.open()
        assert made.notes == []
        return made

    def journal(self, outcomes: Sequence[TrialOutcome]) -> None:
        folder = self.folder / "runs" / SWEEP
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "trials.jsonl").write_text("".join(o.to_line() for o in outcomes))

    @property
    def client(self) -> Any:
        return make_client(tracking_uri())

    def runs(self, role: str, spec: SweepSpec = SPEC) -> list[Any]:
        experiment = self.client.get_experiment_by_name(spec.space)
        found = self.client.search_runs([experiment.experiment_id], f"tags.sweep.role = '{role}'")
        return sorted(found, key=lambda run: str(run.data.tags.get("trial.id")))

    def history(self, run: Any, key: str) -> list[tuple[int, float, int]]:
        return [(m.step, m.value, m.timestamp) for m in self.client.get_metric_history(run.info.run_id, key)]

    def artifact(self, run: Any, path: str) -> str:
        found: str = self.client.download_artifacts(run.info.run_id, path)
        return Path(found).read_text()
