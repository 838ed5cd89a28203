"""The description of a sweep's run in MLflow, in markdown: the frontier, what failed, how to go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sweeps.mlflow_view import cut, params, varying
from sweeps.outcome import TrialOutcome
from sweeps.pareto import Frontier
from sweeps.spec import SweepSpec

LENGTH, ROWS, FAILURES = 8000, 15, 8


def note(
    spec: SweepSpec,
    outcomes: Sequence[TrialOutcome],
    frontier: Frontier,
    links: Mapping[str, str],
    *,
    headline: str,
    view: str,
    commands: Sequence[str],
) -> str:
    """Return the parent run's description, in markdown; `links`: trial id to where its run is shown.

    MLflow folds it after three lines, so the headline and the link to the comparison come first.
    """
    head = [cut(headline, 500), "", f"[Compare the trials]({view})", ""]
    shown = varying(spec)[:6]
    columns = ["rank", "trial", *shown, *(o.label for o in frontier.objectives), "best at"]
    head += ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)] if frontier.points else []
    table = list(_rows(outcomes, frontier, links, shown))
    hidden = len(frontier.points) - ROWS
    rest = ["", f"… and {hidden} more: frontier.json"] if hidden > 0 else []
    failed = [o for o in outcomes if o.status != "COMPLETED"]
    failures = [f"- {_link(o.trial_id, links)} {o.status}: {cut(_cell(o.reason), 160)}" for o in failed]
    rest += ["", f"{len(failed)} of {len(outcomes)} trials did not complete:", ""] if failed else []
    hidden = len(failures) - FAILURES
    last = [f"- … and {hidden} more: filter `tags.trial.status`"] if hidden > 0 else []
    tail = ["", "```", *commands, "```"] if commands else []
    return _fit(head, table[:ROWS], rest, failures[:FAILURES], [*last, *tail])


def _rows(
    outcomes: Sequence[TrialOutcome], frontier: Frontier, links: Mapping[str, str], shown: Sequence[str]
) -> Iterator[str]:
    configs = {o.trial_id: params(o) for o in outcomes if o.status == "COMPLETED"}
    best = frontier.best()
    for rank, point in enumerate(frontier.points):
        trial = point.trial_ids[0]
        same = f" (= {', '.join(point.trial_ids[1:4])})" if len(point.trial_ids) > 1 else ""
        values = [configs.get(trial, {}).get(name, "") for name in shown] + [f"{v:.5g}" for v in point.values]
        cells = [str(rank), _link(trial, links) + same, *(cut(_cell(v), 24) for v in values)]
        cells.append(", ".join(best.get(trial, [])))
        yield "| " + " | ".join(cells) + " |"


def _link(trial: str, links: Mapping[str, str]) -> str:
    return f"[{trial}]({links[trial]})" if trial in links else trial


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _fit(head: list[str], rows: list[str], middle: list[str], failures: list[str], tail: list[str]) -> str:
    while True:
        content = "\n".join([*head, *rows, *middle, *failures, *tail])
        if len(content) <= LENGTH or not (rows or failures):
            return cut(content, LENGTH)
        (failures or rows).pop()
