"""What trials would be worth: the hypervolume that they are expected to add, and the GPU-seconds that they take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sweeps.candidates import Candidate
from sweeps.compose import arm_key, effective, key_of, learning_of, load_of
from sweeps.curve import loss_at
from sweeps.guide.arms import Arm
from sweeps.guide.beliefs import GUESS, Learning, State
from sweeps.guide.boxes import Region
from sweeps.objectives import Estimate, Objective
from sweeps.outcome import TrialOutcome
from sweeps.pareto import default_reference, hypervolume
from sweeps.search import GiveUp, Kind, Knowledge, Request, Rivals

Array = NDArray[np.float64]
DRAWS = 32  # of what is uncertain, for an expectation
UNLIKELY = 0.02  # to fit: predicted to run out of memory, and not tried
EXACT = 1e-9  # relative: what rounding may change
LIKELY = 0.9  # to fit: enough for a run as a whole on an arm that was not measured
BEHIND = 1.02  # times the fewest tokens to the target that are known: with more a learning configuration is not better
RUNGS, LEAST_PEERS = (0.25, 0.5), 3  # of these tokens; and runs that must have come so far to tell the better half


@dataclass(frozen=True)
class Option:
    """A trial that could be next."""

    candidate: Candidate
    kind: Kind
    gain: float
    """hypervolume, relative to what there is"""
    seconds: float
    """of GPUs"""


class Worth:
    """What is known at one moment, weighed."""

    def __init__(
        self,
        state: State,
        arms: Sequence[Arm],
        learning: Learning,
        outcomes: Sequence[TrialOutcome],
        pending: Sequence[Request],
        objectives: Sequence[Objective],
        knowledge: Knowledge,
        seed: Sequence[int],
    ) -> None:
        self.state, self._arms, self._learning, self._outcomes = state, arms, learning, outcomes
        self._pending, self._objectives, self._knowledge = pending, objectives, knowledge
        self._rng = np.random.default_rng(list(seed))
        self._needed = learning.needed(outcomes)
        known = list(self._needed.values())
        guess = float(np.median(known)) if known else GUESS * knowledge.tokens_per_trial
        self._tokens = np.array([self._needed.get(arm.load, guess) for arm in arms])
        runs = np.array([i not in state.out for i in range(len(arms))])
        expected = self._values(state.step, state.memory, self._tokens)
        self._able = runs & np.isfinite(expected).all(axis=1) & (state.fits() >= UNLIKELY)
        believed = expected[self._able] if self._able.any() else np.ones((1, len(objectives)))
        self._reference = default_reference(believed)
        self._known = (state.measured | state.pending) & runs & np.isfinite(expected).all(axis=1)
        self._front = expected[self._known]
        self._volume = hypervolume(self._front, self._reference)

    def _values(self, step: Array, memory: Array, tokens: Array) -> Array:
        """Return objectives of arms, minimised: [..., arms, objectives]; one that nothing tells in advance is 1."""
        estimate = self.state.estimate(step, memory, tokens, self._knowledge)
        shape = np.broadcast_shapes(step.shape, memory.shape, tokens.shape)
        values = (o.sign * o.of(estimate) if o.of is not None else np.ones(()) for o in self._objectives)
        return np.stack([np.broadcast_to(v, shape) for v in values], axis=-1)

    def probes(self) -> list[Option]:
        """Return the arms that were not measured, with what they are expected to add."""
        state = self.state
        left = np.flatnonzero(self._able & ~state.measured & ~state.pending)
        if not len(left):
            return []
        z = self._rng.standard_normal((2, DRAWS, 1))
        step, memory = state.step + z[0] * state.step_sd, state.memory + z[1] * state.memory_sd
        values = self._values(step, memory, np.broadcast_to(self._tokens, step.shape))[:, left]
        fits = memory[:, left] <= np.log(state.capacity_gib)
        added = (Region(self._front, self._reference).improvement(values) * fits).mean(axis=0)
        gains = added / (self._volume or max(float(added.max()), 1e-300))  # nothing is known yet: over the best
        seconds = state.probe_seconds(self._knowledge) * state.workers
        return [
            Option(self._arms[i].candidate, "probe", float(gain), float(seconds[i]))
            for i, gain in zip(left.tolist(), gains, strict=True)
        ]

    def qualities(self) -> Iterator[Option]:
        """Yield the learning configurations that were not run, each on the fastest arm of its load."""
        if not self._depends_on_learning:
            return
        mean, sd, ran = self._learning.now(self._outcomes)
        on_their_way = {key_of(learning_of(r.candidate.flat)) for r in self._pending if r.kind != "probe"}
        z = self._rng.standard_normal(DRAWS)
        for n, (key, load) in enumerate(zip(self._learning.keys, self._learning.loads, strict=True)):
            arm = self._fastest(load, key) if key not in ran | on_their_way else None
            if arm is None:
                continue
            needed = self._needed.get(load)
            limit = BEHIND * needed if needed is not None else self._knowledge.tokens_per_trial
            seconds = self.state.startup_s + limit / self.state.tokens[arm] * np.exp(self.state.step[arm])
            gain = self._gain_of_learning(load, arm, np.exp(mean[n] + z * sd[n]))
            if any(o.learned for o in self._objectives):
                gain = max(gain, 2 * self._knowledge.least_gain)
            cost = float(seconds * self.state.workers[arm])
            yield Option(self._arms[arm].by_learning[key], "quality", gain, cost)

    def _gain_of_learning(self, load: str, arm: int, drawn: Array) -> float:
        """Return what the hypervolume gains, relatively, where a load is learned with one of so many tokens, on an arm.

        Only what has a cost counts: loads that were learned. Of another load the arms count, too, of which another load
        has shown how fast they are.
        """
        learned = self._known & np.array([one.load in self._needed for one in self._arms])
        mine = np.array([one.load == load for one in self._arms])
        shown = {one.system for i, one in enumerate(self._arms) if self._known[i]}
        likely = np.array([one.system in shown for one in self._arms])
        likely[arm] = True
        would_count = learned | (mine & self._able & (self._known | likely))
        before = self._volume_of(learned, self._tokens)
        if not before:  # no cost is known at all: all that there is, if the target is reached
            return float(np.mean(drawn < self._knowledge.tokens_per_trial))
        most = self._needed.get(load, self._knowledge.tokens_per_trial)
        useful = [tokens for tokens in drawn if tokens < most]
        volumes = (self._volume_of(would_count, np.where(mine, tokens, self._tokens)) for tokens in useful)
        return sum(volume / before - 1 for volume in volumes) / len(drawn)

    def _volume_of(self, arms: NDArray[np.bool_], tokens: Array) -> float:
        values = self._values(self.state.step, self.state.memory, tokens)
        return hypervolume(values[arms], self._reference)

    @property
    def _depends_on_learning(self) -> bool:
        """Tell whether an objective changes with the tokens to the target, or is one that only a whole run has."""
        one, two = (self._values(self.state.step, self.state.memory, n * self._tokens) for n in (1, 2))
        return not np.array_equal(one, two) or any(o.learned for o in self._objectives)

    def _fastest(self, load: str, learning: str) -> int | None:
        """Return the arm of a load that was measured fastest and may learn so.

        Where none of the load was, the one that is expected to be; None as long as none was measured at all.
        """
        state = self.state
        tried = {o.candidate_id for o in self._outcomes if o.kind == "quality" and not o.cut_short}
        with_it = [i for i, arm in enumerate(self._arms) if arm.load == load and learning in arm.by_learning]
        may = [i for i in with_it if self._arms[i].by_learning[learning].id not in tried]
        known = [i for i in may if state.measured[i] and i not in state.out]
        if not known and state.measured.any():
            fits = state.fits()
            known = [i for i in may if self._able[i] and fits[i] >= LIKELY]
        return min(known, key=lambda i: float(state.step[i]), default=None)

    def give_up(self, candidate: Candidate) -> GiveUp:
        """Return when a quality run of this candidate cannot win any more, by the runs of its load.

        With more tokens than the best needed, it is not better. And before, as successive halving at equal tokens:
        above the median of the others' eval losses, it is not among the better half.
        """
        load = key_of(load_of(candidate.flat))
        needed = self._needed.get(load)
        if needed is None:
            return ()
        runs = [o for o in self._outcomes if o.kind != "probe" and o.competes and key_of(load_of(o.config)) == load]
        rungs = [(int(BEHIND * needed), 0.0)]
        for tokens in (int(share * needed) for share in RUNGS):
            losses = [loss for o in runs if (loss := loss_at(o.curve, tokens)) is not None]
            if len(losses) >= LEAST_PEERS:
                rungs.append((tokens, float(np.median(losses))))
        return tuple(sorted(rungs))

    def rivals(self, candidate: Candidate) -> Rivals:
        """Return when a probe of this candidate cannot win any more: with more memory and longer steps than an arm has.

        Of the same load, so that both would need as many tokens. How long the probe's own evaluations would take is not
        known: with none at all it must still be worse.
        """
        load, workers = key_of(load_of(candidate.flat)), float(candidate.num_workers)
        measured = [k for k in np.flatnonzero(self.state.measured).tolist() if k not in self.state.out]
        of_load = [self._estimate_of(k) for k in measured if self._arms[k].load == load]
        found = sorted(rival for known in of_load if (rival := self._rival(known, workers)) is not None)
        return tuple(p for n, p in enumerate(found) if all(p[1] < other[1] for other in found[:n]))

    def _rival(self, known: Estimate, workers: float) -> tuple[float, float] | None:
        """Return the memory and step time from which on a known arm is not worse in any objective; None: never."""
        training = known.time_to_target_s - known.evaluating_s
        slower = max(1.0, known.workers / workers) * (1 + known.evaluating_s / training) * (1 + EXACT)
        worse = replace(known, step_time_s=known.step_time_s * slower, workers=workers, evaluating_s=0.0)
        for o in self._objectives:
            if not o.learned and (o.of is None or o.sign * o.of(worse) < o.sign * o.of(known)):
                return None
        return float(known.memory_gib), float(worse.step_time_s)

    def _estimate_of(self, arm: int) -> Estimate:
        every = self.state.estimate(self.state.step, self.state.memory, self._tokens, self._knowledge)
        figures = {name: np.broadcast_to(value, len(self._arms))[arm] for name, value in vars(every).items()}
        return replace(every, **figures)

    def to_confirm(self) -> Candidate | None:
        """Return a candidate of the composed frontier that should be run whole; None where enough were.

        The best of each objective first, then what adds most to the hypervolume.
        """
        done = sum(o.kind == "confirmation" for o in self._outcomes)
        found = [o for o in effective(self._outcomes, self._knowledge.price) if o.competes and self._complete(o)]
        if done >= self._knowledge.confirm or not found:
            return None
        values = np.array([[o.sign * t.metrics[o.name] for o in self._objectives] for t in found])
        reference = default_reference(values)
        lost = [-hypervolume(np.delete(values, i, axis=0), reference) for i in range(len(found))]
        firsts = [int(np.argmin(column)) for column in values.T]
        order = dict.fromkeys([*firsts, *sorted(range(len(found)), key=lambda i: -lost[i])])
        for i in list(order)[: self._knowledge.confirm]:
            candidate = self._candidate(found[i]) if found[i].composed_with is not None else None
            tried = {o.candidate_id for o in self._outcomes if o.kind == "confirmation"}
            if candidate is not None and candidate.id not in tried:
                return candidate
        return None

    def _complete(self, outcome: TrialOutcome) -> bool:
        return all(np.isfinite(outcome.metrics.get(o.name, np.nan)) for o in self._objectives)

    def _candidate(self, outcome: TrialOutcome) -> Candidate | None:
        key = key_of(learning_of(outcome.config))
        pair = arm_key(outcome.config)
        return next((a.by_learning.get(key) for a in self._arms if (a.load, a.system) == pair), None)
