"""A space that was measured exhaustively, on which searchers are run again and again: trials are looked up, not run.

The prior that a searcher is given is the closed form's. The truth differs from it by biases that no searcher sees.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sweeps.candidates import Candidate
from sweeps.compose import arm_key, composed, key_of, learning_of
from sweeps.curve import tokens_at
from sweeps.objectives import OBJECTIVES, Objective
from sweeps.outcome import TrialOutcome
from sweeps.pareto import default_reference, hypervolume
from sweeps.search import Knowledge, Prior, Request

NAMES = ("peak_memory_gib", "cost_per_quality_usd", "target_tokens_per_second")
PROBE_STEPS = 20.0  # that a probe takes beside evaluations: proof, rehearsal, warm-up and timed windows, profile
OOM_STEPS = 2.0
NOISE = 0.03  # of a measured step time, relative


@dataclass(frozen=True)
class SystemTruth:
    """What a way to divide the work takes, under one load."""

    memory_gib: float
    step_time_s: float
    evaluation_s: float
    prior: Prior


@dataclass(frozen=True)
class LearningTruth:
    """Eval losses (tokens, loss), from the base model's on."""

    curve: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Table:
    """A space with all that can be measured on it."""

    name: str
    candidates: tuple[Candidate, ...]
    systems: Mapping[tuple[str, str], SystemTruth]
    """by load and system"""
    learnings: Mapping[str, LearningTruth]
    target: float
    capacity_gib: float
    price: float
    startup_s: float

    @property
    def objectives(self) -> list[Objective]:
        return [OBJECTIVES[name] for name in NAMES]

    def system(self, config: Mapping[str, Any]) -> SystemTruth:
        return self.systems[arm_key(config)]

    def learning(self, config: Mapping[str, Any]) -> LearningTruth:
        return self.learnings[key_of(learning_of(config))]

    def knowledge(self, shuffled: int | None = None) -> Knowledge:
        """Return what a searcher is told; `shuffled`: a seed with which predictions are dealt to other systems."""
        priors = [self.system(c.flat).prior for c in self.candidates]
        if shuffled is not None:
            pairs = list(self.systems)
            dealt = dict(zip(pairs, random.Random(shuffled).sample(pairs, len(pairs)), strict=True))
            of = [arm_key(c.flat) for c in self.candidates]
            priors = [self.systems[dealt[pair]].prior for pair in of]
        last = next(iter(self.learnings.values())).curve
        return Knowledge(
            priors={c.id: p for c, p in zip(self.candidates, priors, strict=True)},
            capacity_gib=self.capacity_gib,
            price=self.price,
            tokens_per_trial=last[-1][0],
            eval_every_tokens=last[1][0] - last[0][0],
            startup_s=self.startup_s,
        )

    def values(self, config: Mapping[str, Any]) -> tuple[float, ...] | None:
        """Return the true objectives of a configuration, minimised; None where it has none: no memory, or no target."""
        system = self.system(config)
        tokens = tokens_at(self.learning(config).curve, self.target)
        if system.memory_gib > self.capacity_gib or tokens is None:
            return None
        figures = _figures(system, system.step_time_s)
        cost = composed(figures, _to_target(tokens, self.learning(config)), int(config["num_workers"]), self.price)
        return tuple(o.sign * {**figures, **cost}[o.name] for o in self.objectives)

    @cached_property
    def everything(self) -> np.ndarray:
        """True objectives of all configurations that have them."""
        return np.array([v for c in self.candidates if (v := self.values(c.flat)) is not None])

    @cached_property
    def reference(self) -> np.ndarray:
        return default_reference(self.everything)

    @cached_property
    def volume(self) -> float:
        """The exhaustive hypervolume."""
        return hypervolume(self.everything, self.reference)

    def share(self, configs: Sequence[Mapping[str, Any]]) -> float:
        """Return the hypervolume of some configurations over the exhaustive one."""
        values = [v for c in configs if (v := self.values(c)) is not None]
        return hypervolume(np.array(values), self.reference) / self.volume if values else 0.0

    def seconds(self, request: Request) -> float:
        """Return the seconds of a trial, as it would take them without noise."""
        system, config = self.system(request.candidate.flat), request.candidate.flat
        if system.memory_gib > self.capacity_gib:
            return self.startup_s + OOM_STEPS * system.step_time_s
        if request.kind == "probe":
            return self.startup_s + PROBE_STEPS * system.step_time_s + 2 * system.evaluation_s
        ran = self._ran(request)
        probing = PROBE_STEPS * system.step_time_s  # a whole run measures first, too
        evaluating = len(ran) * system.evaluation_s
        return self.startup_s + probing + ran[-1][0] / _tokens_per_second(system, config) + evaluating

    def run(self, request: Request, trial: int, rng: random.Random, clock: float) -> TrialOutcome:
        """Look a trial up: its outcome, with the noise of a measurement."""
        config, kind = request.candidate.flat, request.kind
        system = self.system(config)
        known: dict[str, Any] = {
            "sweep_id": "replay", "trial_id": f"{trial:04d}", "candidate_id": request.candidate.id, "kind": kind,
            "started_at": clock, "ended_at": clock + self.seconds(request), "config": config,
            "num_workers": request.candidate.num_workers,
        }  # fmt: skip
        if system.memory_gib > self.capacity_gib:
            return TrialOutcome(**known, status="OOM", reason_kind="device_oom")
        figures = _figures(system, system.step_time_s * math.exp(rng.gauss(0.0, NOISE)))
        if kind == "probe":
            return TrialOutcome(**known, status="COMPLETED", metrics=figures)
        ran = self._ran(request)
        result = {"evaluations": [{"consumed_tokens": tokens, "loss": loss} for tokens, loss in ran]}
        figures["consumed_tokens"] = float(ran[-1][0])
        tokens = tokens_at(ran, self.target)
        if tokens is not None:
            quality = _to_target(tokens, self.learning(config))
            cost = composed(figures, quality, request.candidate.num_workers, self.price)
            return TrialOutcome(**known, status="COMPLETED", metrics={**figures, **quality, **cost}, result=result)
        early = ran[-1][0] < self.learning(config).curve[-1][0]
        return TrialOutcome(
            **known, status="STOPPED" if early else "COMPLETED", reason_kind="dominated" if early else "budget",
            metrics=figures, result=result,
        )  # fmt: skip

    def _ran(self, request: Request) -> tuple[tuple[int, float], ...]:
        """Return the evaluations of a run: up to the target, or until it gives up."""
        found = []
        for tokens, loss in self.learning(request.candidate.flat).curve:
            found.append((tokens, loss))
            if loss <= self.target or any(tokens >= at and loss > most for at, most in request.give_up):
                break
        return tuple(found)


def _tokens_per_second(system: SystemTruth, config: Mapping[str, Any]) -> float:
    return system.prior.tokens / system.step_time_s


def _figures(system: SystemTruth, step_time_s: float) -> dict[str, float]:
    return {
        "peak_memory_gib": system.memory_gib, "step_time_s": step_time_s, "step_time_precision": NOISE,
        "tokens_per_second": system.prior.tokens / step_time_s,
        "target_tokens_per_second": system.prior.targets / step_time_s, "eval_time_s": system.evaluation_s,
    }  # fmt: skip


def _to_target(tokens: float, learning: LearningTruth) -> dict[str, float]:
    evaluations = 1 + sum(at <= tokens for at, _ in learning.curve)
    return {"tokens_to_target": tokens, "evaluations_to_target": float(evaluations)}


def save(table: Table, path: Path) -> None:
    """Write a table; candidates as their axes."""
    data = {
        "name": table.name, "target": table.target, "capacity_gib": table.capacity_gib, "price": table.price,
        "startup_s": table.startup_s,
        "candidates": [{"id": c.id, "learning": c.learning, "system": c.system} for c in table.candidates],
        "systems": [
            [load, system, round(t.memory_gib, 6), round(t.step_time_s, 6), round(t.evaluation_s, 6),
             [round(v, 6) for v in (t.prior.memory_gib, t.prior.step_time_s, t.prior.tokens, t.prior.targets)]]
            for (load, system), t in table.systems.items()
        ],
        "learnings": {key: [[t, round(loss, 5)] for t, loss in truth.curve] for key, truth in table.learnings.items()},
    }  # fmt: skip
    path.write_text(json.dumps(data), encoding="utf-8")


def load(path: Path) -> Table:
    """Read a table that `save` wrote."""
    data = json.loads(path.read_text(encoding="utf-8"))
    candidates = tuple(Candidate(c["id"], c["learning"], c["system"], 1) for c in data["candidates"])
    systems = {(one, two): SystemTruth(m, s, e, Prior(*prior)) for one, two, m, s, e, prior in data["systems"]}
    learnings = {
        key: LearningTruth(tuple((int(t), float(loss)) for t, loss in curve))
        for key, curve in data["learnings"].items()
    }
    return Table(
        data["name"], candidates, systems, learnings, data["target"], data["capacity_gib"], data["price"],
        data["startup_s"],
    )  # fmt: skip
