"""Verdicts of plans that simulations settle: of the candidates at risk, or of all."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from sweeps.candidates import setting_of
from sweeps.forecast import HOST, Forecaster, Prediction, Verdict, outside_of
from sweeps.simulations import Simulations
from trainers.result import GIB
from trainers.task import Simulated, Task, ends

SIMULATION_BOUND = 0.05  # relative: of simulations, against what real ranks took: benchmarks/prediction.py
FRAGMENTED = 1.31  # times what is allocated: the most that published tables show reserved


def settled(
    predictions: Sequence[Prediction],
    which: str,
    forecaster: Forecaster,
    simulations: Simulations,
    told: Callable[[str, int, int], None],
) -> list[Prediction]:
    """Return predictions of which those at risk, or all, were simulated."""
    shape = forecaster.context.shape
    assert shape is not None
    found = list(predictions)
    asked = [i for i, p in enumerate(predictions) if which == "all" or p.verdict == "AT_RISK"]
    # Few blocks tell what is allocated, and that is often enough; all of them what is reserved, too.
    for whole in (False, True):
        tasks: dict[int, list[Task]] = {}
        for i in asked:
            setting = setting_of(predictions[i].config, forecaster.context)
            if setting is not None and forecaster.context.workload is not None:
                work = forecaster.context.workload.of(setting)
                tasks[i] = [Task(shape, setting, work.largest, rank, whole) for rank in ends(setting)]
        what = f"simulating {len(tasks)} {'whole' if whole else 'from few blocks'}, ranks done"
        each = [task for group in tasks.values() for task in group]
        outcomes = iter(simulations.run(each, functools.partial(told, what)))
        for i, group in tasks.items():
            found[i] = simulated(predictions[i], group[0], [next(outcomes) for _ in group], forecaster)
        asked = [i for i in tasks if found[i].verdict == "AT_RISK" and not found[i].note]
    return found


def simulated(prediction: Prediction, task: Task, outcomes: Sequence[Simulated], forecaster: Forecaster) -> Prediction:
    """Return a prediction with what its simulated ranks came to; unchanged, with the reason, where one failed."""
    failed = next((o for o in outcomes if isinstance(o, str)), None)
    if failed is not None:
        return dataclasses.replace(prediction, note=f"not simulated: {failed}")
    peaks = [(m, phase) for o in outcomes if not isinstance(o, str) for phase, m in o.items()]
    most, phase = max(peaks, key=lambda peak: peak[0].allocated)
    reserved = max(m.reserved for m, _ in peaks) / GIB if task.whole else most.allocated / GIB * FRAGMENTED
    outside, capacity = outside_of(task.setting), forecaster.capacity_gib
    if prediction.phase == HOST:
        fits: Verdict = "OOM"
    elif reserved * (1 + SIMULATION_BOUND) + outside <= capacity:
        fits = "FITS"
    else:  # what is reserved and not allocated can be given back, with time lost
        fits = "OOM" if most.allocated / GIB * (1 - SIMULATION_BOUND) + outside > capacity else "AT_RISK"
    return dataclasses.replace(
        prediction,
        verdict=fits,
        phase=HOST if prediction.phase == HOST else phase,
        account=most.accounts.largest,
        accounts=most.accounts,
        point_gib=most.allocated / GIB + outside,
        upper_gib=reserved * (1 + SIMULATION_BOUND) + outside,
        by="simulation",
    )
