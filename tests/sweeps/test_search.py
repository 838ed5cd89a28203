"""The contract of a searcher, for every one that is registered; and the registries themselves."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import pytest

import sweeps.objectives
import sweeps.search
from sweeps.candidates import Candidate
from sweeps.objectives import OBJECTIVES
from sweeps.outcome import TrialOutcome
from sweeps.search import SEARCHERS, Ask, Knowledge, Request, Searcher
from tests.sweeps.factories import CONDITIONAL, make_candidates, make_outcome
from trainers.errors import UserError
from trainers.registry import Registry

THREE = ("peak_memory_gib", "cost_per_quality_usd", "target_tokens_per_second")
CANDIDATES = make_candidates(CONDITIONAL)
IDS = {c.id for c in CANDIDATES}

each_searcher = pytest.mark.parametrize("name", list(SEARCHERS))
EXHAUSTIVE = [name for name in SEARCHERS if SEARCHERS[name].exhaustive]
each_exhaustive = pytest.mark.parametrize("name", EXHAUSTIVE)
each_objectives = pytest.mark.parametrize("objectives", [THREE, THREE[:1]], ids=["three", "one"])


def make(
    name: str, candidates: Sequence[Candidate] = CANDIDATES, objectives: Sequence[str] = THREE, seed: int = 0
) -> Searcher:
    return SEARCHERS[name](candidates, [OBJECTIVES[o] for o in objectives], seed)


def good(candidate: Candidate, n: int = 0) -> TrialOutcome:
    """Return an outcome with all values, which depend on the candidate alone."""
    rank = int(candidate.id[:4], 16)
    rate = 5.0 + rank
    metrics = {
        "peak_memory_gib": 1.0 + rank % 7, "cost_per_quality_usd": 2.0, "target_tokens_per_second": rate,
        "tokens_per_second": 2 * rate, "step_time_s": 1000 / rate, "tokens_to_target": 5e4,
    }  # fmt: skip
    return make_outcome(candidate, f"{n:03d}", metrics=metrics)


def bad(candidate: Candidate, n: int) -> TrialOutcome:
    """Return an outcome without a value for some objective; another kind for each n."""
    kinds = [
        make_outcome(candidate, status="OOM", reason_kind="device_oom"),
        make_outcome(candidate, status="FAILED", reason_kind="crash"),
        make_outcome(candidate, status="INFEASIBLE", reason_kind="illegal_config"),
        make_outcome(candidate, status="STOPPED", reason_kind="nan", metrics={"peak_memory_gib": 3.0}),
        # The journal refuses values that are not finite; a searcher has to stand them all the same.
        good(candidate).model_copy(update={"metrics": dict.fromkeys(THREE, math.nan)}),
        good(candidate).model_copy(update={"metrics": dict.fromkeys(THREE, math.inf)}),
        good(candidate).model_copy(update={"metrics": dict.fromkeys(THREE, -math.inf)}),
    ]
    return kinds[n % len(kinds)]


def ran(request: Request, outcome: TrialOutcome) -> TrialOutcome:
    """Return an outcome as that of a requested trial: what only a run as a whole has, a probe has not."""
    whole = {"cost_per_quality_usd", "tokens_to_target"} if request.kind == "probe" else set[str]()
    metrics = {name: value for name, value in outcome.metrics.items() if name not in whole}
    return outcome.model_copy(update={"kind": request.kind, "metrics": metrics})


def asked(searcher: Searcher, outcome: Callable[[Candidate, int], TrialOutcome], at_once: int = 1) -> list[Request]:
    """Ask and tell until FINISHED, with `at_once` trials side by side; return what was asked for, in order."""
    order: list[Request] = []
    running: list[Request] = []
    for _ in range(1000):
        answer = searcher.ask() if len(running) < at_once else Ask.WAIT
        if isinstance(answer, Request):
            order.append(answer)
            running.append(answer)
        elif answer is Ask.WAIT or running:
            assert running, "a searcher waits for a tell(), so there must be one to come"
            first = running.pop(0)
            searcher.tell(ran(first, outcome(first.candidate, len(order))))
        else:
            return order
    raise AssertionError("the search does not end")


def run(searcher: Searcher, outcome: Callable[[Candidate, int], TrialOutcome], at_once: int = 1) -> list[str]:
    """The same; return ids of candidates."""
    return [request.candidate.id for request in asked(searcher, outcome, at_once)]


@each_searcher
@each_objectives
@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_no_trial_is_asked_for_twice_and_the_search_ends(name: str, objectives: Sequence[str], at_once: int) -> None:
    """Whatever comes of trials, good, bad or mixed; and where a search ends before all were tried, it says why."""
    for outcome in (good, bad, lambda c, n: bad(c, n) if n % 2 else good(c, n)):
        searcher = make(name, objectives=objectives)
        order = [(r.candidate.id, r.kind) for r in asked(searcher, outcome, at_once)]
        assert len(set(order)) == len(order)
        assert {candidate for candidate, _ in order} <= IDS
        assert searcher.ask() is Ask.FINISHED
        left = {c.id for c in searcher.untried} - searcher.ruled_out.keys()
        assert not left or searcher.why


@each_exhaustive
@each_objectives
@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_every_candidate_is_handed_out_exactly_once(name: str, objectives: Sequence[str], at_once: int) -> None:
    order = run(make(name, objectives=objectives), good, at_once)
    assert len(order) == len(CANDIDATES)
    assert set(order) == IDS


@each_searcher
def test_candidates_are_handed_out_whole(name: str) -> None:
    """A conditional axis that does not apply is absent, and no value was changed on the way."""
    searcher = make(name)
    by_id = {c.id: c for c in CANDIDATES}
    for _ in CANDIDATES:
        answer = searcher.ask()
        if not isinstance(answer, Request):
            assert not SEARCHERS[name].exhaustive
            break
        assert answer.candidate == by_id[answer.candidate.id]
        assert ("lora_rank" in answer.candidate.flat) == (answer.candidate.flat["adapter"] == "lora")
        searcher.tell(ran(answer, good(answer.candidate)))


@each_exhaustive
@each_objectives
@pytest.mark.parametrize("at_once", [1, 3])
def test_no_outcome_stops_the_search(name: str, objectives: Sequence[str], at_once: int) -> None:
    order = run(make(name, objectives=objectives), bad, at_once)
    assert sorted(order) == sorted(IDS)


@each_exhaustive
def test_good_and_bad_outcomes_mixed(name: str) -> None:
    order = run(make(name), lambda c, n: bad(c, n) if n % 2 else good(c, n), at_once=2)
    assert sorted(order) == sorted(IDS)


@each_searcher
def test_what_was_told_before_is_not_handed_out(name: str) -> None:
    searcher = make(name)
    for n, candidate in enumerate(CANDIDATES[::3]):
        searcher.tell(bad(candidate, n) if n % 2 else good(candidate))
    told = {c.id for c in CANDIDATES[::3]}
    rest = [r.candidate.id for r in asked(searcher, good) if r.kind != "confirmation"]
    assert set(rest) <= IDS - told if not SEARCHERS[name].exhaustive else sorted(rest) == sorted(IDS - told)


@each_searcher
def test_a_searcher_that_was_told_everything_is_finished(name: str) -> None:
    searcher = make(name)
    for candidate in CANDIDATES:
        searcher.tell(good(candidate))
    assert searcher.ask() is Ask.FINISHED
    assert searcher.untried == []


@each_searcher
def test_an_outcome_of_another_space_is_no_harm(name: str) -> None:
    searcher = make(name)
    searcher.tell(make_outcome("unknown", metrics=dict.fromkeys(THREE, 1.0)))
    found = run(searcher, good)
    assert set(found) <= IDS
    assert found if not SEARCHERS[name].exhaustive else sorted(found) == sorted(IDS)


@each_searcher
@pytest.mark.parametrize("done", [1, 5, 11])
def test_a_new_searcher_goes_on_where_the_old_one_was(name: str, done: int) -> None:
    """The journal is the saved state: a searcher that is told its outcomes never repeats them."""
    old, finished = make(name, seed=3), []
    for n in range(done):
        answer = old.ask()
        if not isinstance(answer, Request):
            break
        finished.append(ran(answer, bad(answer.candidate, n) if n % 3 == 1 else good(answer.candidate, n)))
        old.tell(finished[-1])
    old.ask()  # running when the process died: it was not told, so it is tried again
    new = make(name, seed=3)
    for outcome in finished:
        new.tell(outcome)
    before = [(o.candidate_id, o.kind) for o in finished]
    rest = [(r.candidate.id, r.kind) for r in asked(new, good)]
    assert not set(before) & set(rest)
    if SEARCHERS[name].exhaustive:
        assert sorted(c for c, _ in rest) == sorted(IDS - {c for c, _ in before})


@each_searcher
@pytest.mark.parametrize("seed", [0, 7])
def test_the_same_seed_gives_the_same_order(name: str, seed: int) -> None:
    first, second = (run(make(name, seed=seed), good, at_once=2) for _ in range(2))
    assert first == second


@each_searcher
@each_objectives
def test_a_single_candidate(name: str, objectives: Sequence[str]) -> None:
    found = run(make(name, CANDIDATES[4:5], objectives), good)
    assert set(found) == {CANDIDATES[4].id}
    assert len(found) == 1 or not SEARCHERS[name].exhaustive


@each_searcher
def test_no_candidate(name: str) -> None:
    assert make(name, []).ask() is Ask.FINISHED


@each_exhaustive
def test_holes_in_the_space(name: str) -> None:
    """Illegal combinations are not among the candidates; the rest is no product of axes any more."""
    holes = [c for n, c in enumerate(CANDIDATES) if n not in (0, 3, 4, 10)]
    assert sorted(run(make(name, holes), good)) == sorted(c.id for c in holes)


@each_searcher
def test_a_baseline_runs_first_and_whole(name: str) -> None:
    knowledge = Knowledge(baseline=CANDIDATES[7].id)
    searcher = SEARCHERS[name](CANDIDATES, [OBJECTIVES[o] for o in THREE], 0, knowledge)
    first = searcher.ask()
    assert isinstance(first, Request)
    assert (first.candidate.id, first.kind) == (CANDIDATES[7].id, "quality")
    searcher.tell(good(first.candidate))
    again = searcher.ask()
    assert not isinstance(again, Request) or (again.candidate.id, again.kind) != (CANDIDATES[7].id, "quality")


# -- what the names promise -----------------------------------------------------------------------------------------


def test_grid_is_the_order_of_the_space() -> None:
    assert run(make("grid"), good) == [c.id for c in CANDIDATES]


def test_factored_is_every_arm_once_and_every_learning_once() -> None:
    """Full, and lora with two ranks, are 3 loads of 2 learning rates; × 2 micro batches: 6 probes, 6 whole runs."""
    order = asked(make("factored"), good)
    assert [r.kind for r in order] == ["probe"] * 6 + ["quality"] * 6
    learned = [json.dumps(dict(r.candidate.learning), sort_keys=True) for r in order[6:]]
    assert len(set(learned)) == 6
    # On the faster of both micro batches, by what the probes measured.
    rate = {r.candidate.id: good(r.candidate).metrics["tokens_per_second"] for r in order[:6]}
    by_load = {r.candidate.id: r.candidate.flat for r in order[:6]}
    for request in order[6:]:
        flat = request.candidate.flat
        alike = [i for i, c in by_load.items() if all(c.get(n) == flat.get(n) for n in ("adapter", "lora_rank"))]
        fastest = by_load[max(alike, key=lambda i: rate[i])]
        assert flat["micro_batch_size"] == fastest["micro_batch_size"]


def test_random_depends_on_the_seed() -> None:
    assert len({tuple(run(make("random", seed=seed), good)) for seed in range(5)}) > 1


def test_optuna_is_told_what_was_measured_and_nothing_else() -> None:
    """Finite values under the trial's own parameters, earlier trials first; the others are failed trials."""
    searcher = make("optuna", seed=1)
    earlier = [CANDIDATES[0], CANDIDATES[5], CANDIDATES[11]]
    searcher.tell(good(earlier[0]))
    searcher.tell(bad(earlier[1], 5))
    searcher.tell(good(earlier[2]))
    answer = searcher.ask()
    assert isinstance(answer, Request)
    asked = answer.candidate
    searcher.tell(good(asked))
    trials = searcher._study._ot_study.trials  # type: ignore[attr-defined]
    # The axes that vary: a rank exists only with lora.
    expected = [
        {n: c.flat[n] for n in ("adapter", "lora_rank", "learning_rate", "micro_batch_size") if n in c.flat}
        for c in (*earlier, asked)
    ]
    assert [t.params for t in (*trials[:3], trials[-1])] == expected
    assert [t.state.name for t in (*trials[:3], trials[-1])] == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    assert trials[0].values == [good(earlier[0]).metrics[o] for o in THREE]
    assert trials[-1].values == [good(asked).metrics[o] for o in THREE]
    assert [d.name for d in searcher._study._ot_study.directions] == ["MINIMIZE", "MINIMIZE", "MAXIMIZE"]  # type: ignore[attr-defined]


# -- the registries -------------------------------------------------------------------------------------------------


def modules(package: ModuleType) -> Iterator[str]:
    yield from (f"{package.__name__}.{m.name}" for m in pkgutil.iter_modules(package.__path__))


@pytest.mark.parametrize(
    ("registry", "module"),
    [
        pytest.param(registry, module, id=module)
        for registry, package in ((SEARCHERS, sweeps.search), (OBJECTIVES, sweeps.objectives))
        for module in modules(package)
    ],
)
def test_every_module_registers_something(
    registry: Registry[object], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(registry)
    monkeypatch.setattr(registry, "_members", {})
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.loader is not None
    found.loader.exec_module(importlib.util.module_from_spec(found))  # a copy: the imported module stays as it is
    assert registry._members
    assert set(registry._members) <= before


def test_an_unknown_searcher_is_named_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown searcher 'gird' \(did you mean grid\?\); available: factored, grid"):
        SEARCHERS["gird"]
