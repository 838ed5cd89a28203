"""S + Q trials: every way to divide the work once, and every way to learn once, on the fastest of them."""

from __future__ import annotations

from sweeps.candidates import Candidate
from sweeps.compose import arm_key, key_of, learning_of
from sweeps.guide.arms import Arm, arms_of
from sweeps.outcome import TrialOutcome
from sweeps.search import SEARCHERS, Ask, Request, Searcher


@SEARCHERS.register("factored")
class Factored(Searcher):
    """Probes all, in the order of the space; then runs all learning configurations whole. Nothing is left out."""

    def prepare(self) -> None:
        self._arms = arms_of(self.candidates)
        self._probed: set[tuple[str, str]] = set()  # or asked for; so are the learning configurations
        self._learned: set[str] = set()
        self._seconds: dict[tuple[str, str], float] = {}
        self._running = 0

    def ask(self) -> Request | Ask:
        request = self._next()
        self._running += isinstance(request, Request)
        return request

    def learn(self, outcome: TrialOutcome) -> None:
        self._running = max(0, self._running - 1)
        pair = arm_key(outcome.config)
        if not outcome.cut_short:
            self._probed.add(pair)
        if outcome.kind != "probe":
            self._learned.add(key_of(learning_of(outcome.config)))
        if outcome.competes and (step := outcome.metrics.get("step_time_s", 0.0)) > 0:
            self._seconds[pair] = step

    @property
    def untried(self) -> list[Candidate]:
        left = (arm for arm in self._arms if (arm.load, arm.system) not in self._probed)
        return [candidate for arm in left for candidate in arm.by_learning.values()]

    @property
    def left(self) -> int:
        keys = {key for arm in self._arms for key in arm.by_learning}
        return sum((a.load, a.system) not in self._probed for a in self._arms) + len(keys - self._learned)

    def _next(self) -> Request | Ask:
        if (baseline := self.first()) is not None:
            self.seen.add(baseline.id)
            self._probed.add(arm_key(baseline.flat))
            self._learned.add(key_of(learning_of(baseline.flat)))
            return Request(baseline, "quality", "the baseline")
        for arm in self._arms:
            if (arm.load, arm.system) not in self._probed:
                self._probed.add((arm.load, arm.system))
                return Request(arm.candidate, "probe", "every way to divide the work once")
        if self._running:
            return Ask.WAIT  # for the fastest
        fastest = sorted((a for a in self._arms if (a.load, a.system) in self._seconds), key=self._speed)
        for arm in fastest:
            for key, candidate in arm.by_learning.items():
                if key not in self._learned:
                    self._learned.add(key)
                    return Request(candidate, "quality", "every way to learn once")
        return Ask.FINISHED

    def _speed(self, arm: Arm) -> float:
        return self._seconds[arm.load, arm.system]
