"""Stretches of time as sorted lists of disjoint (start, end) pairs. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable

Intervals = list[tuple[float, float]]


def union(stretches: Iterable[tuple[float, float]]) -> Intervals:
    """Return the time that any of these stretches covers; they may overlap and come in any order."""
    merged: Intervals = []
    for start, end in sorted(stretches):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def common(a: Intervals, b: Intervals) -> Intervals:
    """Return the time that both cover."""
    found: Intervals = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(a: Intervals, b: Intervals) -> Intervals:
    """Return the time that `a` covers and `b` does not."""
    found: Intervals = []
    j = 0
    for start, end in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if b[k][0] > start:
                found.append((start, b[k][0]))
            start = max(start, b[k][1])
            k += 1
        if start < end:
            found.append((start, end))
    return found


def length(a: Intervals) -> float:
    """Return how much time is covered."""
    return sum(end - start for start, end in a)
