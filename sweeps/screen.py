"""The terminal while trials run: a live table, or plain lines where there is no terminal."""

from __future__ import annotations

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
from sweeps.search import SEARCHERS
from sweeps.spec import SweepSpec
from sweeps.standing import Standing
from sweeps.trial import Job
from sweeps.wording import FIGURES, clock, configuration, figure, state


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
        self._standing, self._why = "", ""

    def note(self, text: str) -> None:
        self._console.print(Text(f"  {text}", style="dim"), soft_wrap=True)

    def planned(self, candidates: Sequence[Candidate], to_run: int) -> None:
        legal = [c for c in candidates if c.legal]
        self._axes, self._to_run = varying(legal), to_run
        self._console.print(
            f"  {len(legal)} legal candidates, {len(candidates) - len(legal)} pruned; "
            f"{'at most ' if not SEARCHERS[self._spec.searcher].exhaustive else ''}{to_run} trials to run "
            f"(searcher={self._spec.searcher})"
        )
        for rule, n in pruned_rules(candidates).most_common(8):
            self.note(f"pruned {n}: {rule}")
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def started(self, job: Job, candidate: Candidate) -> None:
        self._rows[job.trial_id] = {
            "candidate": candidate.flat, "repeats": job.repeats, "kind": job.kind, "state": "starting",
            "since": time.time(),
        }  # fmt: skip
        self._why = job.why
        if self._live is None:
            text = configuration(candidate.flat, job.repeats, self._axes, job.kind)
            why = f"  [{job.why}]" if job.why else ""
            self._console.print(f"trial {job.trial_id} start  {text}{why}", soft_wrap=True, markup=False)

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

    def stands(self, standing: Standing) -> None:
        self._standing = standing.text(self._spec.budget)
        if self._live is None:
            self._console.print(f"  {self._standing}", soft_wrap=True, markup=False)

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
                configuration(row["candidate"], row.get("repeats"), self._axes, row.get("kind", "quality")),
                state(row["state"]),
                figure(row.get("loss")),
                *(figure(metrics.get(name)) for name, _ in FIGURES),
            )
        below = [f"  {self._clock()}   Ctrl-C stops; the sweep can be resumed"]
        below += [f"  {text}" for text in (self._standing, f"now for {self._why}" if self._why else "") if text]
        return Group(table, *(Text(text, style="dim") for text in below))

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
