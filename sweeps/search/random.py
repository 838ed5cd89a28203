"""Every candidate, in a seeded random order."""

from __future__ import annotations

import random
from collections.abc import Sequence

from sweeps.candidates import Candidate
from sweeps.objectives import Objective
from sweeps.search import SEARCHERS, Knowledge, Searcher


@SEARCHERS.register("random")
class Random(Searcher):
    """A permutation of the space that depends on the seed alone, so a resumed sweep goes on in the same order."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        objectives: Sequence[Objective],
        seed: int,
        knowledge: Knowledge | None = None,
    ) -> None:
        shuffled = list(candidates)
        random.Random(seed).shuffle(shuffled)
        super().__init__(shuffled, objectives, seed, knowledge)

    def choose(self) -> Candidate:
        return self.untried[0]
