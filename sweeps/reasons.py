"""Why a configuration was chosen, in sentences of figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sweeps.compose import COST, OFF
from sweeps.decide import MEMORY, RATE, TIME, TOKEN_COST, WORKERS, Decision, figure_of
from sweeps.objectives import OBJECTIVES
from sweeps.outcome import TrialOutcome
from sweeps.wording import counted, figure, words
from trainers.result import GIB

PHASES = ("forward", "backward", "first_optimizer_step", "optimizer", "eval", "save")


def shown(name: str, value: float) -> str:
    """Write a figure with its unit."""
    if name == TIME:
        size, unit = next(((size, unit) for size, unit in ((3600, "h"), (60, "min")) if value >= size), (1, "s"))
        return f"{value / size:.3g} {unit}"
    if name == WORKERS:
        return counted(int(value), "worker")
    units = {COST: "USD to target", TOKEN_COST: "USD per million target tokens", MEMORY: "GiB", RATE: "target tok/s"}
    return f"{figure(value)} {units.get(name, name)}"


def why(decision: Decision, axes: Sequence[str]) -> str:
    """Return the reason against the runners-up, in one paragraph. `axes`: what tells configurations apart."""
    choice, other, first = decision.choice, decision.next_best, decision.order[0]
    assert choice is not None, "there is a reason for a choice only"
    leads = {
        "cheapest": "the cheapest", "fastest": "the fastest", "smallest": "the smallest",
        "safest": "the one that leaves most memory",
    }  # fmt: skip
    lead = leads[decision.wish.priority] if decision.wish.weights is None else "the best by your weights"
    among = f" of {counted(len(decision.considered), 'configuration')} that meet the constraints"
    text = [f"It is {lead}{among}: {shown(first, figure_of(choice, first))}."]
    if len(decision.tied) > 1:
        others = ", ".join(t.trial_id for t in decision.tied if t is not choice)
        text.append(f"As good, within what measuring scatters: {others}; it is the simplest of them.")
    if other is not None:
        text.append(f"The next best, trial {other.trial_id} ({words(other.config, axes)}), {versus(other, choice)}.")
    return " ".join(text)


def versus(other: TrialOutcome, choice: TrialOutcome) -> str:
    """Say by how much another trial is dearer, slower, smaller …, in all that both have."""
    pairs = ((COST, "costs"), (TIME, "takes"), (RATE, "trains at"), (MEMORY, "needs"), (WORKERS, "uses"))
    said = []
    for name, verb in pairs:
        a, b = figure_of(other, name), figure_of(choice, name)
        known = all(x not in (float("inf"), float("-inf")) for x in (a, b))
        if known and (a != b or name == COST) and not (name == RATE and TIME in choice.metrics):
            said.append(f"{verb} {shown(name, a)}{_relative(a, b)}")
    return ", ".join(said)


def _relative(value: float, base: float) -> str:
    if not base or value == base:
        return " as well" if value == base else ""
    ratio = value / base
    if ratio >= 2 or ratio <= 0.5:
        return f" ({ratio:.3g} times as much)"
    return f" ({ratio - 1:+.1%})" if abs(ratio - 1) < 0.1 else f" ({ratio - 1:+.0%})"


def if_wrong(decision: Decision) -> str:
    """Say what it would cost to be wrong: by how much the next best is worse."""
    choice, other = decision.choice, decision.next_best
    if choice is None or other is None:
        return "there is no other configuration that meets the constraints"
    for name in decision.order:
        a, b = figure_of(other, name), figure_of(choice, name)
        if a != b:
            better = name in OBJECTIVES and OBJECTIVES[name].sign * (a - b) < 0
            if better and len(decision.tied) > 1:
                return f"nothing: trial {other.trial_id} is as good, with {shown(name, a)}"
            return f"the next best, trial {other.trial_id}, has {shown(name, a)}{_relative(a, b)}"
    return f"nothing: trial {other.trial_id} has the same figures"


def confidence(decision: Decision) -> str:
    """Say how sure the choice is, and what that rests on."""
    choice = decision.choice
    assert choice is not None
    m, rests = choice.metrics, []
    if "step_time_precision" in m:
        rests.append(f"its step time is known to ± {m['step_time_precision']:.0%}")
    if choice.composed_with is not None:
        rests.append(f"its cost is composed with the learning of trial {choice.composed_with}, and no run of its own")
    elif COST in m:
        off = f", {abs(m[OFF]):.1%} {'above' if m[OFF] > 0 else 'below'} what was composed for it" if OFF in m else ""
        rests.append(f"its cost is that of a run of its own{off}")
    if choice.parity is not None:
        rests.append("it takes the steps that one process takes")
    else:
        rests.append("that it learns what one process learns was not proved")
    sure = "" if decision.confidence is None else f"{decision.confidence:.0%} that it is not worse than the next best; "
    return sure + ", ".join(rests)


def headroom(choice: TrialOutcome, capacity_gib: float | None) -> str:
    """Say what memory the phases take, and what is left of a device."""
    phases = phase_peaks(choice)
    said = ", ".join(f"{name.replace('_', ' ')} {figure(gib)}" for name, gib in phases.items())
    of = f" of {figure(capacity_gib)}" if capacity_gib is not None else ""
    left = f", {figure(capacity_gib - choice.metrics[MEMORY])} left" if capacity_gib is not None else ""
    return f"{figure(choice.metrics[MEMORY])}{of} GiB at the peak{left}" + (f" ({said})" if said else "")


def phase_peaks(outcome: TrialOutcome) -> dict[str, float]:
    """Return the peak of each phase over the ranks, GiB."""
    measured = outcome.measured
    memory = measured.memory if measured is not None else {}
    return {name: memory[name].reserved / GIB for name in PHASES if name in memory}


def against(baseline: TrialOutcome, choice: TrialOutcome) -> str:
    """Compare the choice with what a person runs now."""
    if baseline.trial_id == choice.trial_id:
        return "it is what you run now"
    said = []
    a, b = figure_of(baseline, COST), figure_of(choice, COST)
    if 0 < b < a < float("inf") or 0 < a < b < float("inf"):
        said.append(f"{a / b:.2g} times cheaper" if a > b else f"{b / a:.2g} times dearer")
    a, b = figure_of(baseline, MEMORY), figure_of(choice, MEMORY)
    if math.isfinite(a) and math.isfinite(b):
        said.append(f"{figure(abs(a - b))} GiB {'less' if b <= a else 'more'} of a device")
    a, b = figure_of(baseline, TIME), figure_of(choice, TIME)
    if 0 < b < float("inf") and 0 < a < float("inf") and a != b:
        said.append(f"{max(a / b, b / a):.2g} times {'faster' if a > b else 'slower'} to the target")
    state = "" if baseline.status == "COMPLETED" else f" (which ended as {baseline.status}: {baseline.reason})"
    return f"beside what you run now, trial {baseline.trial_id}{state}: {', '.join(said) or 'it has no figures'}"


def relaxed(decision: Decision, axes: Sequence[str]) -> list[str]:
    """Say which constraint to relax, by how much, for which configuration."""
    given = decision.wish.model_dump()
    lines = []
    for option in decision.relax:
        parts = [f"{key}={_up(value)} (by {_up(value - given[key])})" for key, value in option.needed.items()]
        lines.append(f"{' and '.join(parts)}: trial {option.trial.trial_id} ({words(option.trial.config, axes)})")
    return lines


def _up(value: float) -> str:
    """Write a number above 0 with four digits, rounded up: what is written would do."""
    scale = 10 ** (3 - math.floor(math.log10(value)))
    return f"{math.ceil(value * scale - 1e-9) / scale:.10g}"


def figures(outcome: TrialOutcome) -> dict[str, Any]:
    """Return what a script wants of a trial."""
    names: Mapping[str, None] = dict.fromkeys((*OBJECTIVES, WORKERS, "tokens_to_target", "step_time_s"))
    metrics = {n: outcome.metrics[n] for n in names if n in outcome.metrics} | {WORKERS: outcome.num_workers}
    composed = {"composed_with": outcome.composed_with} if outcome.composed_with is not None else {}
    return {"trial": outcome.trial_id, "config": dict(outcome.config), "figures": metrics, **composed}
