"""The searchers: who picks the next trial. One file each, registered by name.

A searcher works on the enumerated legal candidates, so nothing is drawn twice and nothing is lost. It is asked for
one candidate at a time and told every outcome; earlier outcomes of a resumed sweep are told before the first ask.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence

from sweeps.candidates import Candidate
from sweeps.objectives import Objective
from sweeps.outcome import TrialOutcome
from trainers.registry import Registry


class Ask(enum.Enum):
    """What ask() says when it has no candidate to give."""

    WAIT = "wait"  # ask again after the next tell()
    FINISHED = "finished"  # the space is exhausted


class Searcher(ABC):
    """The contract of a searcher."""

    def __init__(self, candidates: Sequence[Candidate], objectives: Sequence[Objective], seed: int) -> None:
        self.candidates = tuple(candidates)
        self.objectives = tuple(objectives)
        self.seed = seed
        self.seen: set[str] = set()  # ids that were handed out or told

    def ask(self) -> Candidate | Ask:
        """Return a candidate that was never handed out or told before, WAIT, or FINISHED."""
        if all(c.id in self.seen for c in self.candidates):
            return Ask.FINISHED
        chosen = self.choose()
        if isinstance(chosen, Candidate):
            assert chosen.id not in self.seen, "a searcher never hands out a candidate twice"
            self.seen.add(chosen.id)
        return chosen

    def tell(self, outcome: TrialOutcome) -> None:
        """Learn how a trial ended; its candidate is not handed out again."""
        self.seen.add(outcome.candidate_id)
        self.learn(outcome)

    @property
    def untried(self) -> list[Candidate]:
        """Candidates that were neither handed out nor told, in the order of the space."""
        return [c for c in self.candidates if c.id not in self.seen]

    @abstractmethod
    def choose(self) -> Candidate | Ask:
        """Return one of `untried` (which is not empty), or WAIT."""

    def learn(self, outcome: TrialOutcome) -> None:
        """Use an outcome; the default ignores it."""
        return None


SEARCHERS: Registry[type[Searcher]] = Registry("searcher", __name__)
