"""What a frontier can trade off: one file each, registered by name. A direction is part of the definition, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from trainers.registry import Registry


@dataclass(frozen=True)
class Estimate:
    """What is measured or believed of configurations: numbers, or arrays of them."""

    memory_gib: Any
    """the peak of a device"""
    step_time_s: Any
    """of an update"""
    tokens: Any
    """of an update over all ranks, without padding"""
    targets: Any
    workers: Any
    tokens_to_target: Any
    evaluating_s: Any
    """all evaluations and saves up to the target"""
    price: float = 1.0
    """USD per GPU-hour"""
    storage_usd: float = 0.0

    @property
    def time_to_target_s(self) -> Any:
        return self.tokens_to_target / self.tokens * self.step_time_s + self.evaluating_s

    @property
    def cost_usd(self) -> Any:
        return self.price * self.workers * self.time_to_target_s / 3600 + self.storage_usd


@dataclass(frozen=True)
class Objective:
    """A metric of finished trials and whether less or more of it is better."""

    name: str
    direction: Literal["minimize", "maximize"]
    label: str  # column head, with unit
    best_word: str  # what the best trial is called
    of: Callable[[Estimate], Any] | None = None
    """what follows from an estimate; None: it is not known before a trial has run"""
    learned: bool = False
    """whether it follows from what is learned alone, so that every learning configuration must run to know it"""

    @property
    def timed(self) -> bool:
        """Tell whether it follows from how long a step takes."""
        if self.of is None:
            return False
        one, two = (self.of(Estimate(1.0, step, 1.0, 1.0, 1.0, 1.0, 0.0)) for step in (1.0, 2.0))
        return bool(one != two)

    @property
    def sign(self) -> float:
        """Multiply a value by this to get something that is minimised."""
        return 1.0 if self.direction == "minimize" else -1.0


OBJECTIVES: Registry[Objective] = Registry("objective", __name__)


def objective(
    name: str,
    direction: Literal["minimize", "maximize"],
    label: str,
    best_word: str,
    of: Callable[[Estimate], Any] | None = None,
    learned: bool = False,
) -> None:
    """Register an objective over the metric of the same name."""
    OBJECTIVES.register(name)(Objective(name, direction, label, best_word, of, learned))
