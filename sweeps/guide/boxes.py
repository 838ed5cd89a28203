"""How much a point would add to a hypervolume, for many points at once. All objectives are minimised here."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]


class Region:
    """What no point of a front dominates, below a reference point: disjoint boxes, of which a new point takes a part.

    The boxes are slabs along the last objective, of which each is divided by what of the front lies below it, along the
    one before, and so on.
    """

    def __init__(self, front: Points, reference: Points) -> None:
        """`front` [points, objectives]; points that do not dominate `reference` [objectives] add nothing."""
        self.reference = np.asarray(reference, dtype=float)
        shaped = np.asarray(front, dtype=float).reshape(-1, len(self.reference))
        below = shaped[np.all(shaped < self.reference, axis=1)]
        found = np.array(_boxes(below, self.reference), dtype=float).reshape(-1, 2, len(self.reference))
        self._lower, self._upper = found[:, 0], found[:, 1]

    def improvement(self, points: Points) -> NDArray[np.float64]:
        """Return by how much each of `points` [..., objectives] would enlarge the hypervolume; 0 where not finite."""
        usable = np.all(np.isfinite(points), axis=-1)
        safe = np.where(np.expand_dims(usable, -1), points, self.reference)
        total = np.zeros(safe.shape[:-1])
        for lower, upper in zip(self._lower, self._upper, strict=True):
            total += np.prod(np.maximum(upper - np.maximum(lower, safe), 0.0), axis=-1)
        return np.where(usable, total, 0.0)


def _boxes(front: Points, reference: Points) -> list[tuple[list[float], list[float]]]:
    """Return the lower and upper corners of the boxes; what is open below begins at minus infinity."""
    last = float(reference[-1])
    if len(reference) == 1:
        return [([-np.inf], [min([last, *(float(p[0]) for p in front)])])]
    order = front[np.argsort(front[:, -1], kind="stable")]
    found: list[tuple[list[float], list[float]]] = []
    met = np.empty((0, len(reference) - 1))
    start = -np.inf
    for point in order:
        rest = point[:-1]
        if len(met) and (met <= rest).all(axis=1).any():
            continue  # what lies below it is taken already
        end = float(point[-1])
        if end > start:
            found += [([*low, start], [*high, end]) for low, high in _boxes(met, reference[:-1])]
            start = end
        met = np.vstack([met[~(rest <= met).all(axis=1)], rest])
    return found + [([*low, start], [*high, last]) for low, high in _boxes(met, reference[:-1])]
