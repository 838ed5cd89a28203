"""What binds a trial, the change to try first, what that should bring, and whether it did where the sweep tried it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sweeps.candidates import DERIVED, FREE
from sweeps.outcome import TrialOutcome
from sweeps.scaling import RATE
from trainers.result import GIB, Accounts
from trainers.shape import ModelShape
from trainers.timing import peak_phase

PEAK = "peak_memory_gib"
WAITS = 0.15  # of a step: from here on what it waits for is worth a change
PADDED = 0.15
RECOMPUTES = 0.15
TOLERANCE = 0.2  # relative: how far from what was expected a change may come out and still be called true
# Options that come and go with a value of another axis.
OPTIONS = {
    "strategy": {
        "zero_stage",
        "zero_engine",
        "offload",
        "reshard_after_forward",
        "sync_each_batch",
        "dp_replicate",
        "reduce_dtype",
    },
    "adapter": {"lora_rank", "lora_alpha", "lora_dropout", "lora_targets"},
}
Config = Mapping[str, Any]
"""the axes of a trial, flat"""


@dataclass(frozen=True)
class Advice:
    """One change to one trial."""

    trial_id: str
    binds: str
    """what limits it: an account of memory in a phase, or a part of the step"""
    text: str
    """the change, in words"""
    change: Config
    """the change as axes; empty where it is none that the space knows"""
    figure: str
    """the metric that should fall or rise"""
    expected: float | None
    """what the metric should become; None where nothing measured tells"""
    verdict: str = ""
    """what became of it, where the sweep holds a trial with the change"""
    refuted: bool = False
    """whether that trial was no better"""


Ledger = Callable[[Config], Accounts | None]
"""The accounts at the peak of a configuration; None where they cannot be told."""


def advise(
    outcomes: Sequence[TrialOutcome],
    shape: ModelShape | None,
    legal: Callable[[Config], bool] = lambda _: True,
    ledger: Ledger = lambda _: None,
) -> list[Advice]:
    """Return for each trial that ran or ran out of memory the first change to try, for memory and for speed.

    Where the sweep has refuted it, the next one follows. `legal` tells whether a configuration may run.
    """
    trials, drift = [o for o in outcomes if o.repeats is None], _drift(outcomes)
    return [
        advice
        for o in trials
        for ways in (_by_ledger(_of_memory(o, shape), o, ledger), _of_time(o))
        for advice in _up_to_the_first_open(ways, o, trials, legal, drift)
    ]


def _by_ledger(ways: Iterable[Advice], outcome: TrialOutcome, ledger: Ledger) -> Iterator[Advice]:
    """Yield advice on memory with what the ledger expects: of a trial that ran in proportion to what it took."""
    before = ledger(outcome.config)
    for advice in ways:
        after = ledger(changed(outcome.config, advice.change)) if advice.change else None
        if after is not None and before:
            peak = outcome.metrics.get(PEAK)
            advice = replace(advice, expected=after.total / before.total * peak if peak else after.total / GIB)
        yield advice


def _drift(outcomes: Sequence[TrialOutcome]) -> float:
    """Return by how much trials that were timed again were faster or slower, at most, relatively."""
    first = {o.trial_id: o.metrics[RATE] for o in outcomes if RATE in o.metrics}
    again = [(first[o.repeats], first[o.trial_id]) for o in outcomes if o.repeats in first and o.trial_id in first]
    return max((abs(b / a - 1) for a, b in again), default=0.0)


def _up_to_the_first_open(
    ways: Iterable[Advice],
    outcome: TrialOutcome,
    trials: Sequence[TrialOutcome],
    legal: Callable[[Config], bool],
    drift: float,
) -> Iterator[Advice]:
    """Yield advice up to the first that the sweep has not refuted, leaving out what may not run."""
    for advice in ways:
        if advice.change and not legal(changed(outcome.config, advice.change)):
            continue
        checked = _checked(advice, outcome, trials, drift)
        yield checked
        if not checked.refuted:
            return


def changed(config: Config, change: Config) -> dict[str, Any]:
    """Return a configuration with a change, without what followed from what it was."""
    return {**_without(config, DERIVED | _dependent(change)), **change}


def _dependent(change: Config) -> set[str]:
    return {name for axis in change for name in OPTIONS.get(axis, ())}


def _without(config: Config, names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def _of_memory(outcome: TrialOutcome, shape: ModelShape | None) -> Iterator[Advice]:
    if outcome.status == "OOM":
        yield from _of_oom(outcome)
        return
    measured = outcome.measured
    peak = peak_phase(measured) if measured is not None else None
    if measured is None or peak is None:
        return
    phase = peak[0]
    accounts = measured.memory[phase].worst.accounts
    largest = accounts.largest
    share = getattr(accounts, largest) / max(accounts.total, 1)
    binds = f"{_words(largest)} in {_words(phase)} ({share:.0%} of the peak)"
    for change, text, factor in _changes(outcome.config, largest, shape):
        kept = accounts.total - sum(getattr(accounts, name) * (1 - left) for name, left in factor.items())
        gib = outcome.metrics.get(PEAK, 0.0) * kept / max(accounts.total, 1)
        yield Advice(outcome.trial_id, binds, text, change, PEAK, gib)


Change = tuple[dict[str, Any], str, dict[str, float]]
"""The axes to change, in words, and what is left of each account that it changes."""


def _changes(config: Mapping[str, Any], account: str, shape: ModelShape | None) -> Iterator[Change]:
    """Yield the changes that lessen an account, the one that costs least first."""
    if account in ("activations", "temporary"):
        yield from _smaller_batch(config)
        if account == "activations" and config.get("activation_checkpointing") != "full":
            left = _left_by_recomputing(shape)
            yield {"activation_checkpointing": "full"}, "recompute in the backward pass", {"activations": left}
    else:
        yield from _fewer_states(config)
    yield from _smaller_batch(config)


def _smaller_batch(config: Mapping[str, Any]) -> Iterator[Change]:
    micro = int(config.get("micro_batch_size") or 1)
    if micro > 1:
        halved = {"activations": 0.5, "temporary": 0.5}
        yield {"micro_batch_size": micro // 2}, f"micro_batch_size {micro} → {micro // 2}", halved


def _fewer_states(config: Mapping[str, Any]) -> Iterator[Change]:
    workers, strategy = int(config.get("num_workers") or 1), config.get("strategy")
    ways = workers // max(1, int(config.get("tp") or 1) * int(config.get("pp") or 1))
    states = ("weights", "gradients", "optimizer_state")
    if ways > 1 and strategy == "ddp":
        yield {"strategy": "fsdp2"}, f"shard the state over {ways} ranks", dict.fromkeys(states, 1 / ways)
    if config.get("adapter") == "full":
        yield {"adapter": "lora"}, "train an adapter", {"gradients": 0.05, "optimizer_state": 0.05}
    if config.get("adapter") == "lora":
        yield {"adapter": "qlora"}, "keep the base in 4 bits", {"weights": 0.3}


def _left_by_recomputing(shape: ModelShape | None) -> float:
    """Return which part of the activations full recomputation keeps: each block's input, and one block's own.

    Per token and block 16 h + 4 q + 4 k + 8 f bytes are kept in bfloat16, of which 2 h are the input.
    """
    if shape is None:
        return 0.3
    q, k = shape.query_size, shape.key_value_size
    block = 16 * shape.hidden_size + 4 * q + 4 * k + 8 * shape.intermediate_size
    return min(1.0, 2 * shape.hidden_size / block + 1 / shape.num_hidden_layers)


# Of a failure: what to try first, by the phase in which memory ran out.
_AFTER_OOM: Mapping[str, tuple[str, dict[str, Any]]] = {
    "load": ("build it sharded, or keep the base in 4 bits, or take a smaller model", {"strategy": "fsdp2"}),
    "first_optimizer_step": ("train an adapter, or shard the optimizer's state, or offload it", {"adapter": "lora"}),
    "optimizer": ("shard the optimizer's state, or offload it", {"strategy": "fsdp2"}),
    "save": ("save what is sharded as it is (strategy=fsdp2)", {"strategy": "fsdp2"}),
}


def _of_oom(outcome: TrialOutcome) -> Iterator[Advice]:
    phase = outcome.phase or ""
    binds = f"out of memory in {_words(phase)}" if phase else "out of memory"

    def advice(text: str, change: Config) -> Advice:
        return Advice(outcome.trial_id, binds, text, change, PEAK, None)

    if phase in _AFTER_OOM:
        text, change = _AFTER_OOM[phase]
        there = all(outcome.config.get(name) == value for name, value in change.items())
        yield advice(text, {} if there else change)
        return
    for change, text, _ in _smaller_batch(outcome.config):
        yield advice(text, change)
    if outcome.config.get("activation_checkpointing") != "full":
        yield advice("recompute in the backward pass", {"activation_checkpointing": "full"})
    yield advice("shorter rows (seq_len), or divide them (cp), or shard the model (fsdp2, tp)", {})


def _of_time(outcome: TrialOutcome) -> Iterator[Advice]:
    m, config = outcome.metrics, outcome.config
    rate = m.get(RATE)
    if rate is None or "collective_share" not in m:
        return

    def advice(part: str, share: float, text: str, change: Mapping[str, Any]) -> Advice:
        # At best what it waits for, or does in vain, is gone.
        return Advice(
            outcome.trial_id, f"{part} ({share:.0%} of the step)", text, change, RATE,
            rate / (1 - share) if change else None,
        )  # fmt: skip

    waits: dict[str, Callable[[float], Advice]] = {
        "collective_share": lambda s: advice("collectives", s, *_less_talk(config)),
        "pipeline_idle_share": lambda s: advice("pipeline idle", s, *_more_micro_batches(config)),
        "transfer_share": lambda s: advice("host transfers", s, "no offload", _off(config, "offload", "none")),
        "data_share": lambda s: advice("data", s, "tokenise before, or faster storage", {}),
    }
    name = max(waits, key=lambda n: m.get(n, 0.0))
    if m.get(name, 0.0) >= WAITS:
        yield waits[name](m[name])
    if m.get("padding_share", 0.0) >= PADDED and config.get("arrangement") == "drawn":
        yield advice("padding", m["padding_share"], "arrangement=length", {"arrangement": "length"})
    if m.get("recompute_share", 0.0) >= RECOMPUTES:
        for lighter in ("selective", "none") if config.get("activation_checkpointing") == "full" else ("none",):
            text = f"activation_checkpointing={lighter}, if memory allows"
            yield advice("recomputation", m["recompute_share"], text, {"activation_checkpointing": lighter})
    computes = f"computation (mfu {m['mfu']:.0%})" if "mfu" in m else "computation"
    text = "a larger micro batch fills the device better, if memory allows"
    larger = {"micro_batch_size": 2 * int(config.get("micro_batch_size") or 1)}
    yield Advice(outcome.trial_id, computes, text, larger, RATE, None)


def _less_talk(config: Config) -> tuple[str, dict[str, Any]]:
    """Return how to communicate less often or less in all."""
    if config.get("strategy") == "zero" and int(config.get("zero_stage") or 1) > 1:
        return "divide less (zero_stage=1), if memory allows", {"zero_stage": 1}
    if config.get("sync_each_batch") and int(config.get("gradient_accumulation_steps") or 1) > 1:
        return "sync_each_batch=false sums gradients once an update, if memory allows", {"sync_each_batch": False}
    if config.get("reshard_after_forward"):
        text = "reshard_after_forward=false gathers once instead of twice, if memory allows"
        return text, {"reshard_after_forward": False}
    micro = int(config.get("micro_batch_size") or 1)
    if int(config.get("gradient_accumulation_steps") or 1) > 1:
        return f"micro_batch_size {micro} → {2 * micro}: fewer, larger steps", {"micro_batch_size": 2 * micro}
    return "fewer ranks, a larger batch, or faster links", {}


def _more_micro_batches(config: Config) -> tuple[str, dict[str, Any]]:
    micro = int(config.get("micro_batch_size") or 1)
    if micro > 1:
        return f"micro_batch_size {micro} → {micro // 2}: more of them in the pipeline", {
            "micro_batch_size": micro // 2
        }
    return "pp_schedule=interleaved_1f1b, or balance the stages", _off(config, "pp_schedule", "interleaved_1f1b")


def _off(config: Mapping[str, Any], axis: str, value: Any) -> dict[str, Any]:
    return {axis: value} if config.get(axis) not in (None, value) else {}


def _checked(advice: Advice, before: TrialOutcome, trials: Sequence[TrialOutcome], drift: float) -> Advice:
    """Return the advice with what the trial that follows it showed, where there is one."""
    ignored = DERIVED | FREE | _dependent(advice.change)
    wanted = _without({**before.config, **advice.change}, ignored)
    after = next((o for o in trials if advice.change and _without(o.config, ignored) == wanted), None)
    if after is None or after.status == "FAILED":
        return advice
    was, became = before.metrics.get(advice.figure), after.metrics.get(advice.figure)
    if became is None:
        return replace(advice, verdict=f"trial {after.trial_id}: {after.status}", refuted=True)
    if was is None:  # it had run out of memory
        return replace(advice, verdict=f"trial {after.trial_id}: fits, came true")
    verdict = f"trial {after.trial_id}: {was:.4g} → {became:.4g}"
    noise = drift + sum(o.metrics.get("step_time_precision", 0.0) for o in (before, after))
    if advice.figure == RATE and abs(became / was - 1) <= noise:
        return replace(advice, verdict=f"{verdict}, no more than the noise (± {noise:.0%})", refuted=True)
    better = became < was if advice.figure == PEAK else became > was
    near = advice.expected is None or abs(became - advice.expected) <= TOLERANCE * advice.expected
    said = "came true" if better and near else "helped, by less or more than expected" if better else "did not help"
    return replace(advice, verdict=f"{verdict}, {said}", refuted=not better)


def _words(name: str) -> str:
    return name.replace("_", " ")
