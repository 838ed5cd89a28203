"""One sweep, to be read from top to bottom: check, enumerate, tokenise, search, measure, trade off, record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from sweeps import cost, signals
from sweeps.advice import Advice, advise
from sweeps.candidates import (
    Candidate,
    Cluster,
    Context,
    baseline_of,
    data_tree,
    enumerate_candidates,
    may_run,
    pruned_rules,
)
from sweeps.clusters import price_per_gpu_hour
from sweeps.compose import effective
from sweeps.decide import simplicity
from sweeps.desk import Screen, SweepDesk
from sweeps.journal import Journal, check_writable
from sweeps.knowledge import knowledge_of
from sweeps.launch import make_launcher
from sweeps.machines import machine_here
from sweeps.objectives import OBJECTIVES
from sweeps.outcome import TrialOutcome
from sweeps.pareto import Frontier, frontier, with_ties
from sweeps.predict import predict
from sweeps.record import Recorder
from sweeps.scaling import RATE, Scaling, draw, scaling
from sweeps.search import SEARCHERS, all_tried
from sweeps.spec import SweepSpec
from sweeps.workload import OfData
from trainers import model
from trainers.config import TrialConfig, from_tree
from trainers.errors import UserError
from trainers.prepare import TrialData, prepare
from trainers.shape import ModelShape
from trainers.timing import doubts

T = TypeVar("T")
Ended = Literal["complete", "budget", "failing", "interrupted", "broken"]
MLFLOW_STATUS: dict[Ended, Literal["FINISHED", "KILLED", "FAILED"]] = {
    "complete": "FINISHED",
    "budget": "FINISHED",
    "failing": "FAILED",
    "interrupted": "KILLED",
    "broken": "FAILED",
}


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
    ended: Ended
    why: str
    spent: str | None  # the key of the budget, or of the searcher's limit, that ended it
    untried: int
    warnings: tuple[str, ...]
    advice: tuple[Advice, ...]
    scaling: tuple[Scaling, ...]
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
            self._found += [fault for fault in error.faults if fault not in self._found]
            return None

    def raise_any(self) -> None:
        if self._found:
            raise UserError(self._found)


def run_sweep(spec: SweepSpec, screen: Screen, resumed: Journal | None = None) -> Report:
    """Run or continue a sweep. Raises UserError, with every fault, before anything is launched or written."""
    with make_launcher(spec) as launcher:
        # 1. What there is to run on, and what may run there.
        cluster = launcher.cluster()
        screen.note(cluster.description)

        # 2. Everything that could be wrong, before the first write; the store last, since looking at it creates it.
        faults = Faults()
        shape = faults.of(lambda: model.shape(spec.model, spec.model_revision))
        legality = faults.of(lambda: context_of(spec, cluster, shape))
        candidates = faults.of(lambda: enumerate_space(spec, legality)) if legality is not None else None
        candidates = candidates or []
        baseline = faults.of(lambda: baseline_of(spec, legality)) if legality is not None else None
        if baseline is not None and baseline.id not in {c.id for c in candidates}:
            candidates = [baseline, *candidates]
        legal = faults.of(lambda: legal_of(candidates)) or []
        faults.of(lambda: check_writable(Path(spec.runs_dir)))
        price = faults.of(lambda: price_per_gpu_hour(spec, screen.note)) or 0.0
        data = faults.of(lambda: tokenise(spec, screen, legal)) or {}
        faults.raise_any()
        launcher.start()
        Recorder(spec, "", Path(spec.runs_dir)).check()

        # What candidates are predicted for.
        assert legality is not None, "a fault of it was raised"
        workload = OfData(data, spec.budget.tokens_per_trial, spec.epochs)
        machine = machine_here(cluster, spec.cluster, screen.note)
        context = dataclasses.replace(legality, workload=workload, machine=machine)

        # 3. The journal is the truth; MLflow and the searcher are told from it.
        journal = resumed or Journal.create(spec)
        journal.write_candidates(candidates, states(journal.outcomes))
        recorder = Recorder(spec, journal.sweep_id, journal.folder)
        objectives = [OBJECTIVES[name] for name in spec.objectives]
        known = knowledge_of(spec, legal, context, price, baseline.id if baseline is not None else None)
        searcher = SEARCHERS[spec.searcher](legal, objectives, spec.seed, known)
        for outcome in journal.outcomes:
            if not outcome.cut_short:
                searcher.tell(outcome)
        desk = SweepDesk(spec, searcher, journal, recorder, screen, context, cost.Prices.of(spec, price))

        # 4. Trial after trial, until the space or the budget is spent; whatever ends it, what there is gets concluded.
        stopped: BaseException | None = None
        try:
            with signals.held():
                recorder.open()
                recorder.sync(journal.outcomes)
            screen.planned(candidates, desk.trials_left())
            if desk.trials_left():
                launcher.run(desk, data, journal.folder / "ray.log")
            else:
                desk.next(0)  # nothing may start: says why
        except (KeyboardInterrupt, Exception) as error:
            stopped = error

        # 5. The trade-off, written down.
        report = conclude(desk, candidates, stopped)
        if stopped is not None and not isinstance(stopped, KeyboardInterrupt):
            raise stopped
        return report


def context_of(spec: SweepSpec, cluster: Cluster, shape: ModelShape | None) -> Context:
    """Return what legality depends on."""
    if shape is not None:  # the config need not be read once more
        positions: int | None = shape.max_position_embeddings
    else:
        positions = model.max_positions(spec.model, spec.model_revision)
    return Context(cluster, shape, positions, spec.launcher)


def enumerate_space(spec: SweepSpec, context: Context) -> list[Candidate]:
    """Enumerate the space; refuse what the cluster cannot hold."""
    widest = max(spec.system.values()["num_workers"])
    if spec.launcher == "ray" and widest > context.cluster.workers:
        raise UserError(too_wide(spec, context.cluster, widest))
    return enumerate_candidates(spec, context)


def legal_of(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the legal candidates; refuse a space that has others only."""
    legal = [c for c in candidates if c.legal]
    if candidates and not legal:
        rules = "; ".join(
            f"{rule} ({n} of {len(candidates)} candidates)" for rule, n in pruned_rules(candidates).items()
        )
        raise UserError(f"no candidate of this space is legal: {rules}")
    return legal


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


def tokenise(spec: SweepSpec, screen: Screen, legal: Sequence[Candidate]) -> dict[int, TrialData]:
    """Read the data once, and return it for each seq_len of the space, and of a baseline beside it."""
    tokenizer = model.tokenizer(spec.model, spec.model_revision)
    lengths = list(dict.fromkeys([*spec.learning.values()["seq_len"], *(int(c.learning["seq_len"]) for c in legal)]))
    data = prepare(from_tree(TrialConfig, data_tree(spec)), tokenizer, lengths)
    for prepared in data.values():
        for note in prepared.notes:
            screen.note(note)
    return data


def conclude(desk: SweepDesk, candidates: Sequence[Candidate], stopped: BaseException | None) -> Report:
    """Compute the frontier and what to change, write both to the folder and to MLflow, and say how the sweep ended."""
    spec, journal, context = desk.spec, desk.journal, desk.context
    attempts = effective(journal.outcomes, desk.prices.gpu_hour)
    outcomes = list({o.trial_id: o for o in attempts}.values())  # of each trial the last attempt
    objectives = [OBJECTIVES[name] for name in spec.objectives]
    simplest_first = sorted((o for o in outcomes if o.competes), key=simplicity)
    figures = {o.trial_id: o.metrics for o in simplest_first}
    front = with_ties(frontier(figures, objectives), figures)
    journal.write_json("frontier.json", front.to_json({o.trial_id: o.config for o in outcomes}))
    tried = {o.candidate_id for o in outcomes if not o.cut_short}
    again = {o.candidate_id for o in outcomes if o.cut_short}
    left = {c.id for c in desk.searcher.untried} | again
    # One that was handed out and never ran, as there was no room for it, is not composed.
    composed = {c.id: "composed" for c in candidates if c.id not in left | desk.searcher.seen}
    journal.write_candidates(candidates, {**composed, **desk.searcher.ruled_out, **states(outcomes)})
    untried = sum(c.legal and c.id not in tried and c.id in left for c in candidates)
    ended, why = ending(desk, stopped, untried)
    advice = advise(
        outcomes,
        context.shape,
        lambda config: may_run(spec.model, config, context),
        lambda config: found.accounts if (found := predict(config, context)) is not None else None,
    )
    scaled = scaling(outcomes)
    journal.write_json("advice.json", [dataclasses.asdict(a) for a in advice])
    if scaled:
        journal.write_json("scaling.json", [dataclasses.asdict(s) for s in scaled])
        draw(scaled, labels([s.config for s in scaled]), journal.folder / "scaling.png")
    headline = f"{len(front.points)} configuration(s) on the frontier of {len(outcomes)} trials; {why}"
    desk.recorder.close(attempts, front, MLFLOW_STATUS[ended], why, headline)
    journal.close()
    return Report(
        spec,
        journal.sweep_id,
        journal.folder,
        tuple(candidates),
        tuple(outcomes),
        front,
        desk.target,
        ended,
        why,
        desk.spent if ended == "budget" else desk.searcher.limit if ended == "complete" else None,
        untried,
        tuple(warnings(outcomes, spec.precision) + desk.recorder.notes),
        tuple(advice),
        tuple(scaled),
        desk.recorder.url(),
        desk.recorder.ui_command(),
    )


def labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what tells configurations apart, in words."""
    differing = [n for n in dict.fromkeys(n for c in configs for n in c) if len({str(c.get(n)) for c in configs}) > 1]
    return [", ".join(f"{n}={c[n]}" for n in differing if n in c) or "the configuration" for c in configs]


def ending(desk: SweepDesk, stopped: BaseException | None, untried: int) -> tuple[Ended, str]:
    """Return how and why a sweep ended."""
    if isinstance(stopped, KeyboardInterrupt):
        return "interrupted", "interrupted"
    if stopped is not None:
        return "broken", f"{type(stopped).__name__}: {stopped}".splitlines()[0]
    why = desk.why or all_tried(desk.searcher)
    finished = bool(desk.searcher.why) and why == desk.searcher.why
    return ("failing" if desk.failing else "budget" if untried and not finished else "complete"), why


def states(outcomes: Sequence[TrialOutcome]) -> dict[str, str]:
    """Return what became of the candidates that ran: id to status."""
    return {o.candidate_id: o.status for o in outcomes}


def warnings(outcomes: Sequence[TrialOutcome], precision: float) -> list[str]:
    """Return what a person should look at twice: trials that should differ and do not, samples that differ."""
    found = []
    by_loss: dict[tuple[float, float], TrialOutcome] = {}
    for outcome in outcomes:
        # Before the first update all are equal, so the loss after the last one must be, too.
        losses = outcome.metrics.get("train_loss"), outcome.metrics.get("eval_loss")
        if losses[0] is None or losses[1] is None:
            continue
        other = by_loss.setdefault((losses[0], losses[1]), outcome)
        if other is not outcome and _learning(other) != _learning(outcome):
            found.append(
                f"trials {other.trial_id} and {outcome.trial_id} differ in what they learn but have the same "
                "loss to the last digit: does the setting reach the trainer?"
            )
    found += drifts(outcomes) + sample_faults(outcomes)
    for outcome in outcomes:
        measured = outcome.measured
        doubted = doubts(measured, precision) if measured is not None else []
        if doubted:
            found.append(f"trial {outcome.trial_id}: {'; '.join(doubted)}")
    differ = [(o.trial_id, o.parity.why) for o in outcomes if o.parity is not None and o.differs]
    return found + [f"trial {trial} SEMANTICS_DIFFER, and is kept off the frontier: {why}" for trial, why in differ]


def drifts(outcomes: Sequence[TrialOutcome]) -> list[str]:
    """Return where a trial that was timed again was not as fast as before, by more than both intervals."""
    by_id, found = {o.trial_id: o for o in outcomes}, []
    for again in (o for o in outcomes if o.repeats is not None):
        first = by_id.get(again.repeats or "", again)
        rates = [o.metrics.get(RATE) for o in (first, again)]
        if rates[0] is None or rates[1] is None:
            continue
        change = rates[1] / rates[0] - 1
        known = sum(o.metrics.get("step_time_precision", 0.0) for o in (first, again))
        if abs(change) > known:
            found.append(
                f"trial {first.trial_id} was timed again as trial {again.trial_id}, and was {abs(change):.0%} "
                f"{'faster' if change > 0 else 'slower'}: the machine drifts, and trials far apart in time compare "
                "no better than that"
            )
    return found


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


def _learning(outcome: TrialOutcome) -> dict[str, Any]:
    """Return what must show in the losses: not seq_len, which changes nothing where no row is cut off."""
    return {k: v for k, v in outcome.trial_config.get("learning", {}).items() if k != "seq_len"}
