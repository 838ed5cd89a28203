"""The default searcher: the trial next that is expected to add most to the frontier for the GPU time that it takes.

Speed and memory are measured once for each way to divide the work (a probe), what is learned once for each way to learn
(a quality run, on the fastest way to divide it), and costs are composed of both. Predictions are where it begins; what
trials measure corrects them, with how uncertain that is (sweeps.guide.surrogate).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sweeps.candidates import Candidate
from sweeps.guide.arms import arms_of
from sweeps.guide.beliefs import Learning, State, Systems
from sweeps.guide.worth import UNLIKELY, Option, Worth
from sweeps.outcome import TrialOutcome
from sweeps.search import SEARCHERS, Ask, Request, Searcher


@SEARCHERS.register("guided")
class Guided(Searcher):
    """Picks by expected hypervolume improvement per GPU-second, and stops when too little is to be expected."""

    def prepare(self) -> None:
        self.arms = arms_of(self.candidates)
        self._arm_of = {c.id: i for i, arm in enumerate(self.arms) for c in arm.by_learning.values()}
        self._systems, self._learning = Systems(self.arms, self.knowledge), Learning(self.arms, self.knowledge)
        self._outcomes: list[TrialOutcome] = []
        self._pending: list[Request] = []
        self._weighed: tuple[tuple[int, tuple[int, ...]], State] | None = None

    def ask(self) -> Request | Ask:
        if not self.candidates:
            return Ask.FINISHED
        answer = self._next()
        if isinstance(answer, Request):
            self._pending.append(answer)
            self.seen.add(answer.candidate.id)
        return answer

    def learn(self, outcome: TrialOutcome) -> None:
        self._pending = [r for r in self._pending if (r.candidate.id, r.kind) != (outcome.candidate_id, outcome.kind)]
        self._outcomes.append(outcome)

    @property
    def untried(self) -> list[Candidate]:
        """Candidates that cannot be composed, as no trial had their system or their learning, and that may run."""
        tried, learned, ruled_out = self._tried(), self._learning.now(self._outcomes)[2], self.ruled_out
        known = {candidate.id for i in tried for key, candidate in self.arms[i].by_learning.items() if key in learned}
        return [c for c in self.candidates if c.id not in known and c.id not in ruled_out]

    def _tried(self) -> set[int]:
        """Return the arms that a trial has had."""
        return {i for o in self._outcomes if not o.cut_short and (i := self._systems.position(o)) is not None}

    @property
    def left(self) -> int:
        if self.why:
            return 0
        away = self._tried() | {self._arm_of[r.candidate.id] for r in self._pending}
        ruled_out = self.ruled_out
        arms = {i for i, arm in enumerate(self.arms) if i not in away and arm.candidate.id not in ruled_out}
        learned = len(self._learning.keys) - len(self._learning.now(self._outcomes)[2])
        confirmed = sum(o.kind == "confirmation" for o in self._outcomes)
        return len(arms) + learned + max(0, self.knowledge.confirm - confirmed) if self.candidates else 0

    @property
    def ruled_out(self) -> Mapping[str, str]:
        state = self._state()
        found = {i: why for i, why in state.out.items() if why == "inferred_oom"}
        unlikely = (state.fits() < UNLIKELY) & ~state.measured
        found |= {int(i): "predicted_oom" for i in np.flatnonzero(unlikely) if i not in state.out}
        return {c.id: why for i, why in found.items() for c in self.arms[i].by_learning.values()}

    def _state(self) -> State:
        """Return what is believed now; weighed once for the same outcomes and trials on their way."""
        probes = tuple(self._arm_of[r.candidate.id] for r in self._pending if r.kind == "probe")
        known = (len(self._outcomes), probes)
        if self._weighed is None or self._weighed[0] != known:
            self._weighed = known, self._systems.now(self._outcomes, probes)
        return self._weighed[1]

    def _worth(self) -> Worth:
        seed = (self.seed, len(self._outcomes), len(self._pending))
        known = (self.arms, self._learning, self._outcomes, self._pending)
        return Worth(self._state(), *known, self.objectives, self.knowledge, seed)

    def _next(self) -> Request | Ask:
        if (baseline := self.first()) is not None:
            return Request(baseline, "quality", "the baseline")
        worth = self._worth()
        if self.closing and (composed := worth.to_confirm()) is not None:
            return _confirmation(composed)
        options = [*worth.probes(), *worth.qualities()]
        least = self.knowledge.least_gain
        best = max((o for o in options if o.gain >= least), key=lambda o: o.gain / o.seconds, default=None)
        if best is not None:
            return _request(best, worth)
        if self._pending:
            return Ask.WAIT  # what is on its way may change what is to be expected
        confirmed = worth.to_confirm()
        if confirmed is not None:
            return _confirmation(confirmed)
        self.why, self.limit = _why(options, least, bool(self.untried)), "least_gain" if options else None
        return Ask.FINISHED


def _confirmation(candidate: Candidate) -> Request:
    return Request(candidate, "confirmation", "the cost, which was composed, of a run as a whole")


def _request(option: Option, worth: Worth) -> Request:
    what = "speed and memory" if option.kind == "probe" else "what it learns"
    why = f"{what}: {option.gain:+.1%} of hypervolume expected for {option.seconds:.0f} GPU-s"
    if option.kind == "probe":
        return Request(option.candidate, option.kind, why, rivals=worth.rivals(option.candidate))
    return Request(option.candidate, option.kind, why, worth.give_up(option.candidate))


def _why(options: Sequence[Option], least: float, untried: bool) -> str:
    """Say why no trial is left to run; empty where all that there are have run."""
    if not options:
        return "the rest cannot be measured: its trials failed, or no way to run it is left" if untried else ""
    most = max(o.gain for o in options)
    return (
        f"no trial is expected to add {least:.2%} to the hypervolume; the best of {len(options)} would add {most:.2%}"
    )
