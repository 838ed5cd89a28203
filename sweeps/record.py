"""The sweep in MLflow: one run for the sweep, one below it for each trial. All use of MLflow is here.

Everything that is sent comes from outcomes that the journal already holds, and sending it again changes nothing. So
an outage costs no trial: what waits is sent at the next call, or by the next `resume`.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import socket
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from sweeps import mlflow_view as view
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
DEFAULT_UI = "http://127.0.0.1:5000"  # where `mlflow ui` serves
FILES = ("spec.yaml", "trials.jsonl", "frontier.json", "candidates.jsonl")
ACTIVE, ALL = 1, 3  # MLflow's ViewType
SERVERS = ("http", "https", "databricks")
DATABASES = ("postgresql", "mysql", "mssql")
REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS")
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # the default, 7, blocks a call for four minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


@dataclass(frozen=True)
class _Child:
    """A trial's run as MLflow has it."""

    run_id: str
    config_hash: str
    done: bool = False
    on_frontier: bool = False
    rank: float | None = None
    deleted: bool = False  # by a person: neither sent again nor changed


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
        self._client: Any = None
        self._experiment: Any = None
        self._parent: Any = None
        self._id = ""  # what the tag sweep.id holds, once that is known
        self._children: dict[Key, _Child] = {}
        self._waiting: dict[Key, TrialOutcome] = {}
        self._refused: set[Key] = set()
        self._ending: _Ending | None = None
        self._artifacts = True
        self._remarks: list[str] = []
        self._outage = ""
        self._paused_until = 0.0
        self._reference_point: Sequence[float] | None = None

    # -- what the sweep calls -------------------------------------------------------------------------------------

    @property
    def notes(self) -> list[str]:
        """Return what a person should know: artifacts or trials that MLflow does not have, and why."""
        return self._remarks + ([self._outage] if self._outage else [])

    @property
    def pending(self) -> int:
        """Return how many trials wait to be sent."""
        return len(self._waiting)

    def check(self) -> None:
        """Make sure that the store answers and holds the experiment. Raises UserError, before anything is launched."""
        uri = self._uri
        try:
            if uri.startswith("sqlite"):
                _prepare_sqlite(uri)
            self._connect()
        except UserError:
            raise
        except Exception as error:  # drivers, servers and file systems fail with types that have no common base
            raise UserError(_no_store(uri, error)) from error

    def open(self, reference_point: Sequence[float] | None) -> None:
        """Find or make the sweep's run, and end the runs of sweeps whose process is gone."""
        self._reference_point = reference_point
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

    def close(self, outcomes: Sequence[TrialOutcome], frontier: Frontier, status: Status, reason: str,
              headline: str) -> None:
        """Record the frontier and how the sweep ended. After an outage, the next `sync` or `resume` does it."""
        self._write_csv(outcomes, frontier)
        self._ending = _Ending(tuple(outcomes), frontier, status, reason, headline)
        self.sync(outcomes)

    def url(self) -> str:
        """Return the address that opens this sweep's comparison."""
        address = urlsplit(self._uri)
        base = _shown(self._uri, mask="").rstrip("/") if address.scheme in ("http", "https") else DEFAULT_UI
        return base if self._experiment is None else f"{base}/{self._page()}"

    def ui_command(self) -> str | None:
        """Return the command that serves the record, or None where a server already does."""
        if self._uri.startswith("sqlite"):
            return f"mlflow ui --backend-store-uri {shlex.quote(self._uri)}"
        if self._uri.startswith(DATABASES):
            return 'mlflow ui --backend-store-uri "$MLFLOW_TRACKING_URI"'  # the address may hold a password
        return None

    def reconcile(self) -> None:
        """End the runs of sweeps on this host whose process is gone: nothing else ever would."""
        for run in self._search("tags.sweep.role = 'sweep' and attributes.status = 'RUNNING'", ACTIVE):
            tags = run.data.tags
            if run.info.run_id == self._parent.info.run_id or tags.get("sweep.host") != socket.gethostname():
                continue
            if _alive(tags.get("sweep.pid", "")):
                continue
            folder = tags.get("sweep.folder", tags.get("sweep.id"))
            reason = f"the sweep's process is gone; resume it with resume={folder}"
            below = f"tags.mlflow.parentRunId = '{run.info.run_id}' and attributes.status = 'RUNNING'"
            for ghost in (*self._search(below, ACTIVE), run):
                self._client.set_tag(ghost.info.run_id, "sweep.reason", reason)
                self._client.set_terminated(ghost.info.run_id, "KILLED")

    # -- the store ------------------------------------------------------------------------------------------------

    @cached_property
    def _uri(self) -> str:
        return tracking_uri()

    def _connect(self) -> None:
        if self._experiment is not None:
            return
        client, name = _client(self._uri), self.spec.space
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            # Beside the database: MLflow's default is the directory that the first sweep was started in.
            path = _sqlite_path(self._uri)
            location = (path.parent / "mlruns" / view.param_key(name)).as_uri() if path else None
            try:
                client.create_experiment(name, artifact_location=location)
            except _outages():
                if client.get_experiment_by_name(name) is None:  # else another sweep has just made it
                    raise
            experiment = client.get_experiment_by_name(name)
        if experiment.lifecycle_stage == "deleted":
            raise UserError(f"the MLflow experiment {name!r} is deleted: restore it with `mlflow experiments restore "
                            f"--experiment-id {experiment.experiment_id}`, or give the space another name")
        self._client, self._experiment = client, experiment

    def _search(self, query: str, view_type: int) -> list[Any]:
        found: list[Any] = []
        token = None
        while True:
            page = self._client.search_runs([self._experiment.experiment_id], query, view_type, 1000, page_token=token)
            found += page
            token = page.token
            if not token:
                return found

    @contextmanager
    def _outage_noted(self) -> Iterator[None]:
        caught: tuple[type[Exception], ...] = (*_outages(), UserError)
        started = time.monotonic()
        try:
            yield
        except caught as error:
            self._parent = None  # what MLflow has is looked up again: a call may have been carried out unanswered
            if time.monotonic() - started > SLOW_S:
                self._paused_until = time.monotonic() + PAUSE_S
            verb = "refuses" if _is_refusal(error) else "does not answer"
            self._outage = f"MLflow {verb} ({_brief(error)}); {self._what_waits()}"

    def _what_waits(self) -> str:
        if self.pending == 0:
            return f"resume={self.sweep_id} completes the record"
        wait, are = ("trial waits", "is") if self.pending == 1 else ("trials wait", "are")
        return f"{self.pending} {wait} in trials.jsonl and {are} sent when it is back"

    # -- the sweep's run ------------------------------------------------------------------------------------------

    def _identify(self) -> str:
        """Return what the tag `sweep.id` holds: the sweep's id, or more where the store has another sweep of that name.

        Two checkouts that share a server, or a folder that was removed, lead to the same id on the same day. The file
        says which of the store's sweeps this one is.
        """
        file = self.folder / "mlflow_id"
        if file.is_file():
            return file.read_text(encoding="utf-8").strip()
        has_run = (self.folder / "trials.jsonl").is_file()
        taken = not has_run and self._search(_is_sweep(self.sweep_id), ALL)
        name = f"{self.sweep_id}-{uuid.uuid4().hex[:4]}" if taken else self.sweep_id
        self.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(name + "\n", encoding="utf-8")
        return name

    @property
    def _share_key(self) -> str:
        return view.param_key(self._id or self.sweep_id)

    def _page(self) -> str:
        return (f"#/experiments/{self._experiment.experiment_id}/runs?workflowType=machine_learning"
                f"&viewStateShareKey={self._share_key}&compareRunsMode=CHART")

    def _attach(self) -> None:
        """Find the sweep's run and its trials', or make the run."""
        if self._parent is not None:
            return
        self._connect()
        self._id = self._identify()
        found = self._search(_is_sweep(self._id), ALL)
        self._parent = found[-1] if found else self._client.create_run(
            self._experiment.experiment_id, run_name=self.spec.run_name or self._id,
            start_time=view.milliseconds(time.time()), tags={"sweep.id": self._id, "sweep.role": "sweep"})
        run_id = self._parent.info.run_id
        if self._parent.info.lifecycle_stage == "deleted":
            self._client.restore_run(run_id)
        self._client.update_run(run_id, status="RUNNING")
        trials = self._search(f"tags.sweep.role = 'trial' and tags.sweep.id = {_quoted(self._id)}", ALL)
        self._children = {_child_key(run): _child(run) for run in trials}
        self._describe()
        self._probe()
        self._save_view(())

    def _describe(self) -> None:
        """Log what the sweep is. Params cannot change: a resume with other ones is told, not overwritten."""
        spec, run_id = self.spec, self._parent.info.run_id
        reference = list(self._reference_point) if self._reference_point else "10 % worse than the worst trial"
        params = {"space": spec.space, "searcher": spec.searcher, "seed": view.text(spec.seed),
                  "reference_point": view.text(reference)}
        there = self._client.get_run(run_id).data.params
        tags = {"sweep.space": spec.space, "sweep.space_hash": view.space_hash(spec), "sweep.folder": self.sweep_id,
                "sweep.objectives": ", ".join(spec.objectives), "sweep.host": socket.gethostname(),
                "sweep.pid": str(os.getpid()), "sweep.reason": "running"}
        drift = "; ".join(f"{k}: {there[k]} → {v}" for k, v in params.items() if there.get(k, v) != v)
        if drift:
            tags["sweep.drift"] = drift
            self._remark(f"MLflow keeps the settings that the sweep was started with ({drift})")
        self._log(run_id, params={k: v for k, v in params.items() if k not in there}, tags=tags)

    # -- trials ---------------------------------------------------------------------------------------------------

    def _queue(self, outcome: TrialOutcome) -> None:
        key = _key(outcome)
        child = self._children.get(key)
        if child is not None and child.done:
            self._note_drift(outcome, child)
        elif key not in self._refused:
            self._waiting[key] = outcome

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
            self._send(outcome)
        except _outages() as error:
            if not _is_refusal(error):
                raise
            self._refused.add(_key(outcome))  # it would be refused for ever, and hold up the others
            if (child := self._children.get(_key(outcome))) is not None:
                self._client.set_terminated(child.run_id, "KILLED")
            self._remark(f"MLflow refused trial {outcome.trial_id}: {_brief(error)}; trials.jsonl has it")

    def _send(self, outcome: TrialOutcome) -> None:
        """Send a trial in whole. Its run ends last, so a run that has ended holds everything."""
        key = _key(outcome)
        child = self._children.get(key)
        if child is not None and (child.done or child.config_hash != outcome.candidate_id):
            self._note_drift(outcome, child)
            return
        tags = view.tags(outcome, self._id, self._parent.info.run_id, self.spec.objectives)
        if child is None:
            run = self._client.create_run(self._experiment.experiment_id, run_name=view.run_name(outcome), tags=tags,
                                          start_time=view.milliseconds(outcome.started_at))
            child, tags = _Child(run.info.run_id, outcome.candidate_id), {}
            self._children[key] = child
        self._log(child.run_id, view.params(outcome),
                  view.final_metrics(outcome, self.spec.objectives) + view.histories(outcome), tags)
        self._upload(child.run_id, view.files(outcome))
        self._client.set_terminated(child.run_id, "FAILED" if outcome.status == "FAILED" else "FINISHED",
                                    end_time=view.milliseconds(outcome.ended_at))
        self._children[key] = replace(child, done=True)

    def _note_drift(self, outcome: TrialOutcome, child: _Child) -> None:
        if child.config_hash != outcome.candidate_id:
            self._remark(f"trial {outcome.trial_id} is in MLflow with another configuration ({child.config_hash}, now "
                         f"{outcome.candidate_id}); that run is left as it is")

    def _end_orphans(self, known: set[Key]) -> None:
        for key, child in self._children.items():
            if not child.done and key not in known:
                self._log(child.run_id, tags={"trial.reason": "no line of trials.jsonl belongs to this run"})
                self._client.set_terminated(child.run_id, "KILLED")
                self._children[key] = replace(child, done=True)

    def _log(self, run_id: str, params: Mapping[str, str] | None = None, readings: Sequence[view.Reading] = (),
             tags: Mapping[str, str] | None = None) -> None:
        from mlflow.entities import Metric, Param, RunTag

        self._client.log_batch(run_id, metrics=[Metric(r.key, r.value, r.timestamp, r.step) for r in readings],
                               params=[Param(k, v) for k, v in (params or {}).items()],
                               tags=[RunTag(k, v) for k, v in (tags or {}).items()])

    # -- artifacts ------------------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """Find out before the first trial whether artifacts arrive."""
        self._artifacts = True
        location = urlsplit(self._parent.info.artifact_uri)
        server = urlsplit(self._uri)
        if server.scheme in ("http", "https") and location.scheme in ("", "file") and not _is_local(server.hostname):
            # A client on another machine would write to its own disk, without an error.
            self._without_artifacts(f"the server keeps them on its own disk, {location.path}: start it with "
                                    "--serve-artifacts and make a new experiment")
            return
        spec = self.folder / "spec.yaml"
        if spec.is_file():
            self._try_artifacts(self._client.log_artifact, self._parent.info.run_id, str(spec))
        else:
            self._upload(self._parent.info.run_id, {"sweep.txt": f"{self._id}\n"})

    def _upload(self, run_id: str, files: Mapping[str, str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content, encoding="utf-8")
            self._try_artifacts(self._client.log_artifacts, run_id, folder)

    def _try_artifacts(self, send: Callable[..., None], run_id: str, *arguments: str) -> None:
        if not self._artifacts:
            return
        try:
            send(run_id, *arguments)
        except Exception as error:  # each kind of artifact store raises its own library's types
            self._client.get_run(run_id)  # raises if the store is away: then it is not a matter of artifacts
            self._without_artifacts(_brief(error))

    def _without_artifacts(self, why: str) -> None:
        self._artifacts = False
        self._remark(f"artifacts cannot be uploaded to MLflow ({why}); params and metrics are recorded, the rest stays "
                     f"in {self.folder}")

    # -- the end --------------------------------------------------------------------------------------------------

    def _conclude(self, ending: _Ending) -> None:
        run_id = self._parent.info.run_id
        self._mark_frontier(ending)
        self._log_totals(ending)
        self._save_view(ending.outcomes)
        reference = ending.frontier.reference_point
        self._log(run_id, tags={
            "mlflow.note.content": self._note(ending), "sweep.reason": view.cut(ending.reason, 1000) or "ended",
            "sweep.reference_point": view.text(reference) if reference else "none"})
        for path in (self.folder / name for name in FILES):
            if path.is_file():
                self._try_artifacts(self._client.log_artifact, run_id, str(path))
        self._try_artifacts(self._client.log_artifacts, run_id, str(self.folder / "frontier"), "frontier")
        self._client.set_terminated(run_id, ending.status)

    def _mark_frontier(self, ending: _Ending) -> None:
        """Tag and colour the frontier, and unmark what has left it."""
        ranks = ending.frontier.ranks()
        latest = {o.trial_id: _key(o) for o in ending.outcomes if o.status == "COMPLETED"}
        wanted = {latest[trial]: rank for trial, rank in ranks.items() if trial in latest}
        for key, child in self._children.items():
            rank = wanted.get(key)
            if child.deleted or (rank is None and not child.on_frontier):
                continue
            value = float(LEFT_FRONTIER if rank is None else rank)
            if (child.on_frontier, child.rank) != (rank is not None, value):
                reading = view.Reading(view.RANK, value, view.milliseconds(time.time()), len(ending.outcomes))
                self._log(child.run_id, readings=[reading], tags=view.frontier_tags(rank is not None))
                self._children[key] = replace(child, on_frontier=rank is not None, rank=value)

    def _log_totals(self, ending: _Ending) -> None:
        """Log the sweep's totals at the step that is the number of trials, where they have changed."""
        outcomes, steps = ending.outcomes, len(ending.outcomes)
        totals = {
            "sweep/frontier_size": float(len(ending.frontier.points)),
            "sweep/trials_completed": float(sum(o.status == "COMPLETED" for o in outcomes)),
            "sweep/trials_oom": float(sum(o.status == "OOM" for o in outcomes)),
            "sweep/gpu_hours": view.rounded(sum(o.gpu_hours for o in outcomes)),
        }
        run_id = self._parent.info.run_id
        there = self._client.get_run(run_id).data.metrics
        now = view.milliseconds(time.time())
        readings = [view.Reading(k, v, now, steps) for k, v in totals.items() if there.get(k) != v]
        # Steps that an earlier close logged stay, so the curve has one value a step. The reference point only moves
        # outwards as trials are added, so the curve still never falls.
        known = {m.step for m in self._client.get_metric_history(run_id, "sweep/hypervolume")}
        readings += [view.Reading("sweep/hypervolume", value, view.milliseconds(outcomes[step - 1].ended_at), step)
                     for step, value in hypervolumes(outcomes, ending.frontier).items() if step not in known]
        self._log(run_id, readings=readings)

    def _note(self, ending: _Ending) -> str:
        page = f"#/experiments/{self._experiment.experiment_id}/runs"
        links = {trial: f"{page}/{child.run_id}" for (trial, _), child in sorted(self._children.items())}
        commands = [self.ui_command() or "", f"resume={self.sweep_id}" if ending.status != "FINISHED" else ""]
        return view.note(self.spec, ending.outcomes, ending.frontier, links, headline=ending.headline,
                         view=self._page(), commands=[c for c in commands if c])

    def _save_view(self, outcomes: Sequence[TrialOutcome]) -> None:
        """Store the comparison as a view. Its format is undocumented, and old servers hold less: no reason to fail."""
        keys = {r.key for o in outcomes for r in view.final_metrics(o, self.spec.objectives)}
        keys |= {"train/grad_norm", "train/learning_rate", "train/step_time_s"} if outcomes else set()
        with suppress(*_outages()):
            self._client.set_experiment_tag(
                self._experiment.experiment_id, f"mlflow.sharedViewState.{self._share_key}",
                view.saved_view(self.spec, self._id, keys, view.milliseconds(time.time())))

    def _write_csv(self, outcomes: Sequence[TrialOutcome], frontier: Frontier) -> None:
        folder = self.folder / "frontier"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "trials.csv").write_text(view.trials_csv(outcomes, frontier.ranks()), encoding="utf-8")

    def _remark(self, text: str) -> None:
        if text not in self._remarks:
            self._remarks.append(text)


def hypervolumes(outcomes: Sequence[TrialOutcome], final: Frontier) -> dict[int, float]:
    """Return the hypervolume after each number of trials, all against the final reference point."""
    found: dict[int, float] = {}
    trials: dict[str, Mapping[str, float]] = {}
    for step, outcome in enumerate(outcomes, start=1):
        if outcome.status == "COMPLETED":
            trials[outcome.trial_id] = outcome.metrics
        volume = frontier(trials, final.objectives, final.reference_point).hypervolume if trials else None
        if volume is not None:
            found[step] = view.rounded(volume)
    return found


def tracking_uri() -> str:
    """Return MLFLOW_TRACKING_URI, or mlflow.db of this directory; sqlite paths absolute. Raises UserError."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "").strip() or "sqlite:///mlflow.db"
    scheme = uri.partition("://")[0].partition("+")[0].lower() if "://" in uri else ""
    if scheme in (*SERVERS, *DATABASES) or uri in ("databricks", "databricks-uc"):
        return uri
    if scheme == "sqlite":
        return _absolute_sqlite(uri)
    offer = "; use MLFLOW_TRACKING_URI=sqlite:///mlflow.db, or the address of a server"
    if re.fullmatch(r"[\w.-]+:\d+/?", uri):
        raise UserError(f"MLFLOW_TRACKING_URI={uri} has no scheme: did you mean http://{uri}?")
    if scheme not in ("", "file"):
        raise UserError(f"MLFLOW_TRACKING_URI={_shown(uri)}: MLflow has no store {scheme}://{offer}")
    raise UserError(f"MLFLOW_TRACKING_URI={uri} is a file store, which MLflow refuses (maintenance mode){offer}")


def _absolute_sqlite(uri: str) -> str:
    head, _, rest = uri.partition(":///")
    path, mark, query = rest.partition("?")
    if not path or path == ":memory:":
        raise UserError(f"MLFLOW_TRACKING_URI={uri} is in memory and would be lost; use sqlite:///mlflow.db")
    return f"{head}:///{os.path.abspath(path)}{mark}{query}"


def _sqlite_path(uri: str) -> Path | None:
    return Path(uri.partition(":///")[2].partition("?")[0]) if uri.startswith("sqlite") else None


def _client(uri: str) -> Any:
    """Return a client that gives up soon and prints nothing."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):  # after the import, which sets both
        logging.getLogger(name).setLevel(logging.ERROR)
    return MlflowClient(uri, registry_uri=uri)


def _prepare_sqlite(uri: str) -> None:
    """Open the file before MLflow does, which would try for 100 seconds, and make a new one appear whole.

    A schema that two processes make at once, or that is interrupted, is broken for good.
    """
    path = _sqlite_path(uri)
    assert path is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            partial.touch()  # says at once if the folder cannot be written to
            _client(f"sqlite:///{partial}").search_experiments(max_results=1)
            _publish(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    with closing(sqlite3.connect(path, timeout=10)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.rollback()


def _publish(partial: Path, path: Path) -> None:
    """Give a file its name, unless another process has taken the name meanwhile."""
    try:
        os.link(partial, path)
    except FileExistsError:
        return
    except OSError:  # a file system without hard links
        partial.replace(path)


def _outages() -> tuple[type[Exception], ...]:
    """Return what a store that is away or unwell raises; requests' exceptions are OSErrors."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError, OSError


def _no_store(uri: str, error: Exception) -> str:
    """Say what is wrong with the store, and what to do about it."""
    said, shown = str(error), _shown(uri)
    if "Invalid Host header" in said:
        return (f"MLflow at {shown} answers 403 Invalid Host header: start the server with "
                f"--allowed-hosts {urlsplit(uri).netloc.rpartition('@')[2]}")
    if re.search(r"error code 40[13]\b", said):
        return (f"MLflow at {shown} refuses access: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD "
                f"({_brief(error)})")
    if uri.startswith("http"):
        return (f"MLflow at {shown} does not answer ({_brief(error)}): start the server, correct MLFLOW_TRACKING_URI, "
                "or unset it to record in mlflow.db of this directory")
    advice = "set MLFLOW_TRACKING_URI to a file in a folder that you can write to, or to a server"
    return f"MLflow cannot open {shown} ({_brief(error)}): {advice}"


def _is_refusal(error: Exception) -> bool:
    return getattr(error, "error_code", None) in REFUSALS


def _brief(error: BaseException) -> str:
    said = " ".join(str(error).split())
    cause = re.search(r"\[Errno -?\d+\] ([^'\")]+)|(timed out|Invalid Host header)|(error code \d+)", said)
    found = next(filter(None, cause.groups())) if cause else said
    return view.cut(found or type(error).__name__, 200)


def _shown(uri: str, mask: str = "***@") -> str:
    return re.sub(r"//[^@/]*@", f"//{mask}", uri)


def _is_local(host: str | None) -> bool:
    return host in ("localhost", "127.0.0.1", "::1", socket.gethostname())


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (ValueError, OSError):
        return False
    return True


def _quoted(value: str) -> str:
    return f'"{value}"' if "'" in value else f"'{value}'"


def _is_sweep(sweep: str) -> str:
    return f"tags.sweep.role = 'sweep' and tags.sweep.id = {_quoted(sweep)}"


def _key(outcome: TrialOutcome) -> Key:
    return outcome.trial_id, outcome.attempt


def _child_key(run: Any) -> Key:
    return run.data.tags.get("trial.id", ""), int(run.data.tags.get("trial.attempt", 1))


def _child(run: Any) -> _Child:
    tags = run.data.tags
    # A run that was KILLED may lack what had not been sent by then.
    deleted = run.info.lifecycle_stage == "deleted"
    done = deleted or run.info.status in ("FINISHED", "FAILED")
    return _Child(run.info.run_id, tags.get("trial.config_hash", ""), done, tags.get("frontier") == "true",
                  run.data.metrics.get(view.RANK), deleted)
