"""Eval loss over training tokens, read between evaluations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Curve = Sequence[tuple[int, float]]
"""(non-pad training tokens, eval loss), in order. A loss that is not finite is no point to read from."""


def loss_at(curve: Curve, tokens: float) -> float | None:
    """Return the eval loss after so many tokens, interpolated; None beyond the ends."""
    for (before, high), (after, low) in itertools.pairwise(_finite(curve)):
        if before <= tokens <= after:
            return high + (low - high) * (tokens - before) / max(after - before, 1)
    return None


def tokens_at(curve: Curve, loss: float) -> float | None:
    """Return the tokens at the first crossing of a loss, interpolated; None where it is not reached."""
    known = _finite(curve)
    if known and known[0][1] <= loss:
        return float(known[0][0])
    for (before, high), (after, low) in itertools.pairwise(known):
        if low <= loss:
            return before + (after - before) * (high - loss) / (high - low)
    return None


def _finite(curve: Curve) -> Curve:
    return [(tokens, loss) for tokens, loss in curve if math.isfinite(loss)]
