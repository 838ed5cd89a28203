"""What a frontier can trade off: one file each, registered by name. A direction is part of the definition, once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainers.registry import Registry


@dataclass(frozen=True)
class Objective:
    """A metric of finished trials and whether less or more of it is better."""

    name: str
    direction: Literal["minimize", "maximize"]
    label: str  # column head, with unit
    best_word: str  # what the best trial is called

    @property
    def sign(self) -> float:
        """Multiply a value by this to get something that is minimised."""
        return 1.0 if self.direction == "minimize" else -1.0


OBJECTIVES: Registry[Objective] = Registry("objective", __name__)


def objective(name: str, direction: Literal["minimize", "maximize"], label: str, best_word: str) -> None:
    """Register an objective over the metric of the same name."""
    OBJECTIVES.register(name)(Objective(name, direction, label, best_word))
