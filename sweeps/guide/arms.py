"""What can be measured apart: a way to divide the work under a load. Learning configurations of one load share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sweeps.candidates import FREE, Candidate
from sweeps.compose import arm_key, key_of, learning_of

# Memory rises with these, all else equal: by their order, or by their size.
RECOMPUTED: Mapping[str, int] = {"full": 0, "selective": 1, "none": 2}
RISING = ("micro_batch_size", "activation_checkpointing", "zero_stage")


@dataclass(frozen=True)
class Arm:
    """One system configuration under one load."""

    load: str
    system: str
    by_learning: Mapping[str, Candidate]
    """its candidates, by the learning configurations of the load"""

    @property
    def candidate(self) -> Candidate:
        """The one that stands for it: what is measured on it holds for all."""
        return next(iter(self.by_learning.values()))

    @property
    def config(self) -> dict[str, Any]:
        """What of the candidates costs time and memory, flat."""
        return {name: value for name, value in self.candidate.flat.items() if name not in FREE}


def arms_of(candidates: Sequence[Candidate]) -> list[Arm]:
    """Return the arms of a space, in its order."""
    found: dict[tuple[str, str], dict[str, Candidate]] = {}
    for candidate in candidates:
        flat = candidate.flat
        pair = arm_key(flat)
        found.setdefault(pair, {})[key_of(learning_of(flat))] = candidate
    return [Arm(load, system, by_learning) for (load, system), by_learning in found.items()]


def needs_as_much(config: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Tell whether a configuration takes at least the memory of a known one, for certain.

    All is equal but a larger micro batch, less recomputation, or, with several workers, a lower stage of ZeRO.
    """
    if config.keys() != known.keys():
        return False
    different = [name for name in config if config[name] != known[name]]
    return all(name in RISING and _rises(name, config, known) for name in different)


def _rises(name: str, config: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    one, other = config[name], known[name]
    if name == "zero_stage":  # one worker divides nothing, and gathers all the same
        return bool(config.get("num_workers", 1) > 1 and one < other)
    if name == "activation_checkpointing":
        return RECOMPUTED[one] > RECOMPUTED[other]
    return bool(one > other)
