"""Ray Train's entry into a trial: the only file here that imports ray."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import ray
import ray.train.torch
from ray import train as ray_train

from trainers import config as configs
from trainers import ranks
from trainers.job import run_rank
from trainers.loop import Hooks

BOARD_TIMEOUT_S = 10.0


def lane_worker(lane: Mapping[str, Any]) -> None:
    """Run one rank of one trial after another, until there are no more.

    `lane`: `switch` (the name of the actor that hands them out), and what `train_worker` is given beside a job's own
    `config`, `data`, `trial_id` and `num_workers`.
    """
    switch = ray.get_actor(lane["switch"], namespace=lane["namespace"])
    rank = ray_train.get_context().get_world_rank()
    number = 0
    while (job := ray.get(switch.job.remote(number))) is not None:
        if rank < job["num_workers"]:
            faulthandler.dump_traceback_later(lane["timeout_s"], exit=True, file=sys.__stderr__ or 2)
            with _group_of(job, rank, switch, number, lane["timeout_s"]):
                result = _run({**lane, **job}, job["num_workers"])
            faulthandler.cancel_dump_traceback_later()
            if rank == 0:
                ray.get(switch.finish.remote(number, result))
        number += 1


@contextmanager
def _group_of(job: Mapping[str, Any], rank: int, switch: Any, number: int, timeout_s: float) -> Iterator[None]:
    """Leave the process group that there is, and join one of this trial's ranks alone."""
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its stubs

    size, backend = job["num_workers"], "nccl" if job["config"]["run"]["device"] == "cuda" else "gloo"
    if dist.is_initialized():
        dist.destroy_process_group()
    within = timedelta(seconds=timeout_s)
    if rank == 0:
        address = ray.util.get_node_ip_address()
        store = TCPStore(address, 0, size, is_master=True, timeout=within, wait_for_workers=False)
        ray.get(switch.meet.remote(number, address, store.port))
    else:
        address, port = ray.get(switch.meeting.remote(number))
        store = TCPStore(address, port, size, is_master=False, timeout=within)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=within)
    yield  # after a failure the process ends, group and all
    dist.barrier()  # rank 0 holds the store: it leaves last
    dist.destroy_process_group()


def train_worker(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run one rank of a trial and return its result as plain data.

    `job`: `config` (a TrialConfig's tree), `data` (a reference to TrialData in the object store), `board` (the name
    of the sweep's actor), `trial_id`, `timeout_s`, `threads`, `env`.
    """
    # A C timer: it fires even where the interpreter lock is held or a collective never returns.
    faulthandler.dump_traceback_later(job["timeout_s"], exit=True, file=sys.__stderr__ or 2)
    result = _run(job, ray_train.get_context().get_world_size())
    faulthandler.cancel_dump_traceback_later()
    return result


def _run(job: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    os.environ.update(job["env"])
    import torch

    torch.set_num_threads(job["threads"])
    if torch.cuda.is_available() and job["config"]["run"]["device"] == "cuda":
        # Ray lets the workers of a node see all of the job's GPUs; this one's is the one with its local rank.
        torch.cuda.set_device(ray_train.torch.get_device())
    config = configs.from_tree(configs.TrialConfig, job["config"])
    data = ray.get(job["data"])
    world = ranks.current(config.run.device)
    assert world.size == world_size, "Ray Train and torch.distributed disagree on the world"
    hooks = _hooks(job) if world.rank == 0 else None
    return run_rank(config, data, world, hooks).to_json()


def _hooks(job: Mapping[str, Any]) -> Hooks:
    board = ray.get_actor(job["board"], namespace=job["namespace"])
    trial_id = job["trial_id"]

    def should_stop() -> bool:
        try:
            return bool(ray.get(board.should_stop.remote(trial_id), timeout=BOARD_TIMEOUT_S))
        except ray.exceptions.RayError:
            return False  # a board that does not answer is no reason to lose the trial

    # Progress is sent and not waited for: a timer must never span a call to another process.
    return Hooks(progress=lambda facts: board.progress.remote(trial_id, dict(facts)), should_stop=should_stop)
