"""What is simulated, and what it comes to: for those who ask, and have no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainers.ledger import MicroBatch
from trainers.result import RankMemory
from trainers.shape import ModelShape
from trainers.strategies import Setting


@dataclass(frozen=True)
class Task:
    """One rank of one configuration to simulate."""

    shape: ModelShape
    setting: Setting
    batch: MicroBatch
    rank: int = 0
    whole: bool = True
    """all blocks, which also tells what is reserved; else an extrapolation from few"""


Simulated = Mapping[str, RankMemory] | str
"""The peak of each phase, or why there is none."""


def highest(found: Mapping[str, RankMemory], kind: Literal["allocated", "reserved"], *without: str) -> int:
    """Return the most bytes of any phase but those `without`."""
    return max(int(getattr(memory, kind)) for phase, memory in found.items() if phase not in without)


def ends(setting: Setting) -> tuple[int, ...]:
    """Return the ranks of which one holds most: of a pipeline those of its first and its last stage."""
    return (0, setting.plan.world - 1) if setting.plan.pp > 1 else (0,)
