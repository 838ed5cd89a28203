"""From two simulations of few blocks to a model of many: memory is affine in their number, instant by instant.

A model's blocks are alike but for those at its ends. The same instant of the same block, counted from the nearer end,
holds so much more for every block more; the instants of the blocks between are then between those of their neighbours.
The highest instant may be another one at another depth, so that whole peaks must not be extrapolated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from trainers.memory import MemoryMeter
from trainers.memory_trace import Part
from trainers.model import blocks
from trainers.result import Accounts

SHALLOW, DEEP = 5, 7  # blocks: two at the beginning, three at the end, and none or two between
FIRST, LAST = 2, 3
INNER = "inner"

Levels = Sequence[tuple[int, ...]]
"""The accounts after one event after another, in the order of Accounts."""


@dataclass(frozen=True)
class Traced:
    """What a simulation of some blocks held, by part of the model."""

    blocks: int
    parts: Mapping[Part, Levels]


def mark(module: nn.Module, name: str, meter: MemoryMeter) -> None:
    """Let the meter know which block runs, forward and backward; `name`: of the module among those of this rank."""
    found = blocks(module)
    for i, block in enumerate(found):
        left = len(found) - i
        label = f"{name} {i}" if i < FIRST else f"{name} -{left}" if left <= LAST else INNER
        block.register_forward_pre_hook(_before(meter, label))
        block.register_forward_hook(_after(meter, label, f"{name} head" if left == 1 else None))


def _before(meter: MemoryMeter, label: str) -> Callable[..., None]:
    def begins(*_: object) -> None:
        meter.mark(label)

    return begins


def _after(meter: MemoryMeter, label: str, following: str | None) -> Callable[..., None]:
    def ended(_: object, __: object, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:  # its gradient comes when the block's backward pass begins
            hidden.register_hook(_before(meter, label))
        if following is not None:
            meter.mark(following)

    return ended


def extrapolated(shallow: Traced, deep: Traced, depth: int) -> dict[str, Accounts]:
    """Return the accounts at the peak of each phase with `depth` blocks. Raises ValueError if the two ran differently.

    Where a part has other events at another depth, as an optimizer's, its highest instants are taken for the same one.
    """
    missing = [p for p in set(shallow.parts) ^ set(deep.parts) if p.name != INNER]
    if missing:
        raise ValueError(f"{len(missing)} parts run at one depth only, {missing[0]} among them")
    times = (depth - shallow.blocks) / (deep.blocks - shallow.blocks)
    found: dict[str, Accounts] = {}
    for part, levels in shallow.parts.items():
        if part.name == INNER:
            continue
        here, there = _alike(np.array(levels, dtype=float), np.array(deep.parts[part], dtype=float))
        instants = here + (there - here) * times
        highest = Accounts(*(round(n) for n in instants[instants.sum(axis=1).argmax()]))
        if part.phase not in found or highest.total > found[part.phase].total:
            found[part.phase] = highest
    return found


def _alike(here: np.ndarray, there: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two series of instants that answer each other one by one."""
    if here.shape == there.shape:
        return here, there
    return here[[here.sum(axis=1).argmax()]], there[[there.sum(axis=1).argmax()]]
