"""The parallel strategies: one file each, registered by name.

A strategy owns all it touches: which combinations are legal, how the model is wrapped, how gradients are reduced.
Modules here import torch inside functions only, since legality is asked on machines that have none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainers.plan import Plan
from trainers.registry import Registry

if TYPE_CHECKING:
    from torch import nn

    from trainers.config import Scalar, SystemConfig
    from trainers.ranks import World
    from trainers.shape import ModelShape


@dataclass(frozen=True)
class Option:
    """A setting that exists only with one strategy: a conditional axis of the search space."""

    name: str
    type: type
    default: Scalar
    help: str
    choices: tuple[Any, ...] = ()


class Strategy(ABC):
    """The contract of an axis. Instances hold no state: all methods are functions of their arguments."""

    options: tuple[Option, ...] = ()

    @abstractmethod
    def plan(self, system: SystemConfig) -> Plan:
        """Return the degrees that `system.num_workers` ranks are split into."""

    def validate(self, plan: Plan, shape: ModelShape | None) -> list[str]:
        """Return why this plan is illegal for a model of this shape: one rule a line, empty when it is legal."""
        return []

    @abstractmethod
    def apply(self, model: nn.Module, world: World) -> nn.Module:
        """Wrap the model for training on `world`. The result is called like the model."""

    @abstractmethod
    def accumulating(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """Return the context of every micro step but the last of a window: no gradient is communicated in it."""

    @abstractmethod
    def gradient_divisor(self, plan: Plan) -> int:
        """Return what the reduction divides the gradient sum by; the loss is multiplied by it to undo it."""


STRATEGIES: Registry[Strategy] = Registry("strategy", __name__)
