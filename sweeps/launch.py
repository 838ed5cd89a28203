"""Where trials run: Ray Tune trials that are Ray Train jobs. With search/optuna.py the only place here that knows Ray.

Tune counts only the resources of a trial's driver, while each driver then asks for its own workers: if more drivers
start than the cluster has room for workers, all wait for ever. So room is counted here, and Tune is handed a trial
only when its workers fit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from sweeps.candidates import Cluster
from sweeps.jobs import NAMESPACE, run_trial
from sweeps.launcher import Desk, InlineLauncher, Launcher
from sweeps.search import Ask
from sweeps.spec import SweepSpec
from sweeps.trial import Ending, Job
from trainers.diagnose import Fault
from trainers.errors import UserError
from trainers.prepare import TrialData
from trainers.result import GIB

Lanes = Literal["none", "one", "each"]
"""jobs in which trials take turns: none, one that is as wide as the widest trial, or one for each running"""
ROOT = Path(__file__).resolve().parent.parent

# Read by Ray when it is imported or started. Not for looks: by default a report takes 2 s to be seen, a trial's end
# up to 4 s, and helper processes are started that a sweep has no use for (design: facts about Ray 2.60).
RAY_ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "600",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C is ours: Tune's handler returns normally, as if all were done
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
}


def make_launcher(spec: SweepSpec) -> Launcher:
    """Return the launcher that the spec names."""
    return InlineLauncher(spec) if spec.launcher == "inline" else RayLauncher(spec)


class RayLauncher(Launcher):
    """Ray Tune drives; each trial launches a Ray Train job of `num_workers` ranks."""

    def __init__(self, spec: SweepSpec) -> None:
        self._spec = spec
        self._address = os.environ.get("RAY_ADDRESS")

    def cluster(self) -> Cluster:
        if self._address:
            self._connect()
            import ray

            total, where = ray.cluster_resources(), f"Ray cluster {self._address}"
            cpus, gpus, nodes = total.get("CPU", 0.0), int(total.get("GPU", 0)), len(ray.nodes())
            kinds = [name.partition(":")[2] for name in total if name.startswith("accelerator_type:")]
            memory = None
        else:
            import torch

            cpus, gpus, nodes, where = float(usable_cpus()), torch.cuda.device_count(), 1, "this machine"
            from trainers import hardware

            kinds = [hardware.model_of(torch.cuda.get_device_name())] if gpus else []
            memory = torch.cuda.get_device_properties(0).total_memory / GIB if gpus else None
        device = ("cuda" if gpus else "cpu") if self._spec.device == "auto" else self._spec.device
        by_cpu = int(cpus / self._spec.ray.cpus_per_worker + 1e-9)
        workers = min(gpus, by_cpu) if device == "cuda" else by_cpu
        backend = "cuda (nccl)" if device == "cuda" else "cpu (gloo): speed and memory are this CPU's, not a GPU's"
        detail = f"{where}: {nodes} node(s), {cpus:g} CPUs, {gpus} GPUs; running on {backend}"
        return Cluster(device, workers, detail, kinds[0].split("-")[0] if kinds else "", memory)

    def start(self) -> None:
        self._connect()

    def stop(self) -> None:
        import ray

        ray.shutdown()  # of an existing cluster: only leaves it

    def run(self, desk: Desk, data: Mapping[int, TrialData], log: Path) -> None:
        import ray

        with quiet(log), tempfile.TemporaryDirectory(prefix="sweep-tune-") as storage:
            # Given once, by reference: arrays in a closure or config would be copied with every trial.
            stored = {seq_len: ray.put(tokens) for seq_len, tokens in data.items()}
            name = f"board-{os.getpid()}-{time.time_ns()}"
            board = _board_actor().options(name=name, num_cpus=0).remote()
            ray.get(board.read.remote(False))  # it is there before a worker looks for it
            watcher = Watcher(board, desk)
            try:
                self._tune(desk, stored, name, storage)
            finally:
                watcher.close()
                ray.kill(board)

    def _tune(self, desk: Desk, stored: Mapping[int, Any], board: str, storage: str) -> None:
        from ray import tune

        for name in ("ray.tune", "ray.train", "ray.data"):
            logging.getLogger(name).setLevel(logging.ERROR)
        cluster = self.cluster()
        slots = cluster.workers
        limit = self._spec.ray.max_concurrent_trials or (slots if cluster.device == "cuda" else 1)
        lanes: Lanes = "none" if not self._spec.ray.reuse_processes else "one" if limit == 1 else "each"
        settings = {**self._settings(cluster, stored, board, storage), "lanes": lanes, "widest": desk.widest}
        search = _tune_searcher()(desk, slots, settings)
        tune.Tuner(
            tune.with_resources(run_trial, {"node:__internal_head__": 0.001}),
            tune_config=tune.TuneConfig(
                search_alg=search, num_samples=-1, max_concurrent_trials=limit, reuse_actors=True
            ),
            run_config=tune.RunConfig(name="sweep", storage_path=storage, verbose=0),
        ).fit()

    def _settings(self, cluster: Cluster, stored: Mapping[int, Any], board: str, storage: str) -> dict[str, Any]:
        """Return what every trial's driver and workers are told, beside the job itself."""
        spec = self._spec
        per_worker = {"CPU": spec.ray.cpus_per_worker, **({"GPU": 1.0} if cluster.device == "cuda" else {})}
        return {
            "stored": stored,
            "board": board,
            "storage": storage,
            "resources": per_worker,
            "device": cluster.device,
            "placement": spec.ray.placement,
            "env": dict(spec.env),
            "timeout_s": spec.trial_timeout_minutes * 60,
            "threads": max(1, int(spec.ray.cpus_per_worker)),
        }

    def _connect(self) -> None:
        import ray

        if ray.is_initialized():
            return
        environment = {**RAY_ENVIRONMENT, "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(self._spec.ray.start_timeout_s)}
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        threads = str(max(1, int(self._spec.ray.cpus_per_worker)))
        env = {**environment, "OMP_NUM_THREADS": threads, **self._spec.env}
        runtime: dict[str, Any] = {"env_vars": env}
        quiet_options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": NAMESPACE}
        on_terminate = signal.getsignal(signal.SIGTERM)
        try:
            if self._address:
                runtime["py_modules"] = [str(ROOT / "sweeps"), str(ROOT / "trainers")]
                ray.init(address=self._address, runtime_env=runtime, **quiet_options)
            else:
                env["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
                ray.init("local", runtime_env=runtime, include_dashboard=False, num_cpus=usable_cpus(), **quiet_options)
        except Exception as error:  # Ray raises many types, plain Exception among them
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(
                f"RAY_ADDRESS={self._address}: cannot join the Ray cluster: {first}"
                if self._address
                else f"cannot start Ray on this machine: {first} (on a busy machine try again; "
                "launcher=inline system.num_workers=1 needs no Ray)"
            ) from None
        if on_terminate is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_terminate)  # Ray takes it over, and would abort without an end


def usable_cpus() -> int:
    """Return the CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Watcher:
    """Carries progress from the board to the desk, and the desk's wish to stop to the board, twice a second."""

    def __init__(self, board: Any, desk: Desk) -> None:
        from trainers.worker import BOARD_TIMEOUT_S  # here: ray's modules must not be imported by two threads at once

        self._board, self._desk, self._timeout_s = board, desk, BOARD_TIMEOUT_S
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        import ray

        while not self._closed.wait(0.5):
            try:
                news = ray.get(self._board.read.remote(self._desk.should_stop()), timeout=self._timeout_s)
            except ray.exceptions.RayError:
                continue  # a busy cluster, or one that is going down: then the trial's ending will tell
            for trial_id, facts in news.items():
                self._desk.progress(trial_id, facts)

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=5)


def _board_actor() -> Any:
    """Return the actor class through which workers report progress and ask whether to stop."""
    import ray

    @ray.remote
    class Board:
        def __init__(self) -> None:
            self._progress: dict[str, Mapping[str, Any]] = {}
            self._stop = False

        def progress(self, trial_id: str, facts: Mapping[str, Any]) -> None:
            self._progress[trial_id] = facts

        def should_stop(self, trial_id: str) -> bool:
            return self._stop

        def read(self, stop: bool) -> dict[str, Mapping[str, Any]]:
            self._stop = stop
            return self._progress

    return Board


def _tune_searcher() -> Any:
    """Return the ray.tune Searcher that asks the desk (ray is imported only here)."""
    from ray.tune.search import Searcher

    class DeskSearcher(Searcher):
        """Tune's view of the desk: suggests a job when its workers fit, and passes endings on."""

        def __init__(self, desk: Desk, slots: int, settings: Mapping[str, Any]) -> None:
            super().__init__(metric=None, mode=None)
            self._desk, self._slots, self._settings = desk, slots, settings
            self._running: dict[str, Job] = {}

        def suggest(self, trial_id: str) -> Any:
            free = self._slots - sum(job.num_workers for job in self._running.values())
            answer = self._desk.next(free)
            if isinstance(answer, Ask):
                # While trials run, their endings may still bring new ones: not finished yet.
                return Searcher.FINISHED if answer is Ask.FINISHED and not self._running else None
            self._running[trial_id] = answer
            return {"job": answer.to_json(), "settings": self._settings}

        def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
            job = self._running.pop(trial_id, None)
            if job is None:
                return
            text = (result or {}).get("ending")
            if text is None:
                lost = Fault("crash", "start", 0, "the trial's driver process died")
                self._desk.finish(job, Ending(fault=lost))
            else:
                self._desk.finish(job, Ending.from_json(json.loads(text)))

        def save(self, checkpoint_path: str) -> None:
            """Nothing to save: the sweep's journal is the record, and Tune's snapshots are seconds behind it."""

        def restore(self, checkpoint_path: str) -> None:
            """See save()."""

        def __getstate__(self) -> dict[str, Any]:
            return {}  # Tune pickles the searcher beside the experiment; it is never read back

    return DeskSearcher


@contextlib.contextmanager
def quiet(log: Path) -> Iterator[None]:
    """Send what Ray and its C++ core print on standard error to a file while they run.

    Works on the file descriptor, since the core writes there; our own screen writes to standard output.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    saved = os.dup(2)
    with log.open("ab") as sink:
        os.dup2(sink.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
