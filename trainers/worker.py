"""Ray Train's entry into a trial: the only file here that imports ray."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Mapping
from typing import Any

import ray
import ray.train.torch
from ray import train as ray_train

from trainers import config as configs
from trainers import ranks
from trainers.job import run_rank
from trainers.loop import Hooks

BOARD_TIMEOUT_S = 10.0


def train_worker(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run one rank of a trial and return its result as plain data.

    `job`: `config` (a TrialConfig's tree), `data` (a reference to TrialData in the object store), `board` (the name
    of the sweep's actor), `trial_id`, `timeout_s`, `threads`, `env`.
    """
    # A C timer: it fires even where the interpreter lock is held or a collective never returns.
    faulthandler.dump_traceback_later(job["timeout_s"], exit=True, file=sys.__stderr__ or 2)
    os.environ.update(job["env"])
    import torch

    torch.set_num_threads(job["threads"])
    if torch.cuda.is_available() and job["config"]["run"]["device"] == "cuda":
        # Ray lets the workers of a node see all of the job's GPUs; this one's is the one with its local rank.
        torch.cuda.set_device(ray_train.torch.get_device())
    context = ray_train.get_context()
    config = configs.from_tree(configs.TrialConfig, job["config"])
    data = ray.get(job["data"])
    world = ranks.current(config.run.device)
    assert world.size == context.get_world_size(), "Ray Train and torch.distributed disagree on the world"
    hooks = _hooks(job) if world.rank == 0 else None
    result = run_rank(config, data, world, hooks)
    faulthandler.cancel_dump_traceback_later()
    return result.to_json()


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
