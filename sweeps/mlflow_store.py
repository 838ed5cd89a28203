"""The MLflow store: where it is, how to get into it, and what to say when it does not answer. All imports of MLflow.

MLflow is imported when it is first used, which takes a second, and with settings that make it give up soon.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import socket
import sqlite3
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sweeps import mlflow_view as view
from trainers.errors import UserError

DEFAULT_UI = "http://127.0.0.1:5000"  # where `mlflow ui` serves
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


class Store:
    """The experiment of one space in the store that MLFLOW_TRACKING_URI names."""

    def __init__(self, space: str) -> None:
        self.space = space
        self.client: Any = None
        self.experiment_id = ""  # until connected

    @cached_property
    def uri(self) -> str:
        return tracking_uri()

    @property
    def is_server(self) -> bool:
        return urlsplit(self.uri).scheme in ("http", "https")

    # -- getting in -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Make sure that the store answers and holds the experiment. Raises UserError."""
        uri = self.uri
        try:
            if uri.startswith("sqlite"):
                prepare_sqlite(uri)
            self.connect()
        except UserError:
            raise
        except Exception as error:  # drivers, servers and file systems fail with types that have no common base
            raise UserError(no_store(uri, error)) from error

    def connect(self) -> None:
        """Find or make the experiment, unless that is done."""
        if self.experiment_id:
            return
        client = make_client(self.uri)
        found = client.get_experiment_by_name(self.space) or self._make_experiment(client)
        if found.lifecycle_stage == "deleted":
            restore = f"mlflow experiments restore --experiment-id {found.experiment_id}"
            raise UserError(
                f"the MLflow experiment {self.space!r} is deleted: restore it with `{restore}`, "
                "or give the space another name"
            )
        self.client, self.experiment_id = client, found.experiment_id

    def _make_experiment(self, client: Any) -> Any:
        """Make it beside the database: MLflow's default is the directory that the first sweep was started in."""
        path = sqlite_path(self.uri)
        location = (path.parent / "mlruns" / view.param_key(self.space)).as_uri() if path else None
        try:
            client.create_experiment(self.space, artifact_location=location)
        except outages():
            if client.get_experiment_by_name(self.space) is None:  # else another sweep has just made it
                raise
        return client.get_experiment_by_name(self.space)

    # -- reading and writing --------------------------------------------------------------------------------------

    def runs(self, role: str, sweep: str) -> list[Any]:
        """Return the runs of a sweep that have a role, the deleted ones too."""
        quoted = f'"{sweep}"' if "'" in sweep else f"'{sweep}'"
        return self._search(f"tags.sweep.role = '{role}' and tags.sweep.id = {quoted}", ALL)

    def _search(self, query: str, view_type: int) -> list[Any]:
        found: list[Any] = []
        token = None
        while True:
            page = self.client.search_runs([self.experiment_id], query, view_type, 1000, page_token=token)
            found += page
            token = page.token
            if not token:
                return found

    def create_run(self, name: str, started_at: float, tags: Mapping[str, str]) -> Any:
        start = view.milliseconds(started_at)
        return self.client.create_run(self.experiment_id, start_time=start, tags=tags, run_name=name)

    def log(
        self,
        run_id: str,
        params: Mapping[str, str] | None = None,
        readings: Sequence[view.Reading] = (),
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Send params, metrics and tags of one run in one call."""
        from mlflow.entities import Metric, Param, RunTag

        self.client.log_batch(
            run_id,
            metrics=[Metric(r.key, r.value, r.timestamp, r.step) for r in readings],
            params=[Param(k, v) for k, v in (params or {}).items()],
            tags=[RunTag(k, v) for k, v in (tags or {}).items()],
        )

    def end_abandoned(self, own: str) -> None:
        """End the runs of sweeps on this host whose process is gone; `own` is this process's run."""
        for run in self._search("tags.sweep.role = 'sweep' and attributes.status = 'RUNNING'", ACTIVE):
            tags, run_id = run.data.tags, run.info.run_id
            here = tags.get("sweep.host") == socket.gethostname()
            if run_id == own or not here or _alive(tags.get("sweep.pid", "")):
                continue
            folder = tags.get("sweep.folder", tags.get("sweep.id"))
            reason = f"the sweep's process is gone; resume it with resume={folder}"
            below = self._search(f"tags.mlflow.parentRunId = '{run_id}' and attributes.status = 'RUNNING'", ACTIVE)
            for ghost in (*below, run):
                self.client.set_tag(ghost.info.run_id, "sweep.reason", reason)
                self.client.set_terminated(ghost.info.run_id, "KILLED")

    # -- looking at it --------------------------------------------------------------------------------------------

    @property
    def runs_page(self) -> str:
        return f"#/experiments/{self.experiment_id}/runs"

    def url(self, page: str) -> str:
        """Return the address of a page, or of the whole record as long as there is no experiment."""
        base = _shown(self.uri, mask="").rstrip("/") if self.is_server else DEFAULT_UI
        return f"{base}/{page}" if self.experiment_id else base

    def ui_command(self) -> str | None:
        """Return the command that serves the record, or None where a server already does."""
        if self.uri.startswith("sqlite"):
            return f"mlflow ui --backend-store-uri {shlex.quote(self.uri)}"
        if self.uri.startswith(DATABASES):
            return 'mlflow ui --backend-store-uri "$MLFLOW_TRACKING_URI"'  # the address may hold a password
        return None


class Artifacts:
    """Uploads files until one cannot be uploaded; then it says so through `remark`, and tries no other."""

    def __init__(self, store: Store, folder: Path, remark: Callable[[str], None]) -> None:
        self._store, self._folder, self._remark = store, folder, remark
        self._arrive = True

    def probe(self, run: Any, sweep: str) -> None:
        """Find out before the first trial whether artifacts arrive, with the sweep's run."""
        self._arrive = True
        run_id, target, spec = run.info.run_id, urlsplit(run.info.artifact_uri), self._folder / "spec.yaml"
        server = urlsplit(self._store.uri)
        if self._store.is_server and target.scheme in ("", "file") and not _is_local(server.hostname):
            # A client on another machine would write to its own disk, without an error.
            advice = "start it with --serve-artifacts and make a new experiment"
            self._give_up(f"the server keeps them on its own disk, {target.path}: {advice}")
        elif spec.is_file():
            self.send(run_id, spec)
        else:
            self.send_texts(run_id, {"sweep.txt": f"{sweep}\n"})

    def send_texts(self, run_id: str, files: Mapping[str, str]) -> None:
        """Upload files that do not exist yet: path to content."""
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content, encoding="utf-8")
            self.send(run_id, *Path(folder).iterdir())

    def send(self, run_id: str, *paths: Path) -> None:
        """Upload files, and folders under their own names."""
        if not self._arrive:
            return
        try:
            for path in paths:
                self._store.client.log_artifact(run_id, str(path))
        except Exception as error:  # each kind of artifact store raises its own library's types
            self._store.client.get_run(run_id)  # raises if the store is away: then it is not a matter of artifacts
            self._give_up(brief(error))

    def _give_up(self, why: str) -> None:
        self._arrive = False
        self._remark(
            f"artifacts cannot be uploaded to MLflow ({why}); params and metrics are recorded, the rest stays in "
            f"{self._folder}"
        )


# -- the address --------------------------------------------------------------------------------------------------


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


def sqlite_path(uri: str) -> Path | None:
    return Path(uri.partition(":///")[2].partition("?")[0]) if uri.startswith("sqlite") else None


def _shown(uri: str, mask: str = "***@") -> str:
    return re.sub(r"//[^@/]*@", f"//{mask}", uri)


# -- the client ---------------------------------------------------------------------------------------------------


def make_client(uri: str) -> Any:
    """Return a client that gives up soon and prints nothing."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):  # after the import, which sets both
        logging.getLogger(name).setLevel(logging.ERROR)
    return MlflowClient(uri, registry_uri=uri)


def prepare_sqlite(uri: str) -> None:
    """Open the file before MLflow does, which would try for 100 seconds, and make a new one appear whole.

    A schema that two processes make at once, or that is interrupted, is broken for good.
    """
    path = sqlite_path(uri)
    assert path is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            partial.touch()  # says at once if the folder cannot be written to
            make_client(f"sqlite:///{partial}").search_experiments(max_results=1)
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


# -- this host ----------------------------------------------------------------------------------------------------


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


# -- what goes wrong ----------------------------------------------------------------------------------------------


def outages() -> tuple[type[Exception], ...]:
    """Return what a store that is away or unwell raises; requests' exceptions are OSErrors."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError, OSError


def is_refusal(error: Exception) -> bool:
    """Return whether the store answered, and would answer the same again."""
    return getattr(error, "error_code", None) in REFUSALS


def brief(error: BaseException) -> str:
    """Return the cause alone: an error of a client is a stack of wrapped ones."""
    said = " ".join(str(error).split())
    cause = re.search(r"\[Errno -?\d+\] ([^'\")]+)|(timed out|Invalid Host header)|(error code \d+)", said)
    found = next(filter(None, cause.groups())) if cause else said
    return view.cut(found or type(error).__name__, 200)


def no_store(uri: str, error: Exception) -> str:
    """Say what is wrong with the store, and what to do about it."""
    said, mlflow, why = str(error), f"MLflow at {_shown(uri)}", brief(error)
    if "Invalid Host header" in said:
        host = urlsplit(uri).netloc.rpartition("@")[2]
        return f"{mlflow} answers 403 Invalid Host header: start the server with --allowed-hosts {host}"
    if re.search(r"error code 40[13]\b", said):
        return f"{mlflow} refuses access: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD ({why})"
    if uri.startswith("http"):
        advice = "start the server, correct MLFLOW_TRACKING_URI, or unset it to record in mlflow.db of this directory"
        return f"{mlflow} does not answer ({why}): {advice}"
    advice = "set MLFLOW_TRACKING_URI to a file in a folder that you can write to, or to a server"
    return f"MLflow cannot open {_shown(uri)} ({why}): {advice}"
