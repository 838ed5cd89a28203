"""What a launcher is, and the one that needs no Ray: every trial in this process."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from sweeps.candidates import Cluster
from sweeps.search import Ask
from sweeps.spec import SweepSpec
from sweeps.trial import Ending, Job
from trainers import config as configs
from trainers.diagnose import WorkerFault
from trainers.errors import UserError
from trainers.prepare import TrialData


class Desk(Protocol):
    """Who hands out trials and takes their endings: the sweep."""

    @property
    def widest(self) -> int:
        """The most workers that a trial may have."""

    def next(self, free_workers: int) -> Job | Ask:
        """Return a job that needs at most `free_workers`, WAIT, or FINISHED."""

    def finish(self, job: Job, ending: Ending) -> None: ...

    def progress(self, trial_id: str, facts: Mapping[str, Any]) -> None: ...

    def should_stop(self) -> bool: ...


class Launcher(ABC):
    """Runs the jobs that a desk hands out, until it has no more. A context: what it started ends with it."""

    @abstractmethod
    def cluster(self) -> Cluster:
        """Return what there is to run on. Raises UserError when the cluster cannot be reached."""

    @abstractmethod
    def start(self) -> None:
        """Make ready to run. Raises UserError where that cannot be."""

    @abstractmethod
    def stop(self) -> None:
        """End what was started, if anything was."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @abstractmethod
    def run(self, desk: Desk, data: Mapping[int, TrialData], log: Path) -> None:
        """Run jobs until the desk says FINISHED. `data` is by seq_len; Ray's own messages go to `log`."""


class InlineLauncher(Launcher):
    """Every trial in this process, one after another: for a debugger."""

    def __init__(self, spec: SweepSpec) -> None:
        self._spec = spec

    def cluster(self) -> Cluster:
        from trainers.ranks import resolve_device

        device = resolve_device(self._spec.device)
        if device == "cuda" and resolve_device("auto") != "cuda":
            raise UserError("device=cuda: this process sees no CUDA device; use device=cpu")
        if device == "cpu":
            return Cluster(device, 1, "this process, cpu")
        import torch

        from trainers import hardware

        return Cluster(device, 1, "this process, cuda", hardware.model_of(torch.cuda.get_device_name()))

    def start(self) -> None:
        """There is nothing to start."""

    def stop(self) -> None:
        """There is nothing to end."""

    def run(self, desk: Desk, data: Mapping[int, TrialData], log: Path) -> None:
        import torch

        from trainers import ranks
        from trainers.job import run_rank
        from trainers.loop import Hooks

        os.environ.update(self._spec.env)
        torch.set_num_threads(max(1, int(self._spec.ray.cpus_per_worker)))
        while isinstance(job := desk.next(1), Job):
            config = configs.from_tree(configs.TrialConfig, job.config)
            trial_id = job.trial_id

            def progress(facts: Mapping[str, Any], trial_id: str = trial_id) -> None:
                desk.progress(trial_id, facts)

            try:
                result = run_rank(
                    config,
                    data[job.seq_len],
                    ranks.current(config.run.device),
                    Hooks(progress=progress, should_stop=desk.should_stop),
                )
                ending = Ending(result=result.to_json())
            except WorkerFault as error:
                ending = Ending(fault=error.fault)
            desk.finish(job, ending)
        assert job is Ask.FINISHED, "nothing runs while the desk is asked here, so there is nothing to wait for"
