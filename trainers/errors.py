"""The one exception that a person's mistake raises, and the "did you mean" that goes with it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class UserError(Exception):
    """Bad input: every fault that was found, each one sentence with what was given and what is allowed.

    The command line prints the faults and exits with status 2; nothing has been launched or written.
    """

    def __init__(self, faults: str | Sequence[str]) -> None:
        self.faults: tuple[str, ...] = (faults,) if isinstance(faults, str) else tuple(faults)
        super().__init__("\n".join(self.faults))

    def __reduce__(self) -> tuple[type[UserError], tuple[tuple[str, ...]]]:
        return type(self), (self.faults,)


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """Return " (did you mean X?)" for the allowed name nearest to `given`, or an empty string."""
    near = nearest(given, allowed)
    return f" (did you mean {near}?)" if near else ""


def nearest(given: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name nearest to `given`: the same last dotted part, one that it abbreviates, else by spelling.

    None if none is near.
    """
    names = sorted(set(allowed))
    leaf = given.rsplit(".", 1)[-1].lower()
    same_leaf = [name for name in names if name.rsplit(".", 1)[-1].lower() == leaf]
    if same_leaf:
        return max(same_leaf, key=lambda name: difflib.SequenceMatcher(None, given, name).ratio())
    initials = [name for name in names if "_" in name and leaf == _initials(name)]
    if initials:
        section = given.rpartition(".")[0]
        return next((name for name in initials if name.rpartition(".")[0] == section), initials[0])
    close = difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    if close:
        return close[0]
    leaves = {name.rsplit(".", 1)[-1]: name for name in reversed(names)}
    close = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.7)
    return leaves[close[0]] if close else None


def _initials(name: str) -> str:
    """Return the first letters of the words of a name's last dotted part: lr of learning.learning_rate."""
    return "".join(word[:1] for word in name.rsplit(".", 1)[-1].lower().split("_"))
