"""What the ledger says of a configuration before or after it ran."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sweeps.candidates import Context, setting_of
from trainers import ledger
from trainers.ledger import MicroBatch
from trainers.result import GIB, Accounts, TrialResult

SUM = "predicted_peak_memory_allocated_gib"
"""Figure of a trial: what the ledger says of its peak."""


def peak(config: Mapping[str, Any], ran: TrialResult | None, context: Context) -> Accounts | None:
    """Return the accounts at the peak of a configuration, flat, with rows as long as those of a job that ran.

    None where they cannot be told: no job has run, or the model is of a kind whose shape is not known.
    """
    setting = setting_of(config, context)
    if setting is None or context.shape is None or ran is None or ran.largest is None:
        return None
    batch = MicroBatch(**{**ran.largest, "rows": setting.system.micro_batch_size})
    return ledger.peak(ledger.predict(context.shape, setting, batch))[1]


def figures(config: Mapping[str, Any], ran: TrialResult, context: Context) -> dict[str, float]:
    """Return what the ledger says of a job that ran, to be compared with what was measured: sum and accounts, GiB."""
    found = peak(config, ran, context)
    if found is None:
        return {}
    accounts = {f"predicted_{name}_gib": getattr(found, name) / GIB for name in Accounts.names()}
    return {SUM: found.total / GIB, **accounts}
