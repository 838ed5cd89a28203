"""Ray Tune's OptunaSearch over the enumerated candidates, with several objectives."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from typing import Any

from sweeps.candidates import Candidate
from sweeps.outcome import TrialOutcome
from sweeps.search import SEARCHERS, WholeRuns
from sweeps.spec import axes
from trainers.config import LearningConfig, SystemConfig

# TPE repeats itself on small discrete spaces; after this many repeats in a row an untried candidate is drawn.
REPEATS = 20


@SEARCHERS.register("optuna")
class Optuna(WholeRuns):
    """Optuna's sampler proposes a point; the candidate with those values is the trial.

    Illegal points and repeats are told to Optuna as failed and asked again. Trials without a finite value for every
    objective are failed trials to Optuna, never a bad score.
    """

    sampler = "TPESampler"
    """that proposes, by its name in optuna.samplers"""

    def prepare(self) -> None:
        self._random = random.Random(self.seed)
        self._by_values = {_key(c.flat): c for c in self.candidates}
        self._values = {
            a.name: list(dict.fromkeys(c.flat[a.name] for c in self.candidates if a.name in c.flat))
            for config in (LearningConfig, SystemConfig)
            for a in axes(config)
        }
        self._study: Any = None
        self._earlier: list[TrialOutcome] = []
        self._running: dict[str, str] = {}  # candidate id to Optuna's trial id
        self._asked = 0

    def choose(self) -> Candidate:
        search = self._search()
        for _ in range(REPEATS):
            trial_id, point = self._suggest(search)
            candidate = self._by_values.get(_key(point))
            if candidate is not None and candidate.id not in self.seen:
                self._running[candidate.id] = trial_id
                return candidate
            search.on_trial_complete(trial_id, error=True)
        return self._random.choice(self.untried)

    def learn(self, outcome: TrialOutcome) -> None:
        if self._study is None:
            self._earlier.append(outcome)
            return
        trial_id = self._running.pop(outcome.candidate_id, None)
        if trial_id is not None:
            self._complete(trial_id, outcome)

    def _complete(self, trial_id: str, outcome: TrialOutcome) -> None:
        values = {o.name: outcome.metrics.get(o.name, math.nan) for o in self.objectives}
        if outcome.competes and all(math.isfinite(v) for v in values.values()):
            self._study.on_trial_complete(trial_id, result=values)
        else:
            self._study.on_trial_complete(trial_id, error=True)

    def _search(self) -> Any:
        """Build OptunaSearch at the first ask: by then the outcomes of a resumed sweep are known."""
        if self._study is None:
            import optuna
            from ray.tune.search.optuna import OptunaSearch

            optuna.logging.set_verbosity(optuna.logging.ERROR)
            known = {c.id: c for c in self.candidates}
            earlier = [o for o in self._earlier if o.candidate_id in known]
            modes = ["min" if o.direction == "minimize" else "max" for o in self.objectives]
            self._study = OptunaSearch(
                space=self._define,
                metric=[o.name for o in self.objectives],
                mode=modes,
                sampler=getattr(optuna.samplers, self.sampler)(seed=self.seed),
                points_to_evaluate=[self._free(known[o.candidate_id].flat) for o in earlier] or None,
            )
            for outcome in earlier:
                trial_id, _ = self._suggest(self._study)
                self._complete(trial_id, outcome)
        return self._study

    def _suggest(self, search: Any) -> tuple[str, dict[str, Any]]:
        self._asked += 1
        trial_id = f"ask-{self._asked}"
        point = search.suggest(trial_id)
        fixed = {n: v[0] for n, v in self._values.items() if len(v) == 1}
        return trial_id, _applicable({**fixed, **point})

    def _define(self, trial: Any) -> None:
        """Optuna's define-by-run space: a conditional axis is asked only where it applies."""
        chosen: dict[str, Any] = {}
        for config in (LearningConfig, SystemConfig):
            for axis in axes(config):
                values = self._values[axis.name]
                if axis.only_with and not axis.only_with.holds(chosen.get(axis.only_with.field)):
                    continue
                if len(values) > 1:
                    chosen[axis.name] = trial.suggest_categorical(axis.name, values)
                elif values:
                    chosen[axis.name] = values[0]

    def _free(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        return {n: v for n, v in flat.items() if len(self._values[n]) > 1}


def _applicable(point: Mapping[str, Any]) -> dict[str, Any]:
    """Drop conditional values whose condition does not hold."""
    conditions = {a.name: a.only_with for config in (LearningConfig, SystemConfig) for a in axes(config)}
    return {n: v for n, v in point.items() if (only := conditions[n]) is None or only.holds(point.get(only.field))}


def _key(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True)
