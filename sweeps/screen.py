"""The terminal: a live table while trials run, plain lines where there is no terminal, the frontier at the end."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sweeps.candidates import Candidate, pruned_rules, varying
from sweeps.outcome import TrialOutcome
from sweeps.spec import SweepSpec
from sweeps.sweep import Report
from sweeps.trial import Job
from trainers.result import Accounts
from trainers.split import PARTS
from trainers.timing import peak_phase

SHORT = {
    "activation_checkpointing": "recompute",
    "offload_activations": "offload_act",
    "reshard_after_forward": "reshard",
    "zero_stage": "stage",
    "zero_engine": "engine",
    "pp_schedule": "schedule",
    "num_workers": "workers",
    "micro_batch_size": "micro",
    "learning_rate": "lr",
    "lora_rank": "rank",
    "attn_implementation": "attn",
    "global_batch_size": "batch",
    "gradient_accumulation_steps": "accum",
}
FIGURES = (
    ("peak_memory_gib", "peak GiB"),
    ("target_tokens_per_second", "target tok/s"),
    ("step_time_s", "step s"),
    ("eval_loss", "eval loss"),
    ("cost_per_quality_usd", "USD to target"),
)


MOST_ROWS = 40  # of the table of all trials
LEAST_SHOWN = 0.005  # of a step: a part that is smaller in every trial has no column
# Axes whose value 1, false or none says something.
NEVER_OFF = ("num_workers", "micro_batch_size", "zero_stage", "reshard_after_forward", "lora_rank", "global_batch_size")


class TerminalScreen:
    """Implements sweep.Screen on a terminal or, line by line, on anything else."""

    def __init__(self, spec: SweepSpec) -> None:
        self._spec = spec
        self._console = Console(highlight=False)
        self._axes: list[str] = []
        self._rows: dict[str, dict[str, Any]] = {}
        self._to_run = 0
        self._started = time.time()
        self._live: Live | None = None

    def note(self, text: str) -> None:
        self._console.print(Text(f"  {text}", style="dim"), soft_wrap=True)

    def planned(self, candidates: Sequence[Candidate], to_run: int) -> None:
        legal = [c for c in candidates if c.legal]
        self._axes, self._to_run = varying(legal), to_run
        self._console.print(
            f"  {len(legal)} legal candidates, {len(candidates) - len(legal)} pruned; "
            f"{to_run} trials to run (searcher={self._spec.searcher})"
        )
        for rule, n in pruned_rules(candidates).most_common(8):
            self.note(f"pruned {n}: {rule}")
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def started(self, job: Job, candidate: Candidate) -> None:
        self._rows[job.trial_id] = {"candidate": candidate.flat, "state": "starting", "since": time.time()}
        if self._live is None:
            self._console.print(f"trial {job.trial_id} start  {words(candidate.flat, self._axes)}", soft_wrap=True)

    def progress(self, trial_id: str, facts: Mapping[str, Any]) -> None:
        row = self._rows.get(trial_id)
        if row is None or "ended" in row:
            return
        if facts.get("phase") == "train":
            row["state"] = f"{facts['update']}/{facts['updates']}"
            row["loss"] = facts["loss"]
        else:
            row["state"] = str(facts.get("phase", row["state"]))

    def ended(self, outcome: TrialOutcome) -> None:
        row = self._rows.setdefault(outcome.trial_id, {"candidate": outcome.config, "since": outcome.started_at})
        row.update(state=outcome.status, ended=outcome.ended_at, metrics=outcome.metrics, reason=outcome.reason)
        if self._live is None:
            figures = "  ".join(
                f"{label} {figure(outcome.metrics[name])}" for name, label in FIGURES if name in outcome.metrics
            )
            why = f"  ({outcome.reason_kind}: {outcome.reason})" if outcome.reason else ""
            self._console.print(
                f"trial {outcome.trial_id} {outcome.status}  {figures}{why}  {outcome.wall_s:.0f}s",
                soft_wrap=True,
                markup=False,
            )

    def close(self) -> None:
        """Leave the live table; further prints are plain."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self) -> Group:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for head in (
            "trial",
            "configuration",
            "state",
            "loss",
            *(label for _, label in FIGURES),
        ):
            table.add_column(head, no_wrap=head != "configuration")
        for trial_id, row in sorted(self._rows.copy().items())[-30:]:  # a copy: trials start while this is drawn
            metrics = row.get("metrics", {})
            table.add_row(
                trial_id,
                words(row["candidate"], self._axes),
                state(row["state"]),
                figure(row.get("loss")),
                *(figure(metrics.get(name)) for name, _ in FIGURES),
            )
        return Group(table, Text(f"  {self._clock()}   Ctrl-C stops; the sweep can be resumed", style="dim"))

    def _clock(self) -> str:
        elapsed = time.time() - self._started
        rows = list(self._rows.copy().values())
        ended = [r["ended"] - r["since"] for r in rows if "ended" in r]
        text = f"{len(ended)}/{self._to_run} trials, {clock(elapsed)}"
        if ended and len(ended) < self._to_run:
            running = [time.time() - r["since"] for r in rows if "ended" not in r]
            left = sum(ended) / len(ended) * (self._to_run - len(ended)) - sum(running)
            text += f", about {clock(max(left / max(len(running), 1), 0))} left"
        if self._spec.budget.minutes is not None:
            text += f" of {self._spec.budget.minutes:g} min"
        return text


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
    for text in report.warnings:
        console.print(Text(f"! {text}", style="yellow"))
    untried = f"; {report.untried} legal candidate(s) untried" if report.untried else ""
    plural = "" if len(report.outcomes) == 1 else "s"
    console.print(f"{len(report.outcomes)} trial{plural}: {report.why}{untried}")
    if report.ended in ("interrupted", "budget", "failing"):
        console.print(f"go on:    {resume_command}", soft_wrap=True)
    console.print(f"results:  {shlex.quote(str(report.folder))}", soft_wrap=True)
    if report.ui_command:
        console.print(f"compare:  {report.ui_command}", soft_wrap=True)
    console.print(f"open:     {report.url}", soft_wrap=True)


def _print_trials(console: Console, report: Report) -> None:
    """Print all trials side by side, with how far each is from the steps of one process."""
    if not 1 < len(report.outcomes) <= MOST_ROWS:
        return
    axes = varying([c for c in report.candidates if c.legal])
    table = Table(title=f"Trials of {report.sweep_id}", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for head in ("trial", "configuration", "state", *(label for _, label in FIGURES), "parity"):
        table.add_column(head, no_wrap=head != "configuration")
    for outcome in report.outcomes:
        table.add_row(
            outcome.trial_id,
            words(outcome.config, axes),
            state(outcome.status),
            *(figure(outcome.metrics.get(name)) for name, _ in FIGURES),
            parity(outcome),
        )
    console.print(table)


def _print_accounts(console: Console, report: Report) -> None:
    """Print what the peak of memory is made of, trial by trial."""
    rows = []
    for outcome in report.outcomes[:MOST_ROWS]:
        measured = outcome.measured
        peak = peak_phase(measured) if measured is not None else None
        if measured is None or peak is None:
            continue
        phase, rank = peak
        memory = measured.memory[phase].worst
        accounts = (getattr(memory.accounts, name) for name in Accounts.names())
        held = memory.reserved - memory.allocated
        rows.append(
            [
                outcome.trial_id,
                phase.replace("_", " "),
                str(rank),
                *(mib(b) for b in (*accounts, memory.allocated, held)),
            ]
        )
    heads = [name.replace("_", " ") for name in Accounts.names()]
    names = ["trial", "peak in", "rank", *heads, "allocated", "+ reserved"]
    _print_table(
        console, "Memory at the peak, MiB: the five accounts, their sum, and what the allocator keeps", names, rows
    )


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
        rows.append([o.trial_id, precision, *(f"{m[n]:.0%}" for n in used), *also])
    _print_table(
        console,
        "Time of a step, by part (profiled)",
        ["trial", "step s", *heads, "padding", "mfu", "hfu", "spread"],
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


def _print_table(console: Console, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for head in heads:
        table.add_column(head)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _print_frontier(console: Console, report: Report) -> None:
    objectives = report.frontier.objectives
    axes = varying([c for c in report.candidates if c.legal])
    by_id = {o.trial_id: o for o in report.outcomes}
    target = f", target eval loss {report.target:.4f}" if report.target is not None else ""
    if not report.frontier.points:
        console.print(
            f"No frontier: no trial has a value for every objective ({', '.join(o.name for o in objectives)}){target}"
        )
        if any(o.reason_kind == "budget" and o.status == "COMPLETED" for o in report.outcomes):
            console.print(
                "the target was not reached: raise budget.tokens_per_trial, or give a higher target_eval_loss"
            )
        return
    table = Table(
        title=f"Frontier of {report.sweep_id}{target}", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False
    )
    for head in ("trial", "configuration", *(o.label for o in objectives), "best at"):
        table.add_column(head, no_wrap=head not in ("configuration", "best at"))
    best = report.frontier.best()
    for point in report.frontier.points:
        outcome = by_id[point.trial_ids[0]]
        table.add_row(
            ", ".join(point.trial_ids),
            words(outcome.config, axes),
            *(figure(v) for v in point.values),
            ", ".join(best.get(point.trial_ids[0], [])),
        )
    console.print(table)


def _print_others(console: Console, report: Report) -> None:
    ranks = report.frontier.ranks()
    dominated = [o for o in report.outcomes if o.trial_id not in ranks and o.status == "COMPLETED" and not o.reason]
    if dominated and ranks:
        console.print(f"dominated: {', '.join(o.trial_id for o in dominated)}")
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


def words(config: Mapping[str, Any], axes: Sequence[str]) -> str:
    """Write a configuration in a line: the strategy, then every other axis that varies and is not switched off."""
    named = [str(config["strategy"])] if "strategy" in axes else []
    for axis in axes:
        given = config.get(axis)
        off = given is None or (axis not in NEVER_OFF and given in (False, 1, "none"))
        if axis != "strategy" and not off:
            named.append(f"{SHORT.get(axis, axis)}={value(given)}")
    return " ".join(named)


def parity(outcome: TrialOutcome) -> Text:
    """Write how far a trial's first updates are from those of one process, and what its small model says."""
    found = outcome.parity
    if found is None:
        return Text("")
    shown = [f"{d:.0e}" for d in (found.difference, found.miniature_difference) if d is not None]
    text = " / ".join(shown) or "not finite"
    return Text(f"DIFFERS {text}", style="red") if outcome.differs else Text(text)


def state(text: str) -> Text:
    """Colour a trial's state."""
    style = {"COMPLETED": "green", "OOM": "red", "FAILED": "red", "STOPPED": "yellow", "INFEASIBLE": "yellow"}
    return Text(text, style=style.get(text, "cyan"))


def figure(number: float | None) -> str:
    """Write a number with four significant digits, large ones without decimals; empty for None."""
    if number is None:
        return ""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def mib(number: int) -> str:
    """Write bytes as MiB; empty for none."""
    return "" if number == 0 else f"{number / 2**20:,.1f}" if number < 2**30 else f"{number / 2**20:,.0f}"


def value(of: Any) -> str:
    """Write an axis value; empty where the axis does not apply."""
    return "" if of is None else f"{of:g}" if isinstance(of, float) else str(of)


def clock(seconds: float) -> str:
    """Write a duration as m:ss or h:mm:ss."""
    minutes, s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{s:02d}" if hours else f"{minutes}:{s:02d}"
