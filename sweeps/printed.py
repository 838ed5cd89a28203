"""What is printed when a sweep has ended: its trials side by side, what they took and why, and the frontier."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sweeps.candidates import varying
from sweeps.compose import COST, OFF
from sweeps.outcome import TrialOutcome
from sweeps.predict import STEP, SUM
from sweeps.sweep import Report
from sweeps.wording import FIGURES, configuration, counted, figure, mib, parity, state, words
from trainers.result import GIB, Accounts
from trainers.split import PARTS
from trainers.timing import peak_phase
from trainers.traces import SHOWN_BY

MOST_ROWS = 40  # of the table of all trials
LEAST_SHOWN = 0.005  # of a step: a part that is smaller in every trial has no column


def print_report(report: Report, resume_command: str) -> None:
    """Print how the sweep ended: frontier, failures, untried, and the commands to go on with."""
    console = Console(highlight=False)
    if console.width < 100 and not console.is_terminal:
        console = Console(highlight=False, width=140)
    console.print()
    _print_trials(console, report)
    _print_accounts(console, report)
    _print_parts(console, report)
    _print_advice(console, report)
    _print_scaling(console, report)
    _print_frontier(console, report)
    _print_others(console, report)
    _print_confirmed(console, report)
    for text in report.warnings:
        console.print(Text(f"! {text}", style="yellow"))
    untried = f"; {report.untried} legal candidate(s) untried" if report.untried else ""
    repeats = sum(o.repeats is not None for o in report.outcomes)
    trials = counted(len(report.outcomes) - repeats, "trial") + (
        f" and {counted(repeats, 'repeat')}" if repeats else ""
    )
    console.print(f"{trials}: {report.why}{untried}")
    if report.ended in ("interrupted", "budget", "failing") or report.spent:
        console.print(f"go on:    {resume_command}", soft_wrap=True)
    console.print(f"results:  {shlex.quote(str(report.folder))}", soft_wrap=True)
    if report.spec.trace != "none":
        shown_by = SHOWN_BY.get(report.spec.trace, "")
        console.print(f"traces:   {shlex.quote(str(report.folder / 'traces'))}{shown_by}", soft_wrap=True)
    if report.ui_command:
        console.print(f"compare:  {report.ui_command}", soft_wrap=True)
    console.print(f"open:     {report.url}", soft_wrap=True)


def _print_trials(console: Console, report: Report) -> None:
    """Print all trials side by side, with how far each is from the steps of one process."""
    if len(report.outcomes) > MOST_ROWS:
        return
    axes = varying([c for c in report.candidates if c.legal])
    heads = ["trial", "configuration", "state", *(label for _, label in FIGURES), "parity"]
    rows: list[list[str | Text]] = [
        [
            outcome.trial_id,
            configuration(outcome.config, outcome.repeats, axes, outcome.kind),
            state(outcome.status),
            *(figure(outcome.metrics.get(name)) for name, _ in FIGURES),
            parity(outcome),
        ]
        for outcome in report.outcomes
    ]
    _print_table(console, f"Trials of {report.sweep_id}", heads, rows, wrapped=("configuration",))


def _print_accounts(console: Console, report: Report) -> None:
    """Print what the peak of memory is made of, trial by trial."""
    rows = []
    for outcome in report.outcomes[:MOST_ROWS]:
        measured = outcome.measured
        peak = peak_phase(measured) if measured is not None else None
        if measured is None or peak is None:
            if SUM in outcome.metrics:  # it ran out of memory
                rows.append([outcome.trial_id, "predicted", "", *map(mib, _predicted(outcome)), ""])
            continue
        phase, rank = peak
        memory = measured.memory[phase].worst
        accounts = (getattr(memory.accounts, name) for name in Accounts.names())
        held = memory.reserved - memory.allocated
        sizes = (*accounts, memory.allocated, held)
        rows.append([outcome.trial_id, phase.replace("_", " "), str(rank), *map(mib, sizes)])
        if SUM in outcome.metrics:
            told = zip(sizes, _predicted(outcome), strict=False)
            ratios = (f"{size / p:.2f}" if p >= 2**20 / 10 else "" for size, p in told)
            rows.append(["", "÷ predicted", "", *ratios, ""])
    heads = [name.replace("_", " ") for name in Accounts.names()]
    names = ["trial", "peak in", "rank", *heads, "allocated", "+ reserved"]
    title = "Memory at the peak, MiB: five accounts, their sum, what the allocator keeps beside; over its prediction"
    _print_table(console, title, names, rows)


def _predicted(outcome: TrialOutcome) -> list[int]:
    """Return the bytes that were predicted at the peak: the accounts, and their sum."""
    names = [*(f"predicted_{name}_gib" for name in Accounts.names()), SUM]
    return [round(outcome.metrics[name] * GIB) for name in names]


def _print_parts(console: Console, report: Report) -> None:
    """Print where the time of a step goes, trial by trial."""
    names = [f"{part}_share" for part in PARTS]
    shown = [o for o in report.outcomes[:MOST_ROWS] if all(name in o.metrics for name in names)]
    used = [n for n in names if any(o.metrics[n] >= LEAST_SHOWN for o in shown)]
    heads = [n.removesuffix("_share").replace("_", " ") for n in used]
    rows = []
    for o in shown:
        m = o.metrics
        precision = f"{m['step_time_s']:.4g} ± {m['step_time_precision']:.0%}"
        also = (f"{m[n]:.0%}" if n in m else "" for n in ("padding_share", "mfu", "hfu", "straggler_spread"))
        ratio = f"{m['step_time_s'] / m[STEP]:.2f}" if STEP in m else ""
        rows.append([o.trial_id, precision, ratio, *(f"{m[n]:.0%}" for n in used), *also])
    _print_table(
        console,
        "Time of a step, by part (profiled)",
        ["trial", "step s", "÷ predicted", *heads, "padding", "mfu", "hfu", "spread"],
        rows,
    )


def _print_advice(console: Console, report: Report) -> None:
    """Print what binds each trial, and what to change first."""
    rows = []
    for a in report.advice[: 2 * MOST_ROWS]:
        unit = "GiB" if a.figure == "peak_memory_gib" else "target tok/s"
        expected = f"{'≤ ' if unit != 'GiB' else ''}{figure(a.expected)} {unit}" if a.expected is not None else ""
        rows.append([a.trial_id, a.binds, a.text, expected, a.verdict])
    _print_table(
        console, "What binds, and what to try first", ["trial", "binds", "try", "expected", "what became of it"], rows
    )


def _print_scaling(console: Console, report: Report) -> None:
    """Print speed-up and efficiency of configurations that ran with several numbers of workers."""
    rows = []
    for group in report.scaling:
        for p in group.points:
            rows.append(
                [p.trial_id, str(p.num_workers), figure(p.rate), f"{p.speedup:.2f}×", f"{p.efficiency:.0%}",
                 f"{p.gpu_time_ratio:.2f}×"]
            )  # fmt: skip
    heads = ["trial", "workers", "target tok/s", "speed-up", "efficiency", "GPU time"]
    _print_table(console, "Scaling", heads, rows)


def _print_table(
    console: Console,
    title: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    wrapped: Collection[str] | None = None,
) -> None:
    """Print a table that has rows; `wrapped`: the columns that may take several lines, None for all."""
    if not rows:
        return
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for head in heads:
        table.add_column(head, no_wrap=wrapped is not None and head not in wrapped)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _print_frontier(console: Console, report: Report) -> None:
    objectives = report.frontier.objectives
    axes = varying([c for c in report.candidates if c.legal])
    by_id = {o.trial_id: o for o in report.outcomes}
    target = f", target eval loss {report.target:.4f}" if report.target is not None else ""
    if report.outcomes and all(o.status == "OOM" for o in report.outcomes):
        limit = report.spec.memory_limit_gib
        advice = "smaller batches, more recomputation, or shards are above"
        at = f" at memory_limit_gib={limit:g}: raise it, or try what is advised above" if limit else f": {advice}"
        console.print(f"No frontier: every trial ran out of memory{at}")
        return
    if not report.frontier.points:
        console.print(
            f"No frontier: no trial has a value for every objective ({', '.join(o.name for o in objectives)}){target}"
        )
        if any(o.reason_kind == "budget" and o.status == "COMPLETED" for o in report.outcomes):
            console.print(
                "the target was not reached: raise budget.tokens_per_trial, or give a higher target_eval_loss"
            )
        return
    best = report.frontier.best()
    heads = ["trial", "configuration", *(o.label for o in objectives), "best at"]
    rows = [
        [
            ", ".join(point.trial_ids) + (f" ≈ {', '.join(point.tied)}" if point.tied else ""),
            words(by_id[point.trial_ids[0]].config, axes),
            *(figure(v) for v in point.values),
            ", ".join(best.get(point.trial_ids[0], [])),
        ]
        for point in report.frontier.points
    ]
    title = f"Frontier of {report.sweep_id}{target}"
    _print_table(console, title, heads, rows, wrapped=("configuration", "best at"))


def _print_confirmed(console: Console, report: Report) -> None:
    """Print by how much the costs of whole runs differ from what was composed for them."""
    for outcome in report.outcomes:
        if outcome.kind == "confirmation" and OFF in outcome.metrics:
            cost, off = figure(outcome.metrics[COST]), outcome.metrics[OFF]
            console.print(
                f"confirmed: trial {outcome.trial_id}: {cost} USD to target, {abs(off):.1%} "
                f"{'more' if off > 0 else 'less'} than what was composed for it"
            )
    composed = [f"{o.trial_id} with {o.composed_with}" for o in report.outcomes if o.composed_with is not None]
    if composed:
        console.print(f"composed costs, the speed of one trial with the learning of another: {', '.join(composed)}")
        if report.spec.confirm and not any(o.kind == "confirmation" for o in report.outcomes):
            console.print("  and no trial ran whole to confirm one")


def _print_others(console: Console, report: Report) -> None:
    ranks = report.frontier.ranks()
    tied = {trial for point in report.frontier.points for trial in point.tied}
    others = [o for o in report.outcomes if o.trial_id not in ranks and o.competes and not o.reason]
    names = [o.name for o in report.frontier.objectives]
    dominated = [o for o in others if o.trial_id not in tied and all(n in o.metrics for n in names)]
    lacking = [o.trial_id for o in others if any(n not in o.metrics for n in names)]
    if tied:
        console.print("≈: dominated by less than the intervals of both step times")
    if dominated and ranks:
        console.print(f"dominated: {', '.join(o.trial_id for o in dominated)}")
    if lacking and ranks:
        console.print(f"without a value for every objective, or run whole as another trial: {', '.join(lacking)}")
    for outcome in report.outcomes:
        if outcome.reason:
            where = (
                f" in {outcome.phase} on rank {outcome.rank}"
                if outcome.status not in ("COMPLETED", "STOPPED") and outcome.phase
                else ""
            )
            console.print(
                f"trial {outcome.trial_id} {outcome.status} ({outcome.reason_kind}){where}: {outcome.reason}",
                markup=False,
                soft_wrap=True,
            )
        for detail in outcome.details:
            console.print(f"    {detail}", markup=False, soft_wrap=True)
