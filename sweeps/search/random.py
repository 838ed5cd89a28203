"""Every candidate, in a seeded random order."""

from __future__ import annotations

import random

from sweeps.candidates import Candidate
from sweeps.search import SEARCHERS, WholeRuns


@SEARCHERS.register("random")
class Random(WholeRuns):
    """A permutation of the space that depends on the seed alone, so a resumed sweep goes on in the same order."""

    def prepare(self) -> None:
        shuffled = list(self.candidates)
        random.Random(self.seed).shuffle(shuffled)
        self.candidates = tuple(shuffled)

    def choose(self) -> Candidate:
        return self.untried[0]
