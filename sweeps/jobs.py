"""A trial as a Ray Train job, of its own or in a lane; however it ends, it ends in a value."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sweeps.lane import IDLE_S, Lane, switch_actor
from sweeps.trial import Ending
from trainers.diagnose import Fault, WorkerFault, root_cause
from trainers.memory import host_usage, oom_kills

NAMESPACE = "sweep"


def run_trial(assignment: Mapping[str, Any]) -> None:
    """A Tune trial: launch one Ray Train job and report its ending as a value, whatever it was."""
    from ray import tune

    run = run_on_lane if assignment["settings"]["lanes"] != "none" else run_job
    ending = run(assignment["job"], assignment["settings"])
    tune.report({"ending": json.dumps(ending.to_json())})


def run_job(job: Mapping[str, Any], settings: Mapping[str, Any]) -> Ending:
    """Run one trial as a Ray Train job of its own."""
    from trainers.worker import train_worker

    trainer = _trainer(train_worker, _of_trial(job, settings), job["num_workers"], settings)
    return _ending(lambda: trainer.fit().return_value, settings)


_lane: Lane | None = None  # of this process, which Tune uses for one trial after another


def run_on_lane(job: Mapping[str, Any], settings: Mapping[str, Any]) -> Ending:
    """Run one trial in the Ray Train job that ran the one before, or in a new one, if that ended or does not suit."""
    global _lane
    alone = settings["lanes"] == "one"
    wanted = settings["widest"] if alone else job["num_workers"]
    if _lane is None or not _lane.take():
        _lane = _new_lane(wanted, settings)
    elif _lane.workers != wanted:
        _lane.close()
        _lane = _new_lane(wanted, settings)
    lane = _lane
    ending = _ending(lambda: lane.run(_of_trial(job, settings)), settings)
    if ending.fault is not None:
        lane.close()
        _lane = None
    else:
        lane.leave()
    return ending


def _new_lane(workers: int, settings: Mapping[str, Any]) -> Lane:
    """Return a lane that is taken."""
    from trainers.worker import lane_worker

    name = f"{settings['board']}-{time.time_ns()}"
    switch = switch_actor().options(name=name, num_cpus=0, max_concurrency=1000).remote()

    def fit(name: str) -> None:
        shared = {key: settings[key] for key in ("board", "timeout_s", "threads", "env")}
        lane = {**shared, "switch": name, "namespace": NAMESPACE}
        _trainer(lane_worker, lane, workers, settings).fit()

    lane = Lane(switch, name, workers, fit, None if settings["lanes"] == "one" else IDLE_S)
    lane.take()
    return lane


def _of_trial(job: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rank is told of its trial."""
    return {
        "config": job["config"],
        "data": settings["stored"][job["seq_len"]],
        "board": settings["board"],
        "namespace": NAMESPACE,
        "trial_id": job["trial_id"],
        "num_workers": job["num_workers"],
        "timeout_s": settings["timeout_s"],
        "threads": settings["threads"],
        "env": settings["env"],
    }


def _trainer(work: Callable[..., Any], told: Mapping[str, Any], workers: int, settings: Mapping[str, Any]) -> Any:
    """Return a Ray Train job of some workers."""
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    on_gpu = settings["device"] == "cuda"
    return TorchTrainer(
        work,
        train_loop_config=dict(told),
        torch_config=TorchConfig(backend="nccl" if on_gpu else "gloo", timeout_s=int(settings["timeout_s"])),
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=on_gpu,
            resources_per_worker=settings["resources"],
            placement_strategy=settings["placement"],
        ),
        run_config=RunConfig(
            # A name of its own per attempt: a measurement starts anew and never resumes half-way.
            name=f"{told.get('trial_id', 'lane')}-{time.time_ns()}",
            storage_path=settings["storage"],
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    )


def _ending(run: Callable[[], Any], settings: Mapping[str, Any]) -> Ending:
    """Return how a trial ended, whatever it was."""
    started, killed = time.time(), oom_kills()
    try:
        result = run()
    except Exception as error:  # Ray raises several unrelated types; each becomes a value here
        fault = fault_of_job(error, time.time() - started, settings["timeout_s"])
        return Ending(fault=proved(fault, oom_kills() - killed, host_usage()))
    return Ending(result=result)


def fault_of_job(error: Exception, seconds: float, timeout_s: float) -> Fault:
    """Return the root cause of a failed Train job."""
    failures: Mapping[int, BaseException] = getattr(error, "worker_failures", None) or {}
    if not failures:
        cause = getattr(error, "controller_failure", None) or error
        text = str(cause).strip().splitlines()[0] if str(cause).strip() else repr(cause)
        return Fault("crash", "start", 0, f"{type(cause).__name__}: {text}")
    faults = {rank: _worker_fault(rank, failure) for rank, failure in failures.items()}
    cause = root_cause(faults)
    if cause.kind == "killed_unproved" and seconds >= timeout_s:
        return Fault(
            "timeout", cause.phase, cause.rank, f"no result after trial_timeout_minutes ({timeout_s / 60:g} min)"
        )
    return cause


def proved(fault: Fault, kills: int, usage: str) -> Fault:
    """Return a fault whose process was killed as one of memory, where the kernel counts that it ended one for that."""
    if fault.kind != "killed_unproved" or kills < 1:
        return fault
    counted = f"the kernel ended {kills} process(es) of this control group for lack of memory (oom_kill +{kills})"
    said = tuple(text for text in (counted, usage, *fault.consequences) if text)
    return replace(fault, kind="host_oom", consequences=said)


def _worker_fault(rank: int, failure: BaseException) -> Fault:
    if isinstance(failure, WorkerFault):
        return failure.fault
    inner = getattr(failure, "health_check_failure", None) or failure
    text = " ".join(str(inner).split())[:300]
    if type(inner).__name__ == "OutOfMemoryError" or "low on memory" in text:
        return Fault("host_oom", "unknown", rank, f"Ray's memory monitor ended the worker: {text}")
    if "Died" in type(inner).__name__ or "ActorError" in type(inner).__name__:
        return Fault("killed_unproved", "unknown", rank, f"the worker process died, why is not proved: {text}")
    return Fault("crash", "unknown", rank, f"{type(inner).__name__}: {text}")
