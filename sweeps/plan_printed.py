"""A plan on the terminal, and the accounts of its candidates as a figure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sweeps.candidates import FREE
from sweeps.forecast import BOUND, HOST, NCCL_GIB, OUTSIDE_GIB, PROCESS_GIB, Prediction
from sweeps.plan import Plan
from sweeps.plan_scaling import DEGREES, best_of_each, scaled
from sweeps.settling import SIMULATION_BOUND
from sweeps.wording import figure, words
from trainers.result import GIB, Accounts

MOST_ROWS = 40
MOST_BARS = 24
WIDE, NARROW = 175, 110  # columns of a terminal: from where the accounts have room; below which less has
SHORT = {
    "weights": "weights", "gradients": "grads", "optimizer_state": "optim", "activations": "activ", "temporary": "temp",
}  # fmt: skip
STYLES = {"FITS": "green", "AT_RISK": "yellow", "OOM": "red"}


def print_plan(plan: Plan) -> None:
    """Print the candidates, best first, with what is assumed; and draw them."""
    console = Console(highlight=False)
    if console.width < 100 and not console.is_terminal:
        console = Console(highlight=False, width=220)
    cluster = plan.forecaster.cluster
    capacity = f"{cluster.nodes * cluster.devices_per_node} × {cluster.device}, {cluster.device_memory_gib:g} GiB each"
    if plan.forecaster.capacity_gib < cluster.device_memory_gib:
        capacity += f", of which {plan.forecaster.capacity_gib:g} may be used (memory_limit_gib)"
    elif plan.forecaster.limit_gib is not None:
        capacity += f"; memory_limit_gib={plan.forecaster.limit_gib:g} is no less, and changes nothing"
    console.print(f"{plan.shape.name}, {numbers(plan.shape.num_parameters)} parameters, on {cluster.name}: {capacity}")
    axes = [name for name in varying([p.config for p in plan.predictions]) if name not in FREE]
    same = [name for name in plan.predictions[0].config if name not in axes and name not in FREE]
    console.print(Text(f"in all: {words(plan.predictions[0].config, same)}", style="dim"), soft_wrap=True)
    accounts = list(SHORT) if console.width >= WIDE else []
    heads = ["verdict", "GiB", "up to", "decides", *(SHORT[a] for a in accounts), "step s", "tokens/s", "USD/1M tokens"]
    left_out = {"up to", "decides", "tokens/s"} if console.width < NARROW else set()
    shown = [i for i, head in enumerate(["", *heads]) if head not in left_out]
    table = empty("configuration", *(head for head in heads if head not in left_out))
    first, others = plan.predictions[:MOST_ROWS], plan.predictions[MOST_ROWS:]
    simulated = [p for p in others if p.by == "simulation"][:MOST_ROWS]  # these were asked for
    for p in (*first, *simulated):
        cells = row(p, axes, accounts)
        table.add_row(*(cells[i] for i in shown))
    console.print(table)
    if more := Counter(p.verdict for p in others if p.by != "simulation"):
        console.print(f"… and {', '.join(f'{n} {name}' for name, n in more.items())} more in predictions.jsonl")
    verdicts = Counter(p.verdict for p in plan.predictions)
    several = ", some by several rules" if any(len(c.reasons) > 1 for c in plan.pruned) else ""
    console.print(", ".join(f"{n} {name}" for name, n in verdicts.items()) + f"; {len(plan.pruned)} pruned{several}")
    for rule, n in Counter(r for c in plan.pruned for r in c.reasons).most_common(8):
        console.print(Text(f"  pruned {n}: {rule}", style="dim"), soft_wrap=True)
    if not verdicts["FITS"] and not verdicts["AT_RISK"]:
        console.print(Text(next_step(plan)), soft_wrap=True)
    for text in assumptions(plan):
        console.print(Text(f"  {text}", style="dim"), soft_wrap=True)
    if plan.spec.scaling:
        print_scaling(console, plan, axes)
    draw(plan, axes)
    console.print(f"predictions:  {shlex.quote(str(plan.folder / 'predictions.jsonl'))}", soft_wrap=True)
    console.print(f"figure:       {shlex.quote(str(plan.folder / 'memory.png'))}", soft_wrap=True)


def empty(name: str, *heads: str) -> Table:
    """Return a table whose first column is as wide as it can be."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(name, min_width=26)
    for head in heads:
        table.add_column(head, no_wrap=True)
    return table


def print_scaling(console: Console, plan: Plan, axes: Sequence[str]) -> None:
    """Print what the best configuration of each strategy would do on more GPUs, with what that assumes."""
    groups = scaled(best_of_each(plan.predictions), plan.spec.model, plan.forecaster)
    cluster = plan.forecaster.cluster
    for steps in groups:
        same = [axis for axis in axes if axis not in ("num_workers", "global_batch_size")]
        console.print(f"\nOn more GPUs: {words(steps[0].prediction.config, same)}")
        table = empty("GPUs", "batch", "verdict", "GiB", "step s", "tokens/s", "efficiency", "USD/1M tokens")
        for step in steps:
            p = step.prediction
            verdict = Text(p.verdict, style=STYLES[p.verdict])
            times = (figure(p.step_time_s), figure(p.tokens_per_second), f"{step.efficiency:.0%}")
            batch = str(step.global_batch_size)
            price = figure(p.usd_per_million_tokens)
            table.add_row(str(step.num_workers), batch, verdict, f"{p.point_gib:.1f}", *times, price)
        console.print(table)
    if not groups:
        console.print("\nOn more GPUs: no configuration fits, or none can have more")
        return
    shown = {words(steps[0].prediction.config, DEGREES) for steps in groups}
    left_out = [name for p in plan.predictions if (name := words(p.config, DEGREES)) not in shown]
    if left_out:
        console.print(f"\nnot shown, as none fits several GPUs of this cluster: {'; '.join(dict.fromkeys(left_out))}")
    for text in (
        (
            f"nodes of {cluster.devices_per_node}, each GPU with {cluster.inter_node_link_bytes_per_s / 1e9:g} GB/s to "
            "other nodes, none shared or slower; no stragglers, no failures"
        ),
        "rings as NCCL models them: 3.4 µs a step within a node, 14 µs between nodes; no trees, no in-network sums",
        "batch: rows of an update. It grows where every GPU's micro batch asks for more: that learns otherwise",
        "efficiency: tokens per second and GPU, over the first line's; above 100%: the optimizer is divided further",
    ):
        console.print(Text(f"  {text}", style="dim"), soft_wrap=True)


def row(p: Prediction, axes: Sequence[str], accounts: Sequence[str]) -> list[str | Text]:
    """Return a prediction as cells; memory in GiB."""
    sizes = (f"{getattr(p.accounts, name) / GIB:.1f}" for name in accounts)
    decides = HOST if p.phase == HOST else f"{SHORT[p.account]} in {p.phase.replace('_', ' ')}"
    step = figure(p.step_time_s) + ("†" if p.started else "")
    times = (step, figure(p.tokens_per_second), figure(p.usd_per_million_tokens))
    name = words(p.config, axes)
    return [
        name,
        Text(p.verdict + ("*" if p.by == "simulation" else ""), style=STYLES[p.verdict]),
        f"{p.point_gib:.1f}",
        f"{p.upper_gib:.1f}",
        decides,
        *sizes,
        *times,
    ]


# What makes less of an account.
LESS = {
    "weights": "learning.adapter=qlora, or more GPUs with system.strategy=fsdp2, system.zero_stage=3, system.tp or pp",
    "gradients": "learning.adapter=lora, or more GPUs with system.strategy=fsdp2, system.zero_stage=2 or system.tp",
    "optimizer_state": "learning.adapter=lora, or more GPUs with system.strategy=fsdp2 or zero, or system.offload",
    "activations": (
        "a smaller system.micro_batch_size or learning.seq_len, system.activation_checkpointing=full, system.tp or cp"
    ),
    "temporary": "a smaller system.micro_batch_size or learning.seq_len, or system.tp, which divides the logits",
}


def next_step(plan: Plan) -> str:
    """Return what to try where nothing fits: by what decides for the one that lacks least."""
    there, capacity = plan.forecaster.cluster.host_memory_gib, plan.forecaster.capacity_gib
    nearest = min(plan.predictions, key=lambda p: (p.phase == HOST, p.point_gib))
    on_host = min((p.host_gib for p in plan.predictions if p.phase == HOST and p.upper_gib <= capacity), default=None)
    solve = "" if plan.spec.solve == "num_workers" else "; solve=num_workers tells on how many GPUs each would"
    if nearest.phase == HOST:
        return f"nothing fits: the host's memory is short; offload less, or fewer GPUs a node{solve}"
    account, gib = nearest.account, f"{nearest.point_gib:.0f} GiB"
    text = f"nothing fits: the nearest needs {gib}, most of it {account.replace('_', ' ')}: {LESS[account]}{solve}"
    if on_host is not None:
        text += (
            f". Offloaded, some would fit the device, but need {on_host:.0f} GiB of a node's {there:g} of host memory"
        )
    return text


def assumptions(plan: Plan) -> list[str]:
    """Return what the figures rest on, a sentence each."""
    forecaster = plan.forecaster
    by = Counter(p.by for p in plan.predictions)
    risky = sum(p.verdict == "AT_RISK" and p.by == "ledger" and not p.note for p in plan.predictions)
    found = [
        "memory: every row is seq_len tokens long and all of them are targets, the worst that data can be",
        (
            f"GiB: the accounts, and beside them {OUTSIDE_GIB:g} of context and libraries; with several GPUs "
            f"{NCCL_GIB:g} of NCCL's buffers, too"
        ),
        (
            f"verdict: FITS where {BOUND:.0%} more than predicted fits (up to), OOM where {BOUND:.0%} less does not, "
            "AT_RISK between: so far has the closed form been off"
        ),
    ]
    if plan.spec.solve == "num_workers":
        found.append("num_workers: on as many nodes as it takes; where none fits, the most that the batch allows")
    have = forecaster.cluster.nodes * forecaster.cluster.devices_per_node
    widest = max(int(p.config["num_workers"]) for p in plan.predictions)
    if widest < have:
        found.append(f"num_workers: at most {widest} of the {have} GPUs, as the space says: system.num_workers={have}")
    if plan.spec.solve != "num_workers" and widest > have:
        found.append(f"num_workers: more than the {have} GPUs of the cluster, on as many such nodes as it takes")
    if by["simulation"]:
        reserved = f"what torch's allocator would reserve, and {SIMULATION_BOUND:.0%}"
        found.append(f"*: simulated, {by['simulation']} of them; up to: {reserved}")
    found += sorted({p.note for p in plan.predictions if p.note})
    host = max((p.host_gib for p in plan.predictions), default=0.0)
    found.append(
        f"host memory: up to {host:.0f} GiB of a node's {forecaster.cluster.host_memory_gib:g}; for each rank "
        f"{PROCESS_GIB:g} GiB, what is offloaded, and a copy of its trained weights"
    )
    if forecaster.correction is None:
        found.append("time: a constant part of the device's peak; it ranks, the first measured trials tell seconds")
    else:
        trials = f"{forecaster.correction.trials} trials of {plan.spec.corrected_by}"
        found.append(f"time: corrected by {trials}: {forecaster.correction}")
    if any(p.started for p in plan.predictions):
        found.append("†: starting the kernels takes longer than running them: a larger micro batch costs little")
    if plan.spec.simulate == "at_risk" and not by["simulation"]:
        found.append("simulate=at_risk: none is at risk, and nothing was simulated")
    found.append(f"price: {forecaster.price:g} USD per GPU-hour")
    if risky:
        found.append(f"simulate=at_risk runs the real code of the {risky} at risk on fake tensors, seconds each")
    return found


def numbers(count: int) -> str:
    """Return a number of parameters, as models are named by it."""
    return f"{count / 1e9:.2f}e9" if count >= 1e8 else f"{count / 1e6:.2f}e6"


def varying(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the axes on which configurations that have them differ."""
    names = dict.fromkeys(name for c in configs for name in c)
    return [n for n in names if len({str(c[n]) for c in configs if n in c}) > 1]


def draw(plan: Plan, axes: Sequence[str]) -> None:
    """Draw the accounts of the first candidates as stacked bars against the device's memory."""
    from matplotlib.figure import Figure  # not pyplot: no window, no state

    shown = plan.predictions[:MOST_BARS]
    drawing = Figure(figsize=(10, 1.5 + 0.32 * len(shown)), layout="constrained")
    plot = drawing.subplots()
    left = [0.0] * len(shown)
    for name in Accounts.names():
        sizes = [getattr(p.accounts, name) / GIB for p in shown]
        plot.barh(range(len(shown)), sizes, left=left, label=name.replace("_", " "))
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    outside = [p.point_gib - p.accounts.total / GIB for p in shown]
    plot.barh(range(len(shown)), outside, left=left, label="context and NCCL", color="lightgray")
    limit = "what may be used of it" if plan.forecaster.capacity_gib < plan.forecaster.cluster.device_memory_gib else ""
    plot.axvline(plan.forecaster.capacity_gib, color="black", linestyle="--", label=limit or "the device's memory")
    plot.set_yticks(range(len(shown)), [f"{words(p.config, axes)}  {p.verdict}" for p in shown], fontsize=7)
    plot.invert_yaxis()
    plot.set_title(f"{plan.shape.name} on {plan.forecaster.cluster.name}: the first {len(shown)}", fontsize="medium")
    plot.set_xlabel("GiB of a device, predicted")
    drawing.legend(fontsize="small", loc="outside lower center", ncols=4)
    drawing.savefig(plan.folder / "memory.png", dpi=120)
