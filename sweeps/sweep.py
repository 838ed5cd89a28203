"""One sweep, to be read from top to bottom: check, enumerate, tokenise, search, measure, trade off, record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from sweeps import cost
from sweeps.candidates import (
    Candidate,
    Cluster,
    Context,
    enumerate_candidates,
    pruned_rules,
    trial_config,
)
from sweeps.clusters import price_per_gpu_hour
from sweeps.desk import Screen, SweepDesk
from sweeps.journal import Journal, check_writable
from sweeps.launch import make_launcher
from sweeps.objectives import OBJECTIVES
from sweeps.outcome import TrialOutcome
from sweeps.pareto import Frontier, frontier
from sweeps.record import Recorder
from sweeps.search import SEARCHERS
from sweeps.spec import SweepSpec
from trainers import model
from trainers.errors import UserError
from trainers.prepare import TrialData, prepare

T = TypeVar("T")


@dataclass(frozen=True)
class Report:
    """How a sweep ended."""

    spec: SweepSpec
    sweep_id: str
    folder: Path
    candidates: tuple[Candidate, ...]
    outcomes: tuple[TrialOutcome, ...]
    frontier: Frontier
    target: float | None
    ended: Literal["complete", "budget", "failing", "interrupted"]
    why: str
    untried: int
    warnings: tuple[str, ...]
    url: str
    ui_command: str | None


class Faults:
    """Collects what several checks find wrong, to say it all at once."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def of(self, check: Callable[[], T]) -> T | None:
        """Return what a check returns, or None where it found a fault."""
        try:
            return check()
        except UserError as error:
            self._found += error.faults
            return None

    def raise_any(self) -> None:
        if self._found:
            raise UserError(self._found)


def run_sweep(spec: SweepSpec, screen: Screen, resumed: Journal | None = None) -> Report:
    """Run or continue a sweep. Raises UserError, with every fault, before anything is launched or written."""
    # 1. What there is to run on, and what may run there.
    launcher = make_launcher(spec)
    cluster = launcher.cluster()
    screen.note(cluster.description)

    # 2. Everything that could be wrong, before the first write; the store last, since looking at it creates it.
    faults = Faults()
    candidates = faults.of(lambda: legal_candidates(spec, cluster)) or []
    legal = [c for c in candidates if c.legal]
    faults.of(lambda: check_writable(Path(spec.runs_dir)))
    price = faults.of(lambda: price_per_gpu_hour(spec, screen.note)) or 0.0
    data = faults.of(lambda: tokenise(spec, legal, cluster.device, screen)) or {}
    faults.raise_any()
    Recorder(spec, "", Path(spec.runs_dir)).check()

    # 3. The journal is the truth; MLflow and the searcher are told from it.
    journal = resumed or Journal.create(spec)
    journal.lock()
    recorder = Recorder(spec, journal.sweep_id, journal.folder)
    recorder.open(None)
    recorder.sync(journal.outcomes)
    searcher = SEARCHERS[spec.searcher](legal, [OBJECTIVES[name] for name in spec.objectives], spec.seed)
    for outcome in journal.outcomes:
        searcher.tell(outcome)

    # 4. Trial after trial, until the space or the budget is spent.
    desk = SweepDesk(spec, searcher, journal, recorder, screen, cluster, cost.Prices.of(spec, price))
    screen.planned(candidates, desk.trials_left())
    interrupted = False
    try:
        if desk.trials_left():
            launcher.run(desk, data, journal.folder / "ray.log")
        else:
            desk.next(0)  # nothing may start: says why
    except KeyboardInterrupt:
        interrupted = True

    # 5. The trade-off, written down.
    return conclude(desk, candidates, interrupted)


def legal_candidates(spec: SweepSpec, cluster: Cluster) -> list[Candidate]:
    """Enumerate the space; refuse what the cluster cannot hold, and a space in which nothing is legal."""
    widest = max(spec.system.values()["num_workers"])
    if spec.launcher == "ray" and widest > cluster.workers:
        raise UserError(too_wide(spec, cluster, widest))
    shape = model.shape(spec.model, spec.model_revision)
    candidates = enumerate_candidates(spec, Context(cluster, shape, spec.launcher))
    if not any(c.legal for c in candidates):
        rules = "; ".join(
            f"{rule} ({n} of {len(candidates)} candidates)" for rule, n in pruned_rules(candidates).items()
        )
        raise UserError(f"no candidate of this space is legal: {rules}")
    return candidates


def too_wide(spec: SweepSpec, cluster: Cluster, widest: int) -> str:
    """Say that the cluster is too small, and what would fit."""
    unit = "GPU" if cluster.device == "cuda" else "CPU"
    need = widest * (1 if cluster.device == "cuda" else spec.ray.cpus_per_worker)
    advice = f"system.num_workers={max(cluster.workers, 1)}"
    if cluster.device == "cuda" and cluster.workers == 0:
        advice = "device=cpu"
    elif cluster.device == "cpu":
        advice += f", or ray.cpus_per_worker={cluster.workers * spec.ray.cpus_per_worker / widest:.2g} to share cores"
    return (
        f"system.num_workers={widest} needs {need:g} {unit}s, and the cluster has room for {cluster.workers} "
        f"worker(s) ({cluster.description}); use {advice}"
    )


def tokenise(spec: SweepSpec, legal: Sequence[Candidate], device: str, screen: Screen) -> dict[int, TrialData]:
    """Read and tokenise the data once for each seq_len of the space."""
    tokenizer = model.tokenizer(spec.model, spec.model_revision)
    data: dict[int, TrialData] = {}
    for candidate in legal:
        seq_len = int(candidate.learning["seq_len"])
        if seq_len not in data:
            data[seq_len] = prepare(trial_config(spec, candidate, device), tokenizer)
            for note in data[seq_len].notes:
                screen.note(note)
    return data


def conclude(desk: SweepDesk, candidates: Sequence[Candidate], interrupted: bool) -> Report:
    """Compute the frontier, write it to the folder and to MLflow, and say how the sweep ended."""
    spec, outcomes = desk.spec, desk.journal.outcomes
    objectives = [OBJECTIVES[name] for name in spec.objectives]
    front = frontier({o.trial_id: o.metrics for o in outcomes if o.status == "COMPLETED"}, objectives)
    desk.journal.write_json("frontier.json", front.to_json({o.trial_id: o.config for o in outcomes}))
    desk.journal.write_candidates(candidates, {o.candidate_id: o.status for o in outcomes})
    untried = len([c for c in candidates if c.legal]) - len({o.candidate_id for o in outcomes})
    failing = desk.failing
    ended: Literal["complete", "budget", "failing", "interrupted"] = (
        "interrupted" if interrupted else "failing" if failing else "budget" if untried else "complete"
    )
    why = "interrupted" if interrupted else desk.why or "every legal candidate was tried"
    headline = f"{len(front.points)} configuration(s) on the frontier of {len(outcomes)} trials; {why}"
    status: Literal["FINISHED", "KILLED", "FAILED"] = "KILLED" if interrupted else "FAILED" if failing else "FINISHED"
    desk.recorder.close(outcomes, front, status, why, headline)
    return Report(
        spec,
        desk.journal.sweep_id,
        desk.journal.folder,
        tuple(candidates),
        tuple(outcomes),
        front,
        desk.target,
        ended,
        why,
        untried,
        tuple(warnings(outcomes) + desk.recorder.notes),
        desk.recorder.url(),
        desk.recorder.ui_command(),
    )


def warnings(outcomes: Sequence[TrialOutcome]) -> list[str]:
    """Return what a person should look at twice: trials that should differ and do not, samples that differ."""
    found = []
    by_loss: dict[float, TrialOutcome] = {}
    for outcome in outcomes:
        loss = outcome.metrics.get("train_loss")
        if loss is None:
            continue
        other = by_loss.setdefault(loss, outcome)
        if other is not outcome and _learning(other) != _learning(outcome):
            found.append(
                f"trials {other.trial_id} and {outcome.trial_id} differ in what they learn but have the same "
                "loss to the last digit: does the setting reach the trainer?"
            )
    return found + sample_faults(outcomes)


def sample_faults(outcomes: Sequence[TrialOutcome]) -> list[str]:
    """Return the trials whose updates did not hold the same samples as the first trial of the same batches."""
    found, first = [], dict[tuple[Any, ...], TrialOutcome]()
    for outcome in outcomes:
        measured = outcome.measured
        if measured is None:
            continue
        group = tuple(outcome.config.get(name) for name in ("global_batch_size", "seq_len", "seed"))
        other = first.setdefault(group, outcome).measured
        assert other is not None
        if any(a != b for a, b in zip(other.fingerprints, measured.fingerprints, strict=False)):
            found.append(
                f"trial {outcome.trial_id} did not consume the samples that trial {first[group].trial_id} did: "
                "they cannot be compared"
            )
    return found


def _learning(outcome: TrialOutcome) -> Any:
    return outcome.trial_config.get("learning")
