"""One rank of a job, however it was started: the loop inside a guard that turns every failure into a value."""

from __future__ import annotations

import traceback

from torch.distributed.checkpoint.api import CheckpointException  # no Exception

from trainers.config import TrialConfig
from trainers.diagnose import Use, WorkerFault, fault_of
from trainers.loop import Hooks, train
from trainers.memory import MemoryMeter, limit_of, return_memory
from trainers.prepare import TrialData
from trainers.ranks import World
from trainers.result import TrialResult

MAX_TRACEBACK = 8_000  # characters, the end of it: outcomes are one line of a file each


def run_rank(config: TrialConfig, data: TrialData, world: World, hooks: Hooks | None = None) -> TrialResult:
    """Run this rank's part of a job. Raises WorkerFault with kind, phase and rank when anything fails."""
    return_memory()  # of the trial before, or of how the data came here: it would count as reserved
    meter = MemoryMeter(world.device, limit_of(config, world))
    try:
        return train(config, data, world, meter, hooks)
    except (Exception, CheckpointException) as error:  # the process boundary: a worker ends in a value
        trace = traceback.format_exc()[-MAX_TRACEBACK:]
        use = Use(meter.failed, meter.limit.bytes if meter.limit is not None else None)
        fault = fault_of(error, meter.current, world.rank, meter.batch(meter.micro_step), trace, use)
        traceback.clear_frames(error.__traceback__)  # their locals hold the model
        raise WorkerFault(fault) from error
    finally:
        return_memory()  # the model must be gone before the process group is
