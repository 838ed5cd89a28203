"""Whether a trial took the steps that its learning configuration means, judged from what it and others measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, Literal

from sweeps.spec import Frozen
from trainers.config import LearningConfig, from_tree, to_tree
from trainers.result import Proof, Reference
from trainers.tolerance import LEAST_TOLERANCE, LIMITS, TIMES_NOISE


class Parity(Frozen):
    """The verdict on one trial, with all that it rests on. Differences are relative."""

    verdict: Literal["EQUAL", "SEMANTICS_DIFFER"]
    reference: str = ""
    """what its first updates were compared with: `one process`, and the trial that ran it, or another trial"""
    difference: float | None = None
    """the largest one of loss and gradient norm, over the first updates; null: not finite, or not compared"""
    tolerance: float | None = None
    """four times what the order of the samples changes; null: not compared"""
    miniature_difference: float | None = None
    """of one step of a small model of the same architecture; null: not finite, or an architecture that is not known"""
    miniature_limit: float | None = None

    @property
    def figures(self) -> dict[str, float]:
        """Return the differences that are finite, by the names under which they are recorded."""
        found = {"parity_difference": self.difference, "parity_tolerance": self.tolerance}
        found["miniature_difference"] = self.miniature_difference
        return {name: value for name, value in found.items() if value is not None}

    @property
    def why(self) -> str:
        """One sentence on a trial that differs; empty for one that does not."""
        if self.verdict == "EQUAL":
            return ""
        if self.miniature_limit is not None and _beyond(self.miniature_difference, self.miniature_limit):
            return (
                f"one step of a small model differs from one process by {_text(self.miniature_difference)}, at most "
                f"{self.miniature_limit:.0e} is rounding"
            )
        return (
            f"loss or gradient norm of the first updates differ from {self.reference} by {_text(self.difference)}, at "
            f"most {_text(self.tolerance)} is rounding"
        )


def judge(proof: Proof, reference: Reference | None, name: str = "") -> Parity | None:
    """Compare a trial's first updates and its miniature with what they should be; None where there is neither."""
    found: dict[str, Any] = {}
    differs = False
    if reference is not None and proof.first.losses:  # one that was only measured has none
        difference = reference.first.difference(proof.first)
        # The least one first: max keeps it where the noise is not a number.
        tolerance = max(LEAST_TOLERANCE[reference.dtype], TIMES_NOISE * reference.noise)
        found |= {"reference": name, "difference": _finite(difference), "tolerance": tolerance}
        differs = _beyond(difference, tolerance)
    if proof.miniature is not None:
        small, limit = proof.miniature.difference, LIMITS[proof.miniature.dtype]
        found |= {"miniature_difference": _finite(small), "miniature_limit": limit}
        differs = differs or _beyond(small, limit)
    return Parity(verdict="SEMANTICS_DIFFER" if differs else "EQUAL", **found) if found else None


class References:
    """What the trials of each learning configuration are compared with."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Reference, str]] = {}

    def add(self, learning: Mapping[str, Any], proof: Proof | None, trial_id: str) -> None:
        """Take what a trial measured: the first run of one process, or else the first trial that measured itself."""
        measured = proof.reference if proof is not None else None
        if measured is None:
            return
        alone = measured.source == "one process"
        key = _key(learning)
        if key not in self._found or (alone and self._found[key][0].source != "one process"):
            self._found[key] = measured, f"one process (trial {trial_id})" if alone else f"trial {trial_id}"

    def judge(self, learning: Mapping[str, Any], proof: Proof | None) -> Parity | None:
        """Return the verdict on a trial; None where nothing was measured to judge by."""
        return judge(proof, *self._found.get(_key(learning), (None,))) if proof is not None else None

    def __contains__(self, learning: Mapping[str, Any]) -> bool:
        return _key(learning) in self._found


def _key(learning: Mapping[str, Any]) -> str:
    """Return what is the same for equal learning configurations, in file form or as a candidate's."""
    return json.dumps(to_tree(from_tree(LearningConfig, dict(learning))), sort_keys=True)


def _beyond(value: float | None, limit: float) -> bool:
    """Tell whether a difference is above a limit, or not finite."""
    return value is None or not value <= limit


def _finite(value: float) -> float | None:
    return value if abs(value) <= sys.float_info.max else None


def _text(value: float | None) -> str:
    return "more than any number" if value is None else f"{value:.1e}"
