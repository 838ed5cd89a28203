"""What the trials that ended make likely of all others: speed and memory of arms, tokens of learning configurations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sweeps.compose import arm_key, best_learning, key_of, learning_of, load_of
from sweeps.guide.arms import Arm, needs_as_much
from sweeps.guide.surrogate import Beliefs, Surrogate
from sweeps.objectives import Estimate
from sweeps.outcome import TrialOutcome
from sweeps.search import Knowledge, Prior

Array = NDArray[np.float64]
TIME = Beliefs(common=1.0, axis=0.25, rest=0.2, noise=0.02)
MEMORY = Beliefs(common=0.15, axis=0.04, rest=0.03, noise=0.005)
LEARNING = Beliefs(common=0.5, axis=0.5, rest=0.2, noise=0.05)
"""of the logarithm of measured over predicted; of learning: of the tokens to the target, over half of a trial's"""
CENTRE = 0.3  # of the same logarithm: people list values around those that they believe in
GUESS = 0.5  # of a trial's tokens: what a learning configuration needs, as long as nothing is known
BEYOND_CAPACITY = 0.03  # relative: by how much more than there is a trial is believed to need that ran out of memory
PROBE_STEPS, TIMED_STEPS = 8.0, 6.0  # of a probe beside the timed ones, proof and rehearsal; and timed ones at least


@dataclass(frozen=True)
class State:
    """All arms, as they are known now; arrays are [arms]."""

    step: Array
    """logarithm of an update's seconds, mean"""
    step_sd: Array
    memory: Array
    """logarithm of a device's GiB, mean"""
    memory_sd: Array
    measured: NDArray[np.bool_]
    pending: NDArray[np.bool_]
    out: Mapping[int, str]
    """arms that cannot run, by position: `oom`, `inferred_oom`, `failed` or `differs`"""
    tokens: Array
    targets: Array
    workers: Array
    evaluation: Array
    """seconds of an evaluation"""
    startup_s: float
    capacity_gib: float

    def estimate(self, step: Array, memory: Array, tokens_to_target: Array, knowledge: Knowledge) -> Estimate:
        """Return arms as objectives see them, from logarithms [..., arms]."""
        evaluations = 1 + np.ceil(tokens_to_target / knowledge.eval_every_tokens)
        seconds = np.exp(step)
        evaluating = evaluations * self.evaluation / np.exp(self.step) * seconds
        return Estimate(
            np.exp(memory), seconds, self.tokens, self.targets, self.workers, tokens_to_target, evaluating,
            knowledge.price,
        )  # fmt: skip

    def fits(self) -> Array:
        """Return with what probability an arm has memory enough."""
        if not math.isfinite(self.capacity_gib):
            return np.ones(len(self.step))
        z = (math.log(self.capacity_gib) - self.memory) / np.maximum(self.memory_sd, 1e-9)
        found: Array = 0.5 * (1 + np.array([math.erf(one / math.sqrt(2)) for one in z]))
        return found

    def probe_seconds(self, knowledge: Knowledge) -> Array:
        """Return the seconds that probes are expected to take, start-up included."""
        seconds = np.exp(self.step)
        timed = np.minimum(2 * TIMED_STEPS * seconds, np.maximum(knowledge.measure_seconds, TIMED_STEPS * seconds))
        found: Array = self.startup_s + PROBE_STEPS * seconds + timed + 2 * self.evaluation
        return found


class Systems:
    """Arms and what is believed of them; `now` weighs what trials have shown."""

    def __init__(self, arms: Sequence[Arm], knowledge: Knowledge) -> None:
        self.arms, self._knowledge = arms, knowledge
        self._at = {(arm.load, arm.system): i for i, arm in enumerate(arms)}
        configs = [arm.config for arm in arms]
        self._time, self._memory = Surrogate(configs, TIME), Surrogate(configs, MEMORY)
        known = [knowledge.priors.get(arm.candidate.id) for arm in arms]
        flat = Prior(1.0, 1.0, 1.0, 1.0)
        self._priors = [prior or next((p for p in known if p is not None), flat) for prior in known]
        self._steps = np.log([p.step_time_s for p in self._priors])
        self._gibs = np.log([p.memory_gib for p in self._priors])

    def position(self, outcome: TrialOutcome) -> int | None:
        """Return which arm a trial was on; None: of another space."""
        return self._at.get(arm_key(outcome.config))

    def now(self, outcomes: Sequence[TrialOutcome], pending: Sequence[int]) -> State:
        """Return what is believed after these trials; arms that are `pending` are believed to be as expected."""
        seen, out = self._seen(outcomes)
        capacity = self._knowledge.capacity_gib or math.inf
        steps, gibs = self._observed(seen, out, capacity, pending)
        step_mean, step_sd = self._time.posterior(*steps)
        memory_mean, memory_sd = self._memory.posterior(*gibs)
        step, memory = self._steps + step_mean, self._gibs + memory_mean
        evaluation = np.exp(step) * _ratio(seen, "eval_time_s", default=1.0)
        tokens = np.array([p.tokens for p in self._priors])
        targets = np.array([p.targets for p in self._priors])
        measured = np.zeros(len(self.arms), dtype=bool)
        for i, figures in seen.items():
            measured[i] = True
            step[i], step_sd[i] = math.log(figures["step_time_s"]), 0.0
            memory[i], memory_sd[i] = math.log(figures["peak_memory_gib"]), 0.0
            evaluation[i] = figures.get("eval_time_s", evaluation[i])
            tokens[i] = figures.get("tokens_per_second", tokens[i] / math.exp(step[i])) * figures["step_time_s"]
            targets[i] = figures.get("target_tokens_per_second", targets[i] / math.exp(step[i])) * math.exp(step[i])
        waits = np.isin(np.arange(len(self.arms)), list(pending))
        workers = np.array([float(arm.candidate.num_workers) for arm in self.arms])
        return State(
            step, step_sd, memory, memory_sd, measured, waits, out, tokens, targets, workers, evaluation,
            self._startup(outcomes), capacity,
        )  # fmt: skip

    def _seen(self, outcomes: Sequence[TrialOutcome]) -> tuple[dict[int, Mapping[str, float]], dict[int, str]]:
        """Return the figures of arms that ran, and why others cannot."""
        seen: dict[int, Mapping[str, float]] = {}
        out: dict[int, str] = {}
        for outcome in outcomes:
            i = self.position(outcome)
            if i is None or outcome.repeats is not None or outcome.cut_short:
                continue
            if outcome.status == "OOM":
                out[i] = "oom"
            elif outcome.differs:
                out[i] = "differs"
            elif _figures(outcome):
                seen[i] = outcome.metrics
            else:  # whatever it was: the same would come of it again
                out.setdefault(i, "failed")
        for i in [i for i, why in out.items() if why == "oom"]:
            for j, arm in enumerate(self.arms):
                if j not in out and j not in seen and needs_as_much(arm.config, self.arms[i].config):
                    out[j] = "inferred_oom"
        return {i: m for i, m in seen.items() if out.get(i) in (None, "failed")}, {
            i: why for i, why in out.items() if not (why == "failed" and i in seen)
        }

    def _observed(
        self,
        seen: Mapping[int, Mapping[str, float]],
        out: Mapping[int, str],
        capacity: float,
        pending: Sequence[int],
    ) -> tuple[tuple[list[int], list[float], list[float]], tuple[list[int], list[float], list[float]]]:
        """Return what the surrogates learn from: positions, log ratios, and their noise; of time and of memory."""
        at = list(seen)
        steps = [math.log(seen[i]["step_time_s"]) - self._steps[i] for i in at]
        noise = [float(seen[i].get("step_time_precision", 0.0)) / 2 for i in at]
        gibs = [math.log(seen[i]["peak_memory_gib"]) - self._gibs[i] for i in at]
        of_memory, exact = list(at), [0.0] * len(at)
        for i, why in out.items():
            if why == "oom" and math.isfinite(capacity):  # it needs more than there is: how much more is not known
                of_memory.append(i)
                gibs.append(max(0.0, math.log(capacity * (1 + BEYOND_CAPACITY)) - self._gibs[i]))
                exact.append(0.1)
        time, memory = (at, steps, noise), (of_memory, gibs, exact)
        waiting = [i for i in pending if i not in seen]
        if waiting:
            means, _ = self._time.posterior(*time)
            of_gib, _ = self._memory.posterior(*memory)
            time = at + waiting, steps + [float(means[i]) for i in waiting], noise + [0.0] * len(waiting)
            memory = of_memory + waiting, gibs + [float(of_gib[i]) for i in waiting], exact + [0.0] * len(waiting)
        return time, memory

    def _startup(self, outcomes: Sequence[TrialOutcome]) -> float:
        """Return the seconds of a trial outside its steps, as probes have shown."""
        found = []
        for outcome in outcomes:
            step = outcome.metrics.get("step_time_s")
            if outcome.kind == "probe" and outcome.repeats is None and outcome.status == "COMPLETED" and step:
                timed = min(2 * TIMED_STEPS * step, max(self._knowledge.measure_seconds, TIMED_STEPS * step))
                busy = PROBE_STEPS * step + timed + 2 * outcome.metrics.get("eval_time_s", 0.0)
                found.append(max(0.0, outcome.wall_s - busy))
        return statistics.median(found) if found else self._knowledge.startup_s


class Learning:
    """What is believed of the tokens that learning configurations need."""

    def __init__(self, arms: Sequence[Arm], knowledge: Knowledge) -> None:
        first = {key: candidate for arm in arms for key, candidate in arm.by_learning.items()}
        self.keys = list(first)
        self.loads = [key_of(load_of(candidate.flat)) for candidate in first.values()]
        self._guess = max(GUESS * knowledge.tokens_per_trial, 1.0)
        self._limit = knowledge.tokens_per_trial
        configs = [learning_of(candidate.flat) for candidate in first.values()]
        self._surrogate, self._central = Surrogate(configs, LEARNING), CENTRE * _from_the_middle(configs)

    def now(self, outcomes: Sequence[TrialOutcome]) -> tuple[Array, Array, set[str]]:
        """Return mean and standard deviation of the logarithm of each one's tokens, and which have run.

        One that did not reach the target, or was stopped on the way, is believed to need more than it was given.
        """
        at, values, ran = list[int](), list[float](), set[str]()
        for outcome in outcomes:
            key = key_of(learning_of(outcome.config))
            if outcome.kind == "probe" or key not in self.keys or outcome.cut_short:
                continue
            if outcome.status not in ("COMPLETED", "STOPPED"):
                continue
            ran.add(key)
            spent = max(float(outcome.metrics.get("consumed_tokens", self._limit)), 1.0)
            needed = outcome.metrics.get("tokens_to_target")
            at.append(self.keys.index(key))
            values.append(math.log(max(needed, 1.0) if needed is not None else 2 * spent) - math.log(self._guess))
        expected = math.log(self._guess) + self._central
        mean, sd = self._surrogate.posterior(
            at, [v - self._central[i] for i, v in zip(at, values, strict=True)], [0.0] * len(at)
        )
        return mean + expected, sd, ran

    def needed(self, outcomes: Sequence[TrialOutcome]) -> dict[str, float]:
        """Return by load the fewest tokens with which the target was reached."""
        return {load: max(o.metrics["tokens_to_target"], 1.0) for load, o in best_learning(outcomes).items()}


def _from_the_middle(configs: Sequence[Mapping[str, Any]]) -> Array:
    """Return how far each configuration is from the middle of what is given, 0 to 1 an axis of numbers, summed."""
    total = np.zeros(len(configs))
    for name in dict.fromkeys(name for config in configs for name in config):
        numbers = sorted({c[name] for c in configs if isinstance(c.get(name), int | float)})
        if len(numbers) > 2:
            half = (len(numbers) - 1) / 2
            total += [abs(numbers.index(c[name]) - half) / half if name in c else 0.0 for c in configs]
    return total


def _figures(outcome: TrialOutcome) -> bool:
    """Tell whether a trial was timed and its memory measured, in numbers that can be."""
    values = [outcome.metrics.get(name, math.nan) for name in ("step_time_s", "peak_memory_gib")]
    return outcome.status in ("COMPLETED", "STOPPED") and all(math.isfinite(v) and v > 0 for v in values)


def _ratio(seen: Mapping[int, Mapping[str, float]], name: str, default: float) -> float:
    """Return the median of a figure over the step time."""
    found = [m[name] / m["step_time_s"] for m in seen.values() if name in m]
    return statistics.median(found) if found else default
