"""By how much predictions are off, learned from trials: a Gaussian process on the logarithm of measured over predicted.

Its kernel says what configurations have in common: all of them something (a device that is slower than its data sheet),
those that share a value of an axis some more (a strategy that is slower than its closed form), near ones the rest.
Rasmussen and Williams 2006, algorithm 2.1, and additive kernels of one axis each (Duvenaud et al. 2011).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky  # type: ignore[import-untyped]

Array = NDArray[np.float64]
SCALES = (0.3, 1.0, 3.0)  # of what configurations differ in: the likeliest one is taken
NOT_AN_AMOUNT = {"zero_stage", "seed"}  # numbers that are names
REACH = 2.0  # doublings of a number over which what is known of it fades


@dataclass(frozen=True)
class Beliefs:
    """Before anything is measured: standard deviations of the logarithm of a ratio."""

    common: float
    axis: float
    rest: float
    noise: float

    def prior(self, axes: int, scale: float = 1.0) -> float:
        """Return the variance of a configuration's log ratio; `scale`: of what configurations differ in."""
        return self.common**2 + scale**2 * (axes * self.axis**2 + self.rest**2)


class Surrogate:
    """What measured ratios make likely of all configurations."""

    def __init__(self, configs: Sequence[Mapping[str, Any]], beliefs: Beliefs) -> None:
        """`configs`: all that there are, flat; axes that do not vary among them are left out."""
        self._beliefs, self._count = beliefs, len(configs)
        names = dict.fromkeys(name for config in configs for name in config)
        columns = (_Column([config.get(name) for config in configs], name not in NOT_AN_AMOUNT) for name in names)
        self._columns = [column for column in columns if column.varies]

    def posterior(
        self, measured: Sequence[int], ratios: Sequence[float], noise: Sequence[float]
    ) -> tuple[Array, Array]:
        """Return mean and standard deviation of every configuration's log ratio.

        `measured`: positions of the configurations that were; `ratios`: the logarithms of theirs; `noise`: the standard
        deviations of these.
        """
        everyone = np.arange(self._count)
        if not len(measured):
            return np.zeros(self._count), np.full(self._count, math.sqrt(self._beliefs.prior(len(self._columns))))
        known, wanted = np.array(measured), np.array(ratios, dtype=float)
        spread = np.diag(np.hypot(np.array(noise, dtype=float), self._beliefs.noise) ** 2)
        parts = self._parts(known, known)
        best: tuple[float, float, Array, Array] | None = None
        for scale in SCALES if len(measured) > 2 else (1.0,):
            factor = cholesky(self._sum(parts, scale) + spread, lower=True)
            alpha = cho_solve((factor, True), wanted)
            likelihood = -0.5 * float(wanted @ alpha) - float(np.log(np.diag(factor)).sum())
            if best is None or likelihood > best[0]:
                best = likelihood, scale, factor, alpha
        assert best is not None
        _, scale, factor, alpha = best
        cross = self._sum(self._parts(everyone, known), scale)
        solved = cho_solve((factor, True), cross.T)
        variance = self._beliefs.prior(len(self._columns), scale) - np.einsum("ij,ji->i", cross, solved)
        return cross @ alpha, np.sqrt(np.maximum(variance, 1e-12))

    def _parts(self, some: NDArray[np.int64], others: NDArray[np.int64]) -> tuple[Array, Array]:
        """Return the sum over axes of how alike configurations are [some, others], and the product."""
        total, product = np.zeros((len(some), len(others))), np.ones((len(some), len(others)))
        for column in self._columns:
            alike = column.alike(some, others)
            total += alike
            product *= alike
        return total, product

    def _sum(self, parts: tuple[Array, Array], scale: float) -> Array:
        total, product = parts
        b = self._beliefs
        found: Array = b.common**2 + scale**2 * (b.axis**2 * total + b.rest**2 * product)
        return found


class _Column:
    """The values of one axis, and how alike they are: 1 for equal ones."""

    def __init__(self, values: Sequence[Any], may_be_ordered: bool) -> None:
        self.varies = len({repr(v) for v in values}) > 1
        given = [v for v in values if v is not None]
        self._ordered = may_be_ordered and all(isinstance(v, int | float) and not isinstance(v, bool) for v in given)
        if self._ordered:
            logarithms = all(v > 0 for v in given)
            numbers = [math.nan if v is None else math.log2(v) if logarithms else float(v) for v in values]
            self._codes = np.array(numbers)
        else:
            codes = {text: i for i, text in enumerate(dict.fromkeys(repr(v) for v in values))}
            self._codes = np.array([float(codes[repr(v)]) for v in values])

    def alike(self, some: NDArray[np.int64], others: NDArray[np.int64]) -> Array:
        a, b = self._codes[some][:, None], self._codes[others][None, :]
        if not self._ordered:
            equal: Array = (a == b).astype(float)
            return equal
        neither, distance = np.isnan(a) & np.isnan(b), np.abs(a - b)
        near = np.exp(-np.where(np.isnan(distance), np.inf, distance) / REACH)  # absent is not like any number
        found: Array = np.where(neither, 1.0, near)
        return found
