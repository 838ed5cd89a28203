"""What closed forms say of a configuration on some data and a machine: memory by the ledger, and the time of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sweeps.candidates import Context, setting_of
from sweeps.workload import Work
from trainers import ledger, steptime
from trainers.result import GIB, Accounts
from trainers.steptime import StepTime
from trainers.strategies import Setting

SUM = "predicted_peak_memory_allocated_gib"
STEP = "predicted_step_time_s"
"""Figures of a trial: what is said of its peak and of its steps."""


@dataclass(frozen=True)
class Predicted:
    """One configuration, on the rank that holds most."""

    setting: Setting
    work: Work
    phase: str
    """in which memory peaks"""
    accounts: Accounts
    """at that instant"""
    time: StepTime | None
    """None where the machine is not known"""


def predict(config: Mapping[str, Any], context: Context) -> Predicted | None:
    """Return what a configuration, flat, would take.

    None where that cannot be told: it is none, or its model is of a kind whose shape is not known.
    """
    setting, shape = setting_of(config, context), context.shape
    if setting is None or shape is None or context.workload is None:
        return None
    work = context.workload.of(setting)
    phase, accounts = ledger.peak(ledger.predict(shape, setting, work.largest))
    machine = context.machine
    time = steptime.predict(shape, setting, work.usual, machine) if machine is not None else None
    return Predicted(setting, work, phase, accounts, time)


def figures(config: Mapping[str, Any], context: Context) -> dict[str, float]:
    """Return what a trial's figures are to be compared with: the peak and its accounts in GiB, and seconds."""
    found = predict(config, context)
    if found is None:
        return {}
    accounts = {f"predicted_{name}_gib": getattr(found.accounts, name) / GIB for name in Accounts.names()}
    time = {STEP: found.time.total} if found.time is not None else {}
    return {SUM: found.accounts.total / GIB, **accounts, **time}
