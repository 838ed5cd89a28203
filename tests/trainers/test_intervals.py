"""Stretches of time, by hand."""

from __future__ import annotations

from trainers.intervals import common, length, union, without


def test_union() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4), (7, 7)]) == [(0, 4), (5, 6)]
    assert union([]) == []


def test_common() -> None:
    assert common([(0, 4), (6, 9)], [(1, 2), (3, 7), (8, 10)]) == [(1, 2), (3, 4), (6, 7), (8, 9)]
    assert common([(0, 1)], [(1, 2)]) == []


def test_without() -> None:
    assert without([(0, 10)], [(1, 2), (4, 6), (9, 12)]) == [(0, 1), (2, 4), (6, 9)]
    assert without([(0, 2), (3, 5)], [(1, 4)]) == [(0, 1), (4, 5)]
    assert without([(0, 1)], []) == [(0, 1)]
    assert without([(0, 1)], [(0, 1)]) == []


def test_length() -> None:
    assert length([(0, 4), (5, 6.5)]) == 5.5
