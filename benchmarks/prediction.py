"""How far predictions are from what is measured: memory by ledger and simulation, and the order of step times.

Run:    pip install -c requirements.lock -e '.[benchmarks]'
        python benchmarks/prediction.py               # about a quarter of an hour on 2 cores
        python benchmarks/prediction.py --rows 8      # a look; --part measured|published for one half
Reads:  first, rows that are run here, on gloo ranks: the highest bytes of an update as torch.profiler's memory events
        count them (the simulation counts in the dispatcher, which does not see what gloo copies: the events within
        gloo's operations are an account of their own), beside the simulation's and the ledger's sum. `stored`: weights
        and optimizer state, summed over the tensors that there are. Then peaks that others published, beside
        what estimators say that count weights only. The last line is JSON: median and worst relative errors, the rank
        correlation of predicted with measured step time, and how many rows were refused, each with its reason above.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

# As a script this file's folder is first on the path, and not the project's.
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import published
from benchmarks.on_ranks import SHAPE, Ranks, Row, every_row
from trainers import ledger, steptime, task
from trainers.result import Accounts
from trainers.simulate import Simulator
from trainers.strategies import illegal
from trainers.task import Task


def main() -> int:
    parser = argparse.ArgumentParser(description="how far predictions are from what is measured")
    parser.add_argument("--rows", type=int, default=None, help="how many rows are run; all without it")
    parser.add_argument("--part", default="all", choices=("all", "measured", "published"))
    chosen = parser.parse_args()
    found: dict[str, Any] = {}
    with Simulator(1) as simulator:
        if chosen.part != "published":
            found |= measured_here(simulator, every_row()[: chosen.rows])
        if chosen.part != "measured":
            found |= measured_elsewhere(simulator)
    print(json.dumps(found))
    return 0


def measured_here(simulator: Simulator, rows: Sequence[Row]) -> dict[str, Any]:
    """Run rows, print each, and return the summary of their errors."""
    heads = f"{'stored':>7} {'s':>6} {'predicted':>9}"
    print(f"{'row':34} {'MiB':>7} {'gloo':>6} {'simulated':>9} {'':>7} {'ledger':>7} {'':>7} {heads}")
    errors: dict[str, list[float]] = {"simulation": [], "ledger": [], "stored": []}
    times, refused = [], 0
    with Ranks() as ranks:
        here = ranks.machine()
        for row in rows:
            setting = row.setting()
            simulated = highest(simulator, row)
            if isinstance(simulated, str):
                refused += 1
                print(f"{row.name:34} refused: {simulated}", flush=True)
                continue
            real = ranks.run(row)
            closed = ledger.predict(SHAPE, setting, row.batch())
            told = ledger.peak({name: a for name, a in closed.items() if name != "load"})[1].total
            errors["simulation"].append(simulated / real.peak - 1)
            errors["ledger"].append(told / real.peak - 1)
            errors["stored"].append(state(closed["optimizer"]) / state(real.stored) - 1)
            times.append((steptime.predict(SHAPE, setting, row.batch(), here).total, real.step_time_s))
            off = {name: f"{values[-1]:+.1%}" for name, values in errors.items()}
            print(
                f"{row.name:34} {real.peak / 2**20:7.1f} {real.gloo / 2**20:6.1f} {simulated / 2**20:9.1f} "
                f"{off['simulation']:>7} {told / 2**20:7.1f} {off['ledger']:>7} {off['stored']:>7} "
                f"{real.step_time_s:6.3f} {times[-1][0]:9.3f}",
                flush=True,
            )
    summary: dict[str, Any] = {"rows": len(times), "rows_refused": refused}
    for name, values in errors.items():
        summary |= {f"{name}_median": median(values), f"{name}_worst": worst(values)}
    summary["simulation_under"] = min(errors["simulation"], default=0.0)
    summary["time_rank_correlation"] = correlation(times)
    return summary


def highest(simulator: Simulator, row: Row) -> int | str:
    """Return the bytes at the peak of the simulated rank that holds most, or why there is none."""
    setting = row.setting()
    if rules := illegal(setting):
        return rules[0]
    found = simulator.run([Task(SHAPE, setting, row.batch(), rank) for rank in task.ends(setting)])
    refused = next((f for f in found if isinstance(f, str)), None)
    return refused or max(task.highest(f, "allocated", "load", "eval") for f in found if not isinstance(f, str))


def state(accounts: Accounts) -> int:
    """Return what lives between updates."""
    return accounts.weights + accounts.optimizer_state


def measured_elsewhere(simulator: Simulator) -> dict[str, Any]:
    """Print published peaks beside what is said of them here and by others; return the summary."""
    heads = f"{'simulated':>9} {'':>7} {'ledger':>7} {'accelerate':>10} {'DeepSpeed':>9}"
    print(f"\n{'published':30} {'GiB':>7} {'':9} {heads}")
    errors, refused = [], 0
    for row, simulated in zip(published.ROWS, simulator.run([row.task() for row in published.ROWS]), strict=True):
        found = published.compared(row, simulated)
        deepspeed = f"{found['deepspeed']:9.1f}" if found["deepspeed"] is not None else f"{'':9}"
        told = f"{found['ledger_allocated']:7.1f} {found['accelerate']:10.1f} {deepspeed}"
        if "refused" in found:
            refused += 1
            print(f"{row.name:30} {row.gib:7.2f} {row.kind:9} {'refused':>17} {told}  {found['refused']}", flush=True)
            continue
        errors.append(found["error"])
        ours = f"{found[row.kind]:9.2f} {found['error']:+7.1%}"
        print(f"{row.name:30} {row.gib:7.2f} {row.kind:9} {ours} {told}  {row.assumed}", flush=True)
    for name, reason in published.REFUSED.items():
        print(f"{name:30} not compared: {reason}")
    print("ledger, accelerate (a training step in bfloat16) and DeepSpeed (model states): allocated, GiB")
    return {
        "published_median": median(errors), "published_worst": worst(errors), "published_rows": len(errors),
        "published_refused": refused + len(published.REFUSED),
    }  # fmt: skip


def median(values: Sequence[float]) -> float | None:
    return statistics.median(abs(v) for v in values) if values else None


def worst(values: Sequence[float]) -> float | None:
    return max(values, key=abs) if values else None


def correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation."""
    if len(pairs) < 2:
        return None
    return float(spearmanr(*zip(*pairs, strict=True)).statistic)


if __name__ == "__main__":
    sys.exit(main())
