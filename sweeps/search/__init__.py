"""The searchers: who picks the next trial. One file each, registered by name.

A searcher works on the enumerated legal candidates, so nothing is drawn twice and nothing is lost. It is asked for
one trial at a time and told every outcome; earlier outcomes of a resumed sweep are told before the first ask. All that
it knows follows from these, so that it has no other state to save.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sweeps.candidates import Candidate
from sweeps.objectives import Objective
from sweeps.outcome import TrialOutcome
from trainers.registry import Registry


class Ask(enum.Enum):
    """What ask() says when it has no candidate to give."""

    WAIT = "wait"  # ask again after the next tell()
    FINISHED = "finished"  # the space is exhausted


Kind = Literal["quality", "probe", "confirmation"]
GiveUp = tuple[tuple[int, float], ...]
Rivals = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Request:
    """A trial to run."""

    candidate: Candidate
    kind: Kind = "quality"
    """quality: train to the target; probe: measure speed and memory alone; confirmation: the first, of what a frontier
    was composed for"""
    why: str = ""
    """what it is expected to show"""
    give_up: GiveUp = ()
    """(tokens, loss): from so many tokens on, a trial whose eval loss is above this cannot win any more"""
    rivals: Rivals = ()
    """(GiB, seconds of a step): a probe that takes more of both is dominated"""


@dataclass(frozen=True)
class Prior:
    """What is predicted of a candidate: memory of a device, seconds of an update, and what an update holds."""

    memory_gib: float
    step_time_s: float
    tokens: float
    targets: float


@dataclass(frozen=True)
class Knowledge:
    """What a searcher may know beside the candidates."""

    priors: Mapping[str, Prior] = field(default_factory=dict)
    """by candidate id; without one a candidate is believed to be like the others"""
    capacity_gib: float | None = None
    """memory of a device; None: not known"""
    price: float = 1.0
    """USD per GPU-hour"""
    tokens_per_trial: float = 1e5
    """what a trial trains on at most"""
    eval_every_tokens: float = 1e5
    measure_seconds: float = 20.0
    """most seconds for which a trial's steps are timed"""
    startup_s: float = 15.0
    """seconds of a trial outside its steps, as long as none has ended"""
    baseline: str | None = None
    """id of the candidate that runs first, as a whole: what a person runs today"""
    confirm: int = 3
    """how many of a composed frontier are run whole"""
    least_gain: float = 0.001
    """of the hypervolume: what the best untried trial must be expected to add"""


class Searcher(ABC):
    """The contract of a searcher."""

    exhaustive = False
    """whether it asks for every candidate in the end, each once, as a run as a whole"""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        objectives: Sequence[Objective],
        seed: int,
        knowledge: Knowledge | None = None,
    ) -> None:
        self.candidates = tuple(candidates)
        self.objectives = tuple(objectives)
        self.seed = seed
        self.knowledge = knowledge or Knowledge()
        self.seen: set[str] = set()  # ids that were handed out or told
        self.why = ""
        """why it is finished, where candidates are left"""
        self.limit: str | None = None
        """the key that says so, which may be changed to go on"""
        self.closing = False
        """whether what is left of the budget is for confirmations, if there is something to confirm"""
        self.prepare()

    def prepare(self) -> None:
        """Make what the search needs of the candidates; the default needs nothing."""
        return None

    @abstractmethod
    def ask(self) -> Request | Ask:
        """Return a trial, WAIT, or FINISHED. No candidate is handed out twice for the same kind of trial."""

    def first(self) -> Candidate | None:
        """Return the baseline, as long as it was not handed out."""
        baseline = self.knowledge.baseline
        return next((c for c in self.candidates if c.id == baseline and c.id not in self.seen), None)

    def tell(self, outcome: TrialOutcome) -> None:
        """Learn how a trial ended; its candidate is not handed out again."""
        self.seen.add(outcome.candidate_id)
        self.learn(outcome)

    @property
    def untried(self) -> list[Candidate]:
        """Candidates that were neither handed out nor told, in the order of the space."""
        return [c for c in self.candidates if c.id not in self.seen]

    @property
    def left(self) -> int:
        """How many trials it may still ask for, at most."""
        return len(self.untried)

    @property
    def ruled_out(self) -> Mapping[str, str]:
        """The candidates that need no trial, by id: what they are for certain, as `inferred_oom`."""
        return {}

    def learn(self, outcome: TrialOutcome) -> None:
        """Use an outcome; the default ignores it."""
        return None


class WholeRuns(Searcher):
    """A searcher that picks candidates, of which each runs as a whole, once."""

    exhaustive = True

    def ask(self) -> Request | Ask:
        if not self.untried:
            return Ask.FINISHED
        chosen = self.first() or self.choose()
        if isinstance(chosen, Ask):
            return chosen
        assert chosen.id not in self.seen, "a searcher never hands out a candidate twice"
        self.seen.add(chosen.id)
        return Request(chosen)

    @abstractmethod
    def choose(self) -> Candidate | Ask:
        """Return one of `untried` (which is not empty), or WAIT."""


def all_tried(searcher: Searcher) -> str:
    """Say that no candidate is left, with how many were not worth a trial."""
    ruled_out = len(searcher.ruled_out)
    without = (
        f" but {ruled_out} that would run out of memory, as measured trials or predictions tell" if ruled_out else ""
    )
    return f"every legal candidate was tried{without}"


SEARCHERS: Registry[type[Searcher]] = Registry("searcher", __name__)
