"""The cells of the contract suite: every legal combination of strategy, options, degrees, adapter and recomputation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainers.config import LearningConfig, SystemConfig, from_tree
from trainers.shape import ModelShape
from trainers.strategies import DIMENSIONS, ORDER, STRATEGIES, Option, Setting, illegal, proof_dtype

SAMPLES = 8  # of a window
WORLDS = (2, 4)
SHAPES = {
    family: ModelShape(
        name=family, model_type=family, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=8, vocab_size=128, max_position_embeddings=64,
        tie_word_embeddings=tied, qk_norm=tied,
    )
    for family, tied in (("llama", False), ("qwen3", True))
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One combination: a system configuration, the adapter and the family of the model."""

    system: SystemConfig
    adapter: str
    family: str

    @property
    def name(self) -> str:
        s = self.system
        degrees = [f"{d}{getattr(s, d)}" for d in ORDER if getattr(s, d) > 1]
        options = [f"{k}={v}" for k, v in self.options.items()]
        extra = ["offload"] if s.offload_activations else []
        parts = [s.strategy, *options, *degrees, f"w{s.num_workers}", self.adapter, s.activation_checkpointing, *extra]
        return "-".join([*parts, self.family])

    @property
    def options(self) -> dict[str, Any]:
        """The options that are not at their defaults."""
        usual = defaults(self.system)
        return {k: v for k, v in self.system.options.items() if v != usual.get(k)}

    @property
    def values(self) -> set[str]:
        """What is chosen in this cell, in words."""
        s = self.system
        chosen = {"strategy": s.strategy, "recompute": s.activation_checkpointing, "adapter": self.adapter}
        chosen |= {d: str(getattr(s, d)) for d in ORDER} | {"family": self.family}
        own = {o.name for o in STRATEGIES[s.strategy].options}  # zero's offload is not fsdp2's
        changed = {f"{s.strategy if k in own else ''} {k}={v}" for k, v in self.options.items()}
        return {f"{k}={v}" for k, v in chosen.items()} | (changed or {"no option"})

    def setting(self, learning: LearningConfig, dtype: str | None = None) -> Setting:
        plan = STRATEGIES[self.system.strategy].plan(self.system)
        return Setting(learning, self.system, plan, SHAPES[self.family], "cpu", dtype)


def defaults(system: SystemConfig) -> dict[str, Any]:
    owners = (STRATEGIES[system.strategy], *(DIMENSIONS[d] for d in ORDER if getattr(system, d) > 1))
    return {o.name: o.default for owner in owners for o in owner.options}


def all_cells() -> list[Cell]:
    """Return the legal cells, each once.

    Every strategy with every combination of degrees, adapter and recomputation on as few ranks as it needs; on more,
    and with every option that leaves its default, one at a time, without recomputation (but with it where weights are
    divided in another way).
    """
    found: dict[str, Cell] = {}
    for strategy, degrees in itertools.product(STRATEGIES, _degrees()):
        worlds = [world for world in WORLDS if world % math.prod(degrees.values()) == 0]
        for i, (options, world) in enumerate(itertools.product(_choices(strategy, degrees), worlds)):
            modes = ("none", "selective", "full") if i == 0 or "zero_stage" in options else ("none",)
            adapters = ("full", "lora", "qlora") if i == 0 or "zero_stage" in options else ("full", "lora")
            for adapter, recompute in itertools.product(adapters, modes):
                for cell in _cells(strategy, world, degrees, options, adapter, recompute):
                    found.setdefault(cell.name, cell)
    return list(found.values())


def pairwise() -> list[Cell]:
    """Return cells on two ranks in which every pair of values occurs, and on four every value: for every day."""
    cells = all_cells()
    two, four = ([c for c in cells if c.system.num_workers == world] for world in WORLDS)
    return few(two) + few(four, together=1)


def each_once() -> dict[str, Cell]:
    """Return cells on as few ranks as can be in which every value occurs: for what takes long."""
    small = [c for c in all_cells() if c.system.num_workers == 2 or c.system.options.get("dp_replicate", 1) != 1]
    return {cell.name: cell for cell in few(small, together=1)}


def few(cells: Sequence[Cell], together: int = 2) -> list[Cell]:
    """Return cells in which every pair (or so many) of values that occurs in any cell occurs.

    Greedily, the same every time.
    """
    pairs = {cell.name: set(itertools.combinations(sorted(cell.values), together)) for cell in cells}
    left = set().union(*pairs.values())
    chosen = []
    while left:
        best = max(cells, key=lambda cell: (len(left & pairs[cell.name]), -cell.system.num_workers))
        left -= pairs[best.name]
        chosen.append(best)
    return chosen


def _degrees() -> Iterator[dict[str, int]]:
    present = [d for d in ORDER if d in DIMENSIONS]
    for values in itertools.product((1, 2, 4), repeat=len(present)):
        yield dict(zip(present, values, strict=True))


def _choices(strategy: str, degrees: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yield no option, then every value that is not a default; one that is illegal alone, with the first that helps."""
    yield {}
    owners = (STRATEGIES[strategy], *(DIMENSIONS[d] for d, n in degrees.items() if n > 1))
    options = [option for owner in owners for option in owner.options]
    alone = [{o.name: value} for o in options for value in _values(o) if value != o.default]
    world = math.prod(degrees.values())
    for choice in alone:
        tries = (choice, *({**other, **choice} for other in alone if other.keys() != choice.keys()))
        worlds = [size for size in WORLDS if size % world == 0]
        legal = (t for t in tries for size in worlds if any(_cells(strategy, size, degrees, t, "lora", "none")))
        yield from itertools.islice(legal, 1)


def _values(option: Option) -> tuple[Any, ...]:
    if option.choices:
        return option.choices
    return (True, False) if option.type is bool else (1, 2)


def _cells(
    strategy: str, world: int, degrees: dict[str, int], options: dict[str, Any], adapter: str, recompute: str
) -> Iterator[Cell]:
    tree = {"strategy": strategy, "num_workers": world, **degrees, **options, "activation_checkpointing": recompute}
    system = from_tree(SystemConfig, tree)
    learning = LearningConfig(adapter=adapter, global_batch_size=SAMPLES)  # type: ignore[arg-type]
    # Tied and untied weights take turns, so that both meet every strategy; each alone where nothing else varies.
    families = (
        ("llama", "qwen3") if not options and recompute == "none" else ("qwen3" if adapter == "full" else "llama",)
    )
    for family in families:
        try:
            plan = STRATEGIES[strategy].plan(system)
        except ValueError:
            continue
        micro_steps = 2 if plan.pp == 1 else 4  # a pipeline needs one a stage
        micro = SAMPLES // (micro_steps * plan.dp)
        if not micro:
            continue
        cell = Cell(replace(system, micro_batch_size=micro), adapter, family)
        setting = cell.setting(learning)
        setting = replace(setting, dtype=proof_dtype(setting))
        if not illegal(setting):
            yield cell
