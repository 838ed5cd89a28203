"""The ways to divide one job among ranks: one file each, registered by name.

A *strategy* is the data-parallel method (`ddp`, `fsdp2`, `zero`). A *dimension* is a degree beside it (`tp`, `pp`,
`cp`; 1 switches it off). Each owns all it touches: its options, which combinations are legal, what it does to the
model. Modules here import torch inside functions only, since legality is asked on machines that have none.
"""

from __future__ import annotations

import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainers.plan import Plan
from trainers.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainers.config import LearningConfig, Scalar, SystemConfig
    from trainers.engine import Engine
    from trainers.layout import Layout
    from trainers.shape import ModelShape


BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float64": 8}
"""of a number"""


@dataclass(frozen=True)
class Option:
    """A setting that exists only with its owner: a conditional axis of the search space."""

    name: str
    type: type
    default: Scalar
    help: str
    choices: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Setting:
    """A configuration as its legality is judged, and as it is applied. `shape` is None where it is not known."""

    learning: LearningConfig
    system: SystemConfig
    plan: Plan
    shape: ModelShape | None
    device: str  # cuda or cpu
    dtype: str | None = None  # of compute, where it is not what the learning configuration says: for proofs in float64

    @property
    def compute_dtype(self) -> str:
        """float32, bfloat16 or float64: the dtype of compute and of frozen weights."""
        return self.dtype if self.dtype is not None else self._learned_dtype

    @property
    def _learned_dtype(self) -> str:
        """What the learning configuration says."""
        named = self.learning.param_dtype
        return named if named != "auto" else "bfloat16" if self.device == "cuda" else "float32"

    @property
    def half(self) -> bool:
        """Whether compute is in half precision, or would be but for a proof."""
        return "bfloat16" in (self.dtype, self._learned_dtype)

    @property
    def weight_dtype(self) -> str:
        """The dtype in which the base's weights are kept: float32 where they are trained in half precision."""
        trained = self.learning.adapter == "full"
        return "float32" if trained and self.compute_dtype == "bfloat16" else self.compute_dtype

    @property
    def width(self) -> int:
        """Bytes of a number in computing."""
        return BYTES[self.compute_dtype]

    @property
    def micro_batches(self) -> int:
        """How many micro batches a rank has in an update. Raises ValueError where they do not divide it."""
        return self.plan.accumulation(self.learning.global_batch_size, self.system.micro_batch_size)

    @property
    def options(self) -> Mapping[str, Scalar]:
        return self.system.options


@dataclass(frozen=True)
class Parameters:
    """The parameters of one rank's part of the model, before the data-parallel method divides them.

    A block's, and the root's: embedding, output head and final norm. Trained ones are counted, frozen ones in bytes.
    """

    trained_block: float
    frozen_block: float
    trained_root: float
    frozen_root: float
    blocks: int
    compute: int
    """bytes of a number in computing"""
    embedding: float
    """numbers of the embedding's gradient; 0 where it is frozen"""

    @property
    def trained(self) -> float:
        return self.blocks * self.trained_block + self.trained_root

    @property
    def frozen(self) -> float:
        return self.blocks * self.frozen_block + self.frozen_root

    @property
    def block_in_use(self) -> float:
        """Bytes of a block's weights as they are multiplied."""
        return self.compute * self.trained_block + self.frozen_block

    @property
    def root_in_use(self) -> float:
        return self.compute * self.trained_root + self.frozen_root

    @property
    def in_use(self) -> float:
        return self.blocks * self.block_in_use + self.root_in_use


@dataclass(frozen=True)
class Share:
    """The bytes that a rank holds of weights, gradients and optimizer state, and what it needs for a moment."""

    weights: float
    optimizer_state: float
    gradients: float
    """when the optimizer begins"""
    gradients_before: float
    """while the last micro batch of a window is on its forward pass"""
    gathered: float = 0.0
    """weights of other ranks, or in another dtype, while a block runs"""
    gathered_after: float = 0.0
    """what of these is still there when the model has run and the loss is computed"""
    gathering: float = 0.0
    """of the root's weights, as received and as used, when they are gathered again for the backward pass"""
    reducing: float = 0.0
    """gradients on their way, in the backward pass of the last block, the first to have some"""
    reducing_more: float = 0.0
    """the same in that of the others"""
    reducing_root: float = 0.0
    """of the root's, at the end of a backward pass"""
    stepping: float = 0.0
    """of the optimizer"""
    prefetching: float = 0.0
    """weights on their way, while blocks run"""
    bucketed: float = 0.0
    """gradients that wait to be sent, in the backward pass"""
    norm: float = 0.0
    """of the sum of squares of the gradients, before the optimizer runs"""
    flat: float = 0.0
    """numbers that the optimizer takes at once; 0: those of a parameter"""
    released: bool = False
    """whether gradients are gone when the optimizer runs: `stepping` has what it made of them"""

    def without(self, *kept_on_host: str) -> Share:
        """Return the share of a device whose `kept_on_host` are in host memory."""
        nothing: dict[str, Any] = dict.fromkeys(kept_on_host, 0.0)
        return replace(self, **nothing)


@dataclass(frozen=True)
class Traffic:
    """What a rank sends in an update: bytes; among how many ranks; beside computing or in its way.

    The ranks are every `stride`-th of their neighbours. `rings` times something goes once around all of them, `sends`
    times to the next one: each has its latency.
    """

    bytes: float
    ranks: int
    overlapped: bool
    stride: int = 1
    rings: float = 0.0
    sends: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """In how many bytes a trained number is kept: itself, its gradient, a master copy, AdamW's two moments."""

    weight: int
    gradient: int
    master: int
    moments: int

    @property
    def state(self) -> int:
        return self.master + self.moments

    @property
    def total(self) -> int:
        return self.weight + self.gradient + self.state


NATIVE = Recipe(weight=4, gradient=4, master=0, moments=8)
"""Of torch's own optimizers: float32 whatever is computed in, so that no master copy is needed."""


BUCKET = 25 * 2**20
"""Bytes that torch's DistributedDataParallel sums at once, by default."""


class Strategy(ABC):
    """The contract of a data-parallel method. Instances hold no state: methods are functions of their arguments."""

    options: tuple[Option, ...] = ()

    def plan(self, system: SystemConfig) -> Plan:
        """Return the degrees that `system.num_workers` ranks are split into. Raises ValueError where they are not."""
        return Plan.of(system.num_workers, tp=system.tp, pp=system.pp, cp=system.cp)

    def validate(self, setting: Setting) -> list[str]:
        """Return why this setting is illegal: one rule a line, empty when it is legal."""
        return []

    def make_engine(
        self, model: str, revision: str | None, setting: Setting, layout: Layout, total_updates: int, **options: Any
    ) -> Engine:
        """Build the engine that does the updates. `options`: `optimizer`; `prepare`, `weights`: see trainers.build."""
        from trainers.build import build

        built = build(model, revision, setting, layout, options.pop("prepare", None), options.pop("weights", None))
        return self.engine(setting)(built, setting, layout, total_updates, **options)

    def engine(self, setting: Setting) -> type[Engine]:
        """Return the kind of engine that does the updates."""
        from trainers.engine import NativeEngine

        return NativeEngine

    def before_memory(self, setting: Setting) -> bool:
        """Tell whether `apply` divides weights that are on the meta device, so that no rank ever holds all of them."""
        return True

    def share(self, setting: Setting, whole: Parameters, accumulation: int) -> Share:
        """Return what a rank holds; a method that divides nothing holds all."""
        gradients = NATIVE.gradient * whole.trained
        before = gradients if accumulation > 1 or self.keeps_gradients(setting) else 0.0
        weights, state = NATIVE.weight * whole.trained + whole.frozen, NATIVE.state * whole.trained
        return Share(weights, state, gradients, before, reducing_root=NATIVE.gradient * whole.embedding)

    def traffic(self, setting: Setting, whole: Parameters, micro_batches: int) -> list[Traffic]:
        """Return what a rank sends in an update; the gradients, summed once, where a method divides nothing.

        A ring of n ranks sends (n - 1) / n of a buffer to gather or to scatter it, and twice that to sum it.
        """
        size = NATIVE.gradient * whole.trained
        rings = 2 * math.ceil(size / BUCKET)
        ranks = setting.plan.dp * setting.plan.cp
        return [Traffic(2 * self.ring(setting) * size, ranks, True, setting.plan.tp, rings)]

    def starts(self, setting: Setting, whole: Parameters) -> float:
        """Return how many operations the host starts in a micro batch beside those of the model."""
        return 0.0

    def part(self, setting: Setting) -> float:
        """Return the part of the optimizer's work that a rank does."""
        return 1.0

    def to_host(self, setting: Setting, whole: Parameters, micro_batches: int) -> float:
        """Return the bytes that travel between a device and host memory in an update, where something is kept there."""
        return 0.0

    def ring(self, setting: Setting) -> float:
        """Return which part of a buffer a rank sends to gather or to scatter it."""
        ranks = setting.plan.dp * setting.plan.cp
        return (ranks - 1) / ranks

    @abstractmethod
    def apply(self, module: nn.Module, setting: Setting, layout: Layout) -> nn.Module:
        """Wrap a module (the model, or this rank's part of it) in place or not; the result is called like it."""

    def recomputation(self, setting: Setting) -> dict[str, Any]:
        """Return options of torch.utils.checkpoint, where a block's backward pass must be told of this strategy."""
        return {}

    def knows_float64(self, setting: Setting) -> bool:
        """Tell whether this method's engine can compute in float64."""
        return True

    @abstractmethod
    def accumulating(self, wrapped: nn.Module, setting: Setting, last: bool) -> AbstractContextManager[None]:
        """Return the context of one micro step, the `last` of its window or not; where gradients are communicated."""

    @abstractmethod
    def gradient_divisor(self, setting: Setting) -> int:
        """Return what the reduction divides the gradient sum by; the loss is multiplied by it to undo it."""

    def keeps_gradients(self, setting: Setting) -> bool:
        """Tell whether gradients stay between updates, as zeros: where they are views of buffers that stay anyway."""
        return False

    def optimizer(
        self, groups: list[dict[str, Any]], layout: Layout, cls: type[torch.optim.Optimizer], **options: Any
    ) -> torch.optim.Optimizer:
        """Build the optimizer over this rank's trained parameters."""
        return cls(groups, **options)


class Dimension(ABC):
    """The contract of a degree beside the data-parallel ones. Called only where its degree is above 1."""

    options: tuple[Option, ...] = ()

    @abstractmethod
    def validate(self, setting: Setting) -> list[str]:
        """Return why this setting is illegal: one rule a line, empty when it is legal."""

    def multiple(self, setting: Setting) -> int:
        """Return what the length of every row must be a multiple of; rows are padded to it."""
        return 1

    def knows_float64(self, setting: Setting) -> bool:
        """Tell whether what this degree adds can compute in float64."""
        return True

    def slows(self, setting: Setting) -> float:
        """Return how many times as long the host takes to start an operation of the model."""
        return 1.0

    @abstractmethod
    def traffic(self, setting: Setting, shape: ModelShape, tokens: float) -> Traffic:
        """Return what a rank sends in an update of `tokens` tokens on it."""

    @abstractmethod
    def apply(self, model: nn.Module, setting: Setting, layout: Layout) -> None:
        """Divide the model in place, before the strategy wraps it."""

    def shard_batch(self, batch: dict[str, torch.Tensor], setting: Setting, layout: Layout) -> dict[str, torch.Tensor]:
        """Return this rank's part of a batch: input_ids, targets and position_ids, each [rows, tokens]."""
        return batch


def illegal(setting: Setting) -> list[str]:
    """Return every rule of adapter, strategy and dimensions that forbids a setting; empty when it is legal."""
    from trainers import adapter

    used = dimensions(setting.system)
    rules = adapter.illegal(setting) + _attention_rules(setting) + STRATEGIES[setting.system.strategy].validate(setting)
    if used and setting.shape is None:
        rules.append("tp, pp and cp need a model of a known kind (Llama, Mistral, Qwen2, Qwen3)")
    return rules + [rule for dimension in used for rule in dimension.validate(setting)]


def _attention_rules(setting: Setting) -> list[str]:
    """Return why the attention kernel cannot be had."""
    if setting.system.attn_implementation != "flash_attention_2":
        return []
    rules = []
    if setting.device != "cuda":
        rules.append(
            f"attn_implementation=flash_attention_2 needs CUDA; this runs on {setting.device}: use sdpa or eager"
        )
    elif importlib.util.find_spec("flash_attn") is None:
        rules.append(
            "attn_implementation=flash_attention_2 needs the package flash-attn, which is not installed: use sdpa"
        )
    if setting.learning.param_dtype == "float32":
        rules.append("attn_implementation=flash_attention_2 computes in half precision: not with param_dtype=float32")
    return rules


def proof_dtype(setting: Setting) -> str:
    """Return the dtype in which a setting is proved equal to one process: float64 where all of it can."""
    owners: list[Strategy | Dimension] = [STRATEGIES[setting.system.strategy], *dimensions(setting.system)]
    exact = setting.learning.adapter != "qlora"  # 4-bit products know no float64
    return "float64" if exact and all(owner.knows_float64(setting) for owner in owners) else "float32"


STRATEGIES: Registry[Strategy] = Registry("strategy", __name__)
DIMENSIONS: Registry[Dimension] = Registry("dimension", __name__)
"""By the name of the degree, in the order in which they are applied: see ORDER."""

ORDER = ("tp", "cp", "pp")


def dimensions(system: SystemConfig) -> list[Dimension]:
    """Return the dimensions that a configuration uses, in the order in which they are applied."""
    return [DIMENSIONS[name] for name in ORDER if getattr(system, name) > 1]
