"""How the terminal names things: settings, figures, states, durations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from sweeps.outcome import TrialOutcome

SHORT = {
    "activation_checkpointing": "recompute",
    "offload_activations": "offload_act",
    "reshard_after_forward": "reshard",
    "sync_each_batch": "sync",
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


# Axes whose value 1, false or none says something.
NEVER_OFF = (
    "num_workers",
    "micro_batch_size",
    "zero_stage",
    "reshard_after_forward",
    "sync_each_batch",
    "lora_rank",
    "global_batch_size",
)


def words(config: Mapping[str, Any], axes: Sequence[str]) -> str:
    """Write a configuration in a line: the strategy, then every other axis that varies and is not switched off."""
    named = [str(config["strategy"])] if "strategy" in axes else []
    for axis in axes:
        given = config.get(axis)
        off = given is None or (axis not in NEVER_OFF and given in (False, 1, "none"))
        if axis != "strategy" and not off:
            named.append(f"{SHORT.get(axis, axis)}={value(given)}")
    return " ".join(named)


def configuration(config: Mapping[str, Any], repeats: str | None, axes: Sequence[str], kind: str = "quality") -> str:
    """Write what a trial runs: its configuration, and what for; or which trial is only timed again."""
    if repeats:
        return f"(trial {repeats}, timed again)"
    return words(config, axes) if kind == "quality" else f"{words(config, axes)} ({kind})"


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


def counted(number: int, name: str) -> str:
    """Write a number of things."""
    return f"{number} {name}{'' if number == 1 else 's'}"


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
