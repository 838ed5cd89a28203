"""What a search costs until it has what an exhaustive grid would find: our guided searcher beside others, replayed.

Run:    pip install -c requirements.lock -e '.[benchmarks]'
        python benchmarks/search.py                    # 20 seeds
        python benchmarks/search.py --seeds 3 --methods guided random
        python benchmarks/search.py --table cpu        # the table that was measured on a CPU: see measure_table.py
Reads:  trials are looked up in a table of all configurations, 204 ways to divide the work × 12 to learn (2 loads). Each
        seed draws another truth around the predictions that the guided searcher is given: per-strategy time factors of
        0.6 to 1.6, memory ± 10 %; and 3 % noise on what is measured. All are given the legal candidates only; each pays
        for start-up, measuring, training and evaluations of every trial, the guided one for its confirmations, too.
        Printed are GPU-seconds until 95 % and 99 % of the exhaustive hypervolume, medians over the seeds; `>` where the
        median did not get there within the most trials. Curves of regret are drawn to benchmarks/results/search.png.
        The last line is JSON: ratios of medians to 99 %.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# As a script this file's folder is first on the path, and not the project's.
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import replay, tables
from benchmarks.replay import Table
from sweeps.compose import COST, arm_key, effective, key_of, learning_of
from sweeps.outcome import TrialOutcome
from sweeps.search import SEARCHERS, Request, Searcher
from sweeps.search.optuna import Optuna

SHARES = (0.95, 0.99)
MOST_TRIALS = 300
MOST_OF_GP = 60  # each of its proposals takes seconds
RESULTS = Path(__file__).resolve().parent / "results"


class WithNsga(Optuna):
    """Optuna's NSGA-II in the place of TPE."""

    sampler = "NSGAIISampler"


class WithGp(Optuna):
    """Optuna's Gaussian process."""

    sampler = "GPSampler"


METHODS: dict[str, Callable[..., Searcher]] = {
    "guided": SEARCHERS["guided"],
    "guided, shuffled": SEARCHERS["guided"],
    "random": SEARCHERS["random"],
    "grid": SEARCHERS["grid"],
    "tpe": Optuna,
    "nsga2": WithNsga,
    "gp": WithGp,
}
SAMPLERS = ("random", "tpe", "nsga2", "gp")


@dataclass(frozen=True)
class Run:
    """One search: GPU-seconds and share of the exhaustive hypervolume, trial by trial."""

    curve: tuple[tuple[float, float], ...]
    confirming: float
    """GPU-seconds of confirmations"""
    best_cost: float
    """the least true cost of what was found, over the least of all"""

    def until(self, share: float) -> float:
        """Return the GPU-seconds until a share, with those of confirmations; infinite where it was not reached."""
        return next((spent + self.confirming for spent, had in self.curve if had >= share), math.inf)


def search(method: str, seed: int, table_name: str) -> Run:
    """Run one search on the table of a seed."""
    table = table_of(table_name, seed)
    shuffled = seed if method == "guided, shuffled" else None
    searcher = METHODS[method](table.candidates, table.objectives, seed, table.knowledge(shuffled))
    rng = random.Random(f"noise/{seed}/{method}")
    outcomes: list[TrialOutcome] = []
    curve: list[tuple[float, float]] = []
    spent = confirming = clock = 0.0
    most = {"gp": MOST_OF_GP, "grid": len(table.candidates)}.get(method, MOST_TRIALS)
    while len(outcomes) < most and isinstance(request := searcher.ask(), Request):
        outcome = table.run(request, len(outcomes), rng, clock)
        seconds = table.seconds(request) * request.candidate.num_workers
        clock = outcome.ended_at
        searcher.tell(outcome)
        outcomes.append(outcome)
        if request.kind == "confirmation":
            confirming += seconds
            continue
        spent += seconds
        before = curve[-1][1] if curve else 0.0
        new = outcome.competes and (COST in outcome.metrics or outcome.kind == "probe")
        curve.append((spent, share_of(table, outcomes) if new else before))
        if searcher.exhaustive and curve[-1][1] >= SHARES[-1]:
            break
    found = [v for o in shown(table, outcomes) if (v := table.values(o.config)) is not None]
    least = min((v[1] for v in found), default=math.inf)
    return Run(tuple(curve), confirming, least / float(table.everything[:, 1].min()))


def shown(table: Table, outcomes: Sequence[TrialOutcome]) -> list[TrialOutcome]:
    """Return the trials that have a cost, of their own or composed."""
    return [o for o in effective(outcomes, table.price) if o.competes and COST in o.metrics]


def share_of(table: Table, outcomes: Sequence[TrialOutcome]) -> float:
    return table.share([o.config for o in shown(table, outcomes)])


def whole_grid(table: Table) -> float:
    """Return the GPU-seconds of running every candidate whole."""
    return sum(table.seconds(Request(c)) * c.num_workers for c in table.candidates)


def factored_grid(table: Table) -> float:
    """Return those of a grid that is charged S + Q: every system probed, every learning run where it is cheapest."""
    probes: dict[tuple[str, str], float] = {}
    quickest: dict[str, float] = {}
    for candidate in table.candidates:
        flat = candidate.flat
        pair = arm_key(flat)
        probes[pair] = table.seconds(Request(candidate, "probe")) * candidate.num_workers
        if table.system(flat).memory_gib <= table.capacity_gib:
            whole, key = table.seconds(Request(candidate)), key_of(learning_of(flat))
            quickest[key] = min(quickest.get(key, math.inf), whole * candidate.num_workers)
    return sum(probes.values()) + sum(quickest.values())


def table_of(name: str, seed: int) -> Table:
    return tables.cluster_table(seed) if name == "cluster" else replay.load(tables.folder() / f"{name}.json")


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.inf


def ratio(one: float, other: float) -> float | None:
    return one / other if math.isfinite(one) and math.isfinite(other) else None


def main() -> int:
    parser = argparse.ArgumentParser(description="what a search costs until it has what an exhaustive grid would find")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--table", default="cluster", help="cluster, or the name of a file in benchmarks/tables")
    parser.add_argument("--processes", type=int, default=2)
    chosen = parser.parse_args()
    seeds = [table_of(chosen.table, seed) for seed in range(chosen.seeds)]
    grid, factored = median([whole_grid(t) for t in seeds]), median([factored_grid(t) for t in seeds])
    first = seeds[0]
    print(f"{len(first.systems)} systems under their loads, {len(first.learnings)} learning configurations: "
          f"{len(first.candidates)} candidates, {chosen.seeds} seeds")  # fmt: skip
    print(f"{'GPU-seconds until':24} {'95 %':>12} {'99 %':>12} {'of the grid':>12} {'reached':>8} {'cheapest':>9}")
    print(f"{'every candidate whole':24} {'':12} {grid:12,.0f} {1:12.2%}")
    print(f"{'S + Q of them':24} {'':12} {factored:12,.0f} {factored / grid:12.2%}", flush=True)
    by_method: dict[str, list[Run]] = {}
    with ProcessPoolExecutor(chosen.processes) as pool:
        for method in chosen.methods:
            jobs = [(method, seed, chosen.table) for seed in range(chosen.seeds)]
            by_method[method] = list(pool.map(search, *zip(*jobs, strict=True)))
            print(line(method, by_method[method], grid), flush=True)
    draw(by_method, grid)
    print(json.dumps(summary(by_method, grid, factored)))
    return 0


def line(method: str, runs: Sequence[Run], grid: float) -> str:
    """Return the line of a method: medians, or where one is not reached what was spent in all."""
    until = [median([run.until(share) for run in runs]) for share in SHARES]
    bound = f"> {longest(runs):,.0f}"
    texts = [f"{v:12,.0f}" if math.isfinite(v) else f"{bound:>12}" for v in until]
    part = f"{until[1] / grid:12.2%}" if math.isfinite(until[1]) else f"{'':12}"
    reached = sum(math.isfinite(run.until(SHARES[1])) for run in runs)
    cheapest = median([run.best_cost for run in runs])
    return f"{method:24} {texts[0]} {texts[1]} {part} {reached:4d}/{len(runs)} {cheapest:9.3f}"


def longest(runs: Sequence[Run]) -> float:
    """Return the median of what was spent in all: a bound from below, where a share was not reached."""
    return median([run.curve[-1][0] for run in runs])


def summary(by_method: dict[str, list[Run]], grid: float, factored: float) -> dict[str, Any]:
    """Return the ratios; of a method that did not get there, what it had spent stands in, and makes a bound."""
    until = {m: median([run.until(SHARES[1]) for run in runs]) for m, runs in by_method.items()}
    least = {m: value if math.isfinite(value) else longest(by_method[m]) for m, value in until.items()}
    guided = until.get("guided", math.inf)
    samplers = [least[m] for m in SAMPLERS if m in least]
    shuffled = until.get("guided, shuffled", math.inf)
    return {
        "guided_vs_grid_99": ratio(guided, grid),
        "guided_vs_best_sampler_99": ratio(guided, min(samplers, default=math.inf)),
        "guided_vs_factored_grid_99": ratio(guided, factored),
        "guided_vs_grid_in_order_99": ratio(guided, least.get("grid", math.inf)),
        "shuffled_prior_vs_random_99": ratio(shuffled, least.get("random", math.inf)),
        "samplers_that_did_not_reach": [m for m in SAMPLERS if m in until and not math.isfinite(until[m])],
    }


def draw(by_method: dict[str, list[Run]], grid: float) -> None:
    """Draw the median regret over GPU-seconds."""
    import numpy as np
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(8, 5), layout="constrained")
    plot = drawing.subplots()
    at = np.geomspace(grid * 1e-4, grid, 200)
    for method, runs in by_method.items():
        rows = [np.interp(at, *map(np.array, zip(*run.curve, strict=True)), left=0.0) for run in runs if run.curve]
        ends = median([run.curve[-1][0] for run in runs if run.curve])
        regret = 1 - np.median(rows, axis=0)
        plot.plot(at[at <= ends] / grid, regret[at <= ends], label=method)
    plot.axhline(1 - SHARES[1], color="black", linestyle=":", linewidth=1)
    plot.set(
        xscale="log", yscale="log", xlabel="GPU-seconds over those of the whole grid", ylabel="hypervolume missing"
    )
    plot.set_ylim(1e-4, 1.1)
    plot.legend(fontsize="small")
    RESULTS.mkdir(exist_ok=True)
    drawing.savefig(RESULTS / "search.png", dpi=120)


if __name__ == "__main__":
    sys.exit(main())
