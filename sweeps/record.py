"""The sweep in MLflow: one run for the sweep, one below it for each trial.

Everything that is sent comes from outcomes that the journal already holds, and sending it again changes nothing. So
an outage costs no trial: what waits is sent at the next call, or by the next `resume`.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from sweeps import mlflow_note, mlflow_page, space
from sweeps import mlflow_view as view
from sweeps.compose import OFF
from sweeps.mlflow_store import Artifacts, Store, brief, is_refusal, outages
from sweeps.mlflow_store import tracking_uri as tracking_uri
from sweeps.outcome import TrialOutcome
from sweeps.pareto import Frontier, frontier
from sweeps.spec import SweepSpec
from trainers.errors import UserError

Key = tuple[str, int]  # trial id, attempt
Status = Literal["FINISHED", "KILLED", "FAILED"]

# The rank of a trial that has left the frontier: MLflow cannot unset a metric, and runs sorted by rank must begin
# with the frontier. The tag `frontier` is what tells.
LEFT_FRONTIER = 9999
SLOW_S, PAUSE_S = 2.0, 60.0  # after an outage that took so long to notice, the next trials wait so long to be sent
FILES = (
    "trials.jsonl", "frontier.json", "candidates.jsonl", "frontier", "advice.json", "scaling.json", "scaling.png",
    "traces",
)  # fmt: skip


@dataclass(frozen=True)
class _Child:
    """A trial's run as MLflow has it."""

    run_id: str
    config_hash: str
    done: bool = False  # it holds everything
    on_frontier: bool = False
    rank: float | None = None
    deleted: bool = False  # by a person: neither sent again nor changed

    @classmethod
    def of(cls, run: Any) -> _Child:
        tags, info = run.data.tags, run.info
        deleted = info.lifecycle_stage == "deleted"
        done = deleted or info.status in ("FINISHED", "FAILED")  # KILLED may lack what had not been sent by then
        on_frontier, rank = tags.get("frontier") == "true", run.data.metrics.get(view.RANK)
        return cls(info.run_id, tags.get("trial.config_hash", ""), done, on_frontier, rank, deleted)


@dataclass(frozen=True)
class _Ending:
    """How the sweep ended, until MLflow has it."""

    outcomes: tuple[TrialOutcome, ...]
    frontier: Frontier
    status: Status
    reason: str
    headline: str


class Recorder:
    """Keeps MLflow in step with the journal of one sweep."""

    def __init__(self, spec: SweepSpec, sweep_id: str, folder: Path) -> None:
        self.spec, self.sweep_id, self.folder = spec, sweep_id, folder
        self._store = Store(spec.space)
        self._remarks: list[str] = []
        self._artifacts = Artifacts(self._store, folder, self._remarks.append)
        self._id = sweep_id  # what the tag sweep.id holds: see _identify
        self._run_id = ""  # of the sweep's run; empty until it is found, and again after an outage
        self._children: dict[Key, _Child] = {}
        self._waiting: dict[Key, TrialOutcome] = {}
        self._refused: set[Key] = set()
        self._ending: _Ending | None = None
        self._outage, self._paused_until = "", 0.0

    # -- what the sweep calls -------------------------------------------------------------------------------------

    @property
    def notes(self) -> list[str]:
        """Return what a person should know: artifacts or trials that MLflow does not have, and why."""
        return [*dict.fromkeys(self._remarks), *([self._outage] if self._outage else [])]

    @property
    def pending(self) -> int:
        """Return how many trials wait to be sent."""
        return len(self._waiting)

    def check(self) -> None:
        """Make sure that the store answers and holds the experiment. Raises UserError, before anything is launched."""
        self._store.check()

    def open(self) -> None:
        """Find or make the sweep's run, and end the runs of sweeps whose process is gone."""
        with self._outage_noted():
            self._attach()
            self.reconcile()

    def record(self, outcome: TrialOutcome) -> None:
        """Send one trial, and any that wait."""
        self._queue(outcome)
        if time.monotonic() >= self._paused_until:
            self._flush()

    def sync(self, outcomes: Sequence[TrialOutcome]) -> None:
        """Send every outcome that MLflow does not have, and end runs that no outcome belongs to."""
        for outcome in outcomes:
            self._queue(outcome)
        self._flush()
        if not self._outage:
            with self._outage_noted():
                self._end_orphans({_key(o) for o in outcomes})

    def close(
        self, outcomes: Sequence[TrialOutcome], frontier: Frontier, status: Status, reason: str, headline: str
    ) -> None:
        """Record the frontier and how the sweep ended. After an outage, the next `sync` or `resume` does it."""
        table = self.folder / "frontier" / "trials.csv"
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text(view.trials_csv(outcomes, frontier.ranks()), encoding="utf-8")
        self._ending = _Ending(tuple(outcomes), frontier, status, reason, headline)
        self.sync(outcomes)

    def url(self) -> str:
        """Return the address that opens this sweep's comparison."""
        return self._store.url(self._page())

    def ui_command(self) -> str | None:
        """Return the command that serves the record, or None where a server already does."""
        return self._store.ui_command()

    def reconcile(self) -> None:
        """End the runs of sweeps on this host whose process is gone: nothing else ever would."""
        self._store.end_abandoned(own=self._run_id)

    # -- outages --------------------------------------------------------------------------------------------------

    @contextmanager
    def _outage_noted(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        except BaseException as error:  # a stop in the middle of a call, too
            self._run_id = ""  # what MLflow has is looked up again: a call may have been carried out unanswered
            if not isinstance(error, outages() + (UserError,)):
                raise
            if time.monotonic() - started > SLOW_S:
                self._paused_until = time.monotonic() + PAUSE_S
            verb = "refuses" if is_refusal(error) else "does not answer"
            self._outage = f"MLflow {verb} ({brief(error)}); {self._what_waits()}"

    def _what_waits(self) -> str:
        if self.pending == 0:
            return f"resume={self.sweep_id} completes the record"
        wait, are = ("trial waits", "is") if self.pending == 1 else ("trials wait", "are")
        return f"{self.pending} {wait} in trials.jsonl and {are} sent when it is back"

    # -- the sweep's run ------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        """Find the sweep's run and its trials', or make the run."""
        if self._run_id:
            return
        self._store.connect()
        self._id = self._identify()
        found = self._store.runs("sweep", self._id)
        name, tags = self.spec.run_name or self._id, {"sweep.id": self._id, "sweep.role": "sweep"}
        run = found[-1] if found else self._store.create_run(name, time.time(), tags)
        self._run_id = run.info.run_id
        if run.info.lifecycle_stage == "deleted":
            self._store.client.restore_run(self._run_id)
        self._store.client.update_run(self._run_id, status="RUNNING")
        trials = self._store.runs("trial", self._id)
        self._children = {_run_key(run): _Child.of(run) for run in trials}
        self._describe()
        self._artifacts.probe(run, self._id)
        self._save_view(())

    def _identify(self) -> str:
        """Return what the tag `sweep.id` holds: the sweep's id, or more where the store has another sweep of that name.

        Two checkouts that share a server, or a folder that was removed, lead to the same id on the same day. The file
        says which of the store's sweeps this one is.
        """
        file = self.folder / "mlflow_id"
        if file.is_file():
            return file.read_text(encoding="utf-8").strip()
        has_run = (self.folder / "trials.jsonl").is_file()
        taken = not has_run and self._store.runs("sweep", self.sweep_id)
        name = f"{self.sweep_id}-{uuid.uuid4().hex[:4]}" if taken else self.sweep_id
        self.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(name + "\n", encoding="utf-8")
        return name

    def _describe(self) -> None:
        """Log what the sweep is. Params cannot change: a resume with other ones is told, not overwritten."""
        spec = self.spec
        params = {"space": spec.space, "searcher": spec.searcher, "seed": view.text(spec.seed)}
        params["reference_point"] = "10 % worse than the worst trial"
        tags = {
            "sweep.space": spec.space,
            "sweep.space_hash": view.space_hash(spec),
            "sweep.folder": self.sweep_id,
            "sweep.objectives": ", ".join(spec.objectives),
            "sweep.host": socket.gethostname(),
            "sweep.pid": str(os.getpid()),
            "sweep.reason": "running",
        }
        there = self._store.client.get_run(self._run_id).data.params
        drift = "; ".join(f"{k}: {there[k]} → {v}" for k, v in params.items() if there.get(k, v) != v)
        if drift:
            tags["sweep.drift"] = drift
            self._remarks.append(f"MLflow keeps the settings that the sweep was started with ({drift})")
        self._store.log(self._run_id, {k: v for k, v in params.items() if k not in there}, tags=tags)

    # -- trials ---------------------------------------------------------------------------------------------------

    def _queue(self, outcome: TrialOutcome) -> None:
        if _key(outcome) not in self._refused and not self._is_there(outcome):
            self._waiting[_key(outcome)] = outcome

    def _is_there(self, outcome: TrialOutcome) -> bool:
        """Return whether MLflow has the trial in whole, or another in its place: that is told, not overwritten."""
        child = self._children.get(_key(outcome))
        if child is None or child.config_hash == outcome.candidate_id:
            return child is not None and child.done
        other = f"another configuration ({child.config_hash}, now {outcome.candidate_id})"
        self._remarks.append(f"trial {outcome.trial_id} is in MLflow with {other}; that run is left as it is")
        return True

    def _flush(self) -> None:
        with self._outage_noted():
            self._attach()
            for key, outcome in list(self._waiting.items()):
                self._send_or_refuse(outcome)
                del self._waiting[key]
            if self._ending is not None:
                self._conclude(self._ending)
                self._ending = None
            self._outage = ""

    def _send_or_refuse(self, outcome: TrialOutcome) -> None:
        try:
            if not self._is_there(outcome):
                self._send(outcome)
        except outages() as error:
            if not is_refusal(error):
                raise
            self._refused.add(_key(outcome))  # it would be refused for ever, and hold up the others
            if (child := self._children.get(_key(outcome))) is not None:
                self._store.client.set_terminated(child.run_id, "KILLED")
            self._remarks.append(f"MLflow refused trial {outcome.trial_id}: {brief(error)}; trials.jsonl has it")

    def _send(self, outcome: TrialOutcome) -> None:
        """Send a trial in whole. Its run ends last, so a run that has ended holds everything."""
        store, key, objectives = self._store, _key(outcome), self.spec.objectives
        status, end = "FAILED" if outcome.status == "FAILED" else "FINISHED", view.milliseconds(outcome.ended_at)
        tags = view.tags(outcome, self._id, self._run_id, objectives)
        if key not in self._children:
            run = store.create_run(view.run_name(outcome), outcome.started_at, tags)
            self._children[key], tags = _Child(run.info.run_id, outcome.candidate_id), {}
        child = self._children[key]
        readings = view.final_metrics(outcome, objectives) + view.histories(outcome)
        store.log(child.run_id, view.params(outcome), readings, tags)
        self._artifacts.send_texts(child.run_id, view.files(outcome))
        store.client.set_terminated(child.run_id, status, end)
        self._children[key] = replace(child, done=True)

    def _end_orphans(self, known: set[Key]) -> None:
        for key, child in self._children.items():
            if not child.done and key not in known:
                self._store.log(child.run_id, tags={"trial.reason": "no line of trials.jsonl belongs to this run"})
                self._store.client.set_terminated(child.run_id, "KILLED")
                self._children[key] = replace(child, done=True)

    # -- the end --------------------------------------------------------------------------------------------------

    def _conclude(self, ending: _Ending) -> None:
        self._mark_frontier(ending)
        self._log_composed(ending)
        self._log_totals(ending)
        self._save_view(ending.outcomes)
        reference = ending.frontier.reference_point
        tags = {
            "mlflow.note.content": self._note(ending),
            "sweep.reason": view.cut(ending.reason, 1000) or "ended",
            "sweep.reference_point": view.text(reference) if reference else "none",
        }
        self._store.log(self._run_id, tags=tags)
        self._artifacts.send(self._run_id, *(path for name in FILES if (path := self.folder / name).exists()))
        self._artifacts.send_texts(self._run_id, {"spec.yaml": space.to_yaml(view.without_secrets(self.spec))})
        self._store.client.set_terminated(self._run_id, ending.status)

    def _mark_frontier(self, ending: _Ending) -> None:
        """Tag and colour the frontier, and unmark what has left it."""
        ranks = ending.frontier.ranks()
        latest = {o.trial_id: _key(o) for o in ending.outcomes if o.status == "COMPLETED"}
        wanted = {latest[trial]: rank for trial, rank in ranks.items() if trial in latest}
        now, step = view.milliseconds(time.time()), len(ending.outcomes)
        for key, child in self._children.items():
            on_frontier, rank = key in wanted, float(wanted.get(key, LEFT_FRONTIER))
            concerned = not child.deleted and (on_frontier or child.on_frontier)
            if concerned and (child.on_frontier, child.rank) != (on_frontier, rank):
                reading = view.Reading(view.RANK, rank, now, step)
                self._store.log(child.run_id, readings=[reading], tags=view.frontier_tags(on_frontier))
                self._children[key] = replace(child, on_frontier=on_frontier, rank=rank)

    def _log_composed(self, ending: _Ending) -> None:
        """Log what the configurations of probes cost, now that it is known, and whose learning that is."""
        for outcome in ending.outcomes:
            child = self._children.get(_key(outcome))
            if child is None or child.deleted or not (outcome.composed_with or OFF in outcome.metrics):
                continue
            tags = {"trial.composed_with": outcome.composed_with} if outcome.composed_with else {}
            self._store.log(child.run_id, readings=view.final_metrics(outcome, self.spec.objectives), tags=tags)

    def _log_totals(self, ending: _Ending) -> None:
        """Log the sweep's totals at the step that is the number of trials, where they have changed."""
        outcomes, client, now = ending.outcomes, self._store.client, view.milliseconds(time.time())
        totals = {
            "sweep/frontier_size": float(len(ending.frontier.points)),
            "sweep/trials_completed": float(sum(o.status == "COMPLETED" for o in outcomes)),
            "sweep/trials_oom": float(sum(o.status == "OOM" for o in outcomes)),
            "sweep/gpu_hours": view.rounded(sum(o.gpu_hours for o in outcomes)),
        }
        there = client.get_run(self._run_id).data.metrics
        readings = [view.Reading(k, v, now, len(outcomes)) for k, v in totals.items() if there.get(k) != v]
        # Steps that an earlier close logged stay, so the curve has one value a step. The reference point only moves
        # outwards as trials are added, so the curve still never falls.
        volume = "sweep/hypervolume"
        known = {m.step for m in client.get_metric_history(self._run_id, volume)}
        for step, value in hypervolumes(outcomes, ending.frontier).items():
            if step not in known:
                at = view.milliseconds(outcomes[step - 1].ended_at)
                readings.append(view.Reading(volume, value, at, step))
        self._store.log(self._run_id, readings=readings)

    # -- what the page shows --------------------------------------------------------------------------------------

    def _page(self) -> str:
        key = view.param_key(self._id)
        query = f"workflowType=machine_learning&viewStateShareKey={quote(key)}&compareRunsMode=CHART"
        return f"{self._store.runs_page}?{query}"

    def _note(self, end: _Ending) -> str:
        page = self._store.runs_page
        links = {trial: f"{page}/{child.run_id}" for (trial, _), child in sorted(self._children.items())}
        resume = f"resume={self.sweep_id}" if end.status != "FINISHED" else ""
        commands = [command for command in (self.ui_command(), resume) if command]
        return mlflow_note.note(
            self.spec, end.outcomes, end.frontier, links, headline=end.headline, view=self._page(), commands=commands
        )

    def _save_view(self, outcomes: Sequence[TrialOutcome]) -> None:
        """Store the comparison as a view. Its format is undocumented, and old servers hold less: no reason to fail."""
        state = mlflow_page.saved_view(self.spec, self._id, outcomes, view.milliseconds(time.time()))
        tag = f"mlflow.sharedViewState.{view.param_key(self._id)}"
        with suppress(*outages()):
            self._store.client.set_experiment_tag(self._store.experiment_id, tag, state)


def hypervolumes(outcomes: Sequence[TrialOutcome], final: Frontier) -> dict[int, float]:
    """Return the hypervolume after each number of trials, all against the final reference point."""
    found: dict[int, float] = {}
    trials: dict[str, Mapping[str, float]] = {}
    for step, outcome in enumerate(outcomes, start=1):
        if outcome.competes:
            trials[outcome.trial_id] = outcome.metrics
        volume = frontier(trials, final.objectives, final.reference_point).hypervolume
        if volume is not None:
            found[step] = view.rounded(volume)
    return found


def _key(outcome: TrialOutcome) -> Key:
    return outcome.trial_id, outcome.attempt


def _run_key(run: Any) -> Key:
    return run.data.tags.get("trial.id", ""), int(run.data.tags.get("trial.attempt", 1))
