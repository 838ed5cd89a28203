"""The command line that chooses: `python sweeps/choose.py priority=cheapest [key=value …]`."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# As a script this file's folder is first on the path, where its neighbours' names could hide other packages.
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from pydantic import ValidationError
from rich.console import Console

from sweeps import reasons, space
from sweeps.candidates import DERIVED, varying_of
from sweeps.clusters import price_per_gpu_hour
from sweeps.decide import Decision, Wish, decide, priced
from sweeps.journal import Journal
from sweeps.outcome import TrialOutcome
from sweeps.spec import SweepSpec, keys
from sweeps.usage import described
from sweeps.wording import words
from trainers.errors import UserError

EXIT_BAD_INPUT, EXIT_NOTHING_FEASIBLE = 2, 1


class Request(Wish):
    """A choice to make."""

    sweep: str = "latest"
    """a sweep's id, or latest"""
    runs_dir: str = "runs"
    """where sweeps are"""


@dataclass(frozen=True)
class Choice:
    """A decision, and the sweep that it was made on."""

    request: Request
    sweep_id: str
    folder: Path
    spec: SweepSpec
    price: float
    trials: tuple[TrialOutcome, ...]
    decision: Decision
    axes: tuple[str, ...]
    """what tells the trials' configurations apart"""
    capacity_gib: float | None
    """memory of a device; None: not known"""
    baseline: TrialOutcome | None
    """what the person runs now"""


def main(arguments: Sequence[str]) -> int:
    """Choose; return the exit status: 0 done, 1 nothing meets the constraints, 2 bad input."""
    words_given = [a for a in arguments if a != "--json"]
    if {"-h", "--help", "help"} & set(arguments):
        print(usage())
        return 0
    warnings.filterwarnings("ignore", category=FutureWarning)  # of libraries to their authors
    try:
        choice = choose(read_command(words_given))
    except UserError as error:
        print("\n".join(f"error: {fault}" for fault in error.faults), file=sys.stderr)
        return EXIT_BAD_INPUT
    if "--json" in arguments:
        print(json.dumps(as_json(choice), indent=1, ensure_ascii=False, allow_nan=False))
    else:
        print_choice(choice)
    return 0 if choice.decision.choice is not None else EXIT_NOTHING_FEASIBLE


def read_command(arguments: Sequence[str]) -> Request:
    """Return what is asked for. Raises UserError with all faults."""
    given = space.parse_overrides(arguments, KEYS)
    try:
        return Request.model_validate(given)
    except ValidationError as error:
        raise UserError(space.faults_of(error, KEYS)) from None


def choose(request: Request) -> Choice:
    """Decide on the trials of a sweep. Raises UserError where there is no such sweep, or nothing to choose from."""
    journal = Journal.find(request.sweep, Path(request.runs_dir).expanduser().resolve(), "sweep")
    spec = space.validate(journal.spec_tree(), Path.cwd(), {})
    price = request.price_per_gpu_hour
    price = price if price is not None else price_per_gpu_hour(spec, lambda _: None)
    trials = priced([o for o in journal.read() if not o.cut_short], price)
    decision = decide(trials, request)
    axes = tuple(name for name in varying_of([t.config for t in trials]) if name not in DERIVED)
    baseline = trials[0] if spec.baseline is not None else None  # it ran first
    capacity = device_memory_gib(spec, trials)
    return Choice(
        request, journal.sweep_id, journal.folder, spec, price, tuple(trials), decision, axes, capacity, baseline
    )


def device_memory_gib(spec: SweepSpec, trials: Sequence[TrialOutcome]) -> float | None:
    """Return what a device has, or may use; None where that is not known, as on a CPU."""
    if spec.memory_limit_gib is not None:
        return spec.memory_limit_gib
    told = (((t.result or {}).get("environment") or {}).get("device_memory_gib") for t in trials)
    return next((float(gib) for gib in told if gib), None)


def print_choice(choice: Choice) -> None:
    """Print the choice and its reason; without one, which constraint to relax."""
    console = Console(highlight=False)
    decision = choice.decision
    if decision.choice is None:
        console.print(f"Nothing in {choice.sweep_id} meets the constraints. The least that must give:")
        for line in reasons.relaxed(decision, choice.axes):
            console.print(f"  {line}", markup=False)
        return
    for head, text in paragraphs(choice):
        console.print(f"[bold]{head}[/bold]  {text}", highlight=False)


def paragraphs(choice: Choice) -> list[tuple[str, str]]:
    """Return what a person reads: head and text."""
    decision, chosen = choice.decision, choice.decision.choice
    assert chosen is not None
    price = f"{choice.price:g} USD per GPU-hour"
    found = [
        ("Choice    ", f"trial {chosen.trial_id} of {choice.sweep_id}: {words(chosen.config, choice.axes)}"),
        ("Why       ", f"{reasons.why(decision, choice.axes)} At {price}."),
        ("If wrong  ", reasons.if_wrong(decision)),
        ("Confidence", reasons.confidence(decision)),
        ("Memory    ", reasons.headroom(chosen, choice.capacity_gib)),
    ]
    if choice.baseline is not None:
        found.append(("Baseline  ", reasons.against(choice.baseline, chosen)))
    return found


def as_json(choice: Choice) -> dict[str, Any]:
    """Return the choice for scripts."""
    decision = choice.decision
    asked = choice.request.model_dump(exclude_none=True, exclude={"runs_dir"})
    head = {"schema": 1, "sweep": choice.sweep_id, "asked": asked, "price_per_gpu_hour": choice.price}
    if decision.choice is None:
        given = decision.wish.model_dump()
        relax = [
            {
                "trial": r.trial.trial_id,
                "constraints": {k: {"given": given[k], "needed": v} for k, v in r.needed.items()},
            }
            for r in decision.relax
        ]
        return {**head, "choice": None, "relax": relax}
    others = [reasons.figures(t) for t in decision.considered if t is not decision.choice]
    return {
        **head,
        "choice": reasons.figures(decision.choice),
        "reason": reasons.why(decision, choice.axes),
        "if_wrong": reasons.if_wrong(decision),
        "confidence": decision.confidence,
        "tied": [t.trial_id for t in decision.tied],
        "others": others,
        "baseline": reasons.against(choice.baseline, decision.choice) if choice.baseline is not None else None,
    }


KEYS = keys(Request)


def usage() -> str:
    """Return the help text: keys, types, defaults."""
    lines = ["usage: python sweeps/choose.py [priority=cheapest] [key=value …] [--json]", ""]
    lines += described(KEYS)
    lines += ["", "exit status: 0; 1 nothing meets the constraints; 2 bad input"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
