"""The choice, worked by hand: priorities, constraints, prices after the fact, ties, and what must give."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from sweeps import reasons
from sweeps.choose import main
from sweeps.decide import Decision, Wish, decide, priced
from sweeps.outcome import TrialOutcome
from tests.sweeps.factories import make_outcome, make_spec
from trainers.errors import UserError

HOUR = 3600.0
NO_TARGET = {"time_to_target_s": None, "tokens_to_target": None, "cost_per_quality_usd": None}


def trial(n: int, hours: float, workers: int, gib: float, *, precision: float = 0.02, **more: Any) -> TrialOutcome:
    """A whole run of so many hours to the target."""
    metrics = {
        "tokens_to_target": 1e6, "time_to_target_s": hours * HOUR, "storage_usd": 0.5, "peak_memory_gib": gib,
        "target_tokens_per_second": 100.0 / hours, "step_time_precision": precision, "cost_per_quality_usd": math.pi,
    }  # fmt: skip
    config = {"strategy": "ddp", "num_workers": workers, "micro_batch_size": n, **more.pop("config", {})}
    metrics |= more.pop("metrics", {})
    known = {name: value for name, value in metrics.items() if value is not None}
    return make_outcome(f"c{n}", f"{n:03d}", metrics=known, num_workers=workers, config=config, **more)


# At 2 USD: 20.5, 24.5 and 16.5 USD.
TEN_ON_ONE, THREE_ON_FOUR, FOUR_ON_TWO = trial(0, 10, 1, 20), trial(1, 3, 4, 10), trial(2, 4, 2, 40)
ALL = [TEN_ON_ONE, THREE_ON_FOUR, FOUR_ON_TWO]


def chosen(wish: dict[str, Any], trials: list[TrialOutcome] = ALL, price: float = 2.0) -> Decision:
    return decide(priced(trials, price), Wish.model_validate(wish))


def id_of(decision: Decision) -> str | None:
    return decision.choice.trial_id if decision.choice is not None else None


@pytest.mark.parametrize(
    ("wish", "trial_id"),
    [
        ({}, "002"),
        ({"priority": "fastest"}, "001"),
        ({"priority": "smallest"}, "000"),
        ({"priority": "safest"}, "001"),
        ({"max_memory_gib": 20}, "000"),
        ({"max_memory_gib": 20, "deadline_hours": 9}, "001"),
        ({"max_gpus": 2, "priority": "safest"}, "000"),
        ({"priority": "fastest", "max_cost_usd": 20}, "002"),
        # Costs 20.5 / 16.5 = 1.242 and 24.5 / 16.5 = 1.485 times the least, memory 2, 1, 4 times: logs 0.217 + 0.693,
        # 0.395 + 0, 0 + 1.386.
        ({"weights": {"cost_per_quality_usd": 1, "peak_memory_gib": 1}}, "001"),
        ({"weights": {"cost_per_quality_usd": 9, "peak_memory_gib": 1}}, "002"),
    ],
)
def test_what_is_chosen(wish: dict[str, Any], trial_id: str) -> None:
    assert id_of(chosen(wish)) == trial_id


def test_another_price_needs_no_new_run() -> None:
    """Storage is not of the GPU: at 2 USD 20.5, 24.5 and 16.5; at 0 all cost 0.5, and the least memory decides."""
    costs = [t.metrics["cost_per_quality_usd"] for t in priced(ALL, 2.0)]
    assert costs == pytest.approx([20.5, 24.5, 16.5])
    assert [t.metrics["cost_per_quality_usd"] for t in priced(ALL, 0.0)] == pytest.approx([0.5] * 3)


def test_costs_are_composed_at_the_new_price() -> None:
    """A probe of 50 tokens a second needs 1e6 of them: 20,000 s on 2 workers at 3.6 USD are 40 USD."""
    learned = trial(0, 10, 1, 20)
    probe = trial(3, 1, 2, 5, kind="probe", metrics={**NO_TARGET, "tokens_per_second": 50.0})
    found = priced([learned, probe], 3.6)[1]
    assert found.composed_with == "000"
    assert found.metrics["cost_per_quality_usd"] == pytest.approx(40 + 0.5)


def test_what_must_give_is_told_with_how_much() -> None:
    """For each constraint alone the least that is enough; where all must give, the least product of what they do."""
    decision = chosen({"max_memory_gib": 15, "deadline_hours": 2})
    assert decision.choice is None
    assert [(o.trial.trial_id, dict(o.needed)) for o in decision.relax] == [("001", {"deadline_hours": 3.0})]
    both = chosen({"max_gpus": 1, "deadline_hours": 5})
    assert {o.trial.trial_id: {k: pytest.approx(v) for k, v in o.needed.items()} for o in both.relax} == {
        "000": {"deadline_hours": 10.0}, "002": {"max_gpus": 2.0},
    }  # fmt: skip
    together = chosen({"max_memory_gib": 5, "max_cost_usd": 1})
    assert [dict(o.needed) for o in together.relax] == [{"max_memory_gib": 10.0, "max_cost_usd": pytest.approx(24.5)}]


def test_of_configurations_as_good_the_simplest_is_chosen() -> None:
    """20.5 against 20.3 USD is 1 %, and both are known to 2 %: the one without a pipeline."""
    split = trial(4, 9.9, 1, 20, config={"pp": 2})
    decision = chosen({}, [split, TEN_ON_ONE])
    assert id_of(decision) == "000"
    assert [t.trial_id for t in decision.tied] == ["004", "000"]
    clear = chosen({}, [trial(4, 9, 1, 20, config={"pp": 2}), TEN_ON_ONE])
    assert id_of(clear) == "004"


def test_how_sure_the_choice_is() -> None:
    """ln(20.5 / 16.5) = 0.217; with ± 10 % each their ratio has a deviation of 0.0722: 3.01 of them, 99.9 %."""
    wide = [trial(0, 10, 1, 20, precision=0.1), trial(2, 4, 2, 40, precision=0.1)]
    found = chosen({}, wide).confidence
    assert found == pytest.approx(0.5 * (1 + math.erf(math.log(20.5 / 16.5) / (0.1 * 2**0.5 / 1.96) / 2**0.5)))
    assert found == pytest.approx(0.9987, abs=2e-4)
    assert chosen({"priority": "safest"}).confidence == 1.0  # memory is counted
    assert chosen({}, [TEN_ON_ONE]).confidence is None


def test_without_a_target_speed_and_its_price_decide() -> None:
    """100 tokens a second on 1 worker at 3.6 USD an hour cost 10 USD a million; 150 on 2 cost 13.3."""
    one = trial(0, 1, 1, 20, metrics={**NO_TARGET, "target_tokens_per_second": 100.0})
    two = trial(1, 1, 2, 10, metrics={**NO_TARGET, "target_tokens_per_second": 150.0})
    assert id_of(chosen({}, [one, two], 3.6)) == "000"
    assert id_of(chosen({"priority": "fastest"}, [one, two], 3.6)) == "001"
    with pytest.raises(UserError, match="deadline_hours: no trial of this sweep reached a target"):
        chosen({"deadline_hours": 1}, [one, two])


def test_only_what_ran_through_and_learns_as_it_should_is_chosen() -> None:
    failed = trial(5, 0.1, 1, 1, status="OOM", reason_kind="device_oom")
    assert id_of(chosen({}, [failed, TEN_ON_ONE])) == "000"
    with pytest.raises(UserError, match="no trial of this sweep completed"):
        chosen({}, [failed])


def test_weights_have_names_and_sizes() -> None:
    with pytest.raises(UserError) as caught:
        chosen({"weights": {"peak_memory": 1, "cost_per_quality_usd": -1}})
    assert caught.value.faults[0].startswith("weights: unknown figure 'peak_memory' (did you mean peak_memory_gib?)")
    assert caught.value.faults[1] == "weights: cost_per_quality_usd=-1: must be above 0"


def test_the_reason_is_figures() -> None:
    text = reasons.why(chosen({}), ["num_workers"])
    assert text == (
        "It is the cheapest of 3 configurations that meet the constraints: 16.5 USD to target. The next best, trial "
        "000 (workers=1), costs 20.5 USD to target (+24%), takes 10 h (2.5 times as much), needs 20 GiB (0.5 times "
        "as much), uses 1 worker (0.5 times as much)."
    )
    assert reasons.if_wrong(chosen({})) == "the next best, trial 000, has 20.5 USD to target (+24%)"
    assert reasons.against(*priced([TEN_ON_ONE, FOUR_ON_TWO], 2.0)) == (
        "beside what you run now, trial 000: 1.2 times cheaper, 20 GiB more of a device, 2.5 times faster to the target"
    )


# -- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A sweep's folder with three trials."""
    folder = tmp_path / "runs" / "test-20250101-1"
    folder.mkdir(parents=True)
    spec = make_spec({"price_per_gpu_hour": 2.0})
    from sweeps import space

    (folder / "spec.yaml").write_text(space.to_yaml(spec))
    (folder / "trials.jsonl").write_text("".join(o.to_line() for o in ALL))
    return folder.parent


def test_the_command_for_scripts(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["priority=fastest", f"runs_dir={runs}", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["choice"]["trial"], told["choice"]["figures"]["cost_per_quality_usd"]) == ("001", pytest.approx(24.5))
    assert [o["trial"] for o in told["others"]] == ["002", "000"]
    assert main(["max_memory_gib=1", f"runs_dir={runs}", "--json"]) == 1
    relax = json.loads(capsys.readouterr().out)["relax"]
    assert relax == [{"trial": "001", "constraints": {"max_memory_gib": {"given": 1.0, "needed": 10.0}}}]


def test_the_command_for_people(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"runs_dir={runs}", "price_per_gpu_hour=0.2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Choice trial 002 of test-20250101-1" in printed
    assert "2.1 USD to target" in printed  # 2 workers × 4 h × 0.2 + 0.5
    assert "At 0.2 USD per GPU-hour" in printed
    assert main([f"runs_dir={runs}", "deadline_hours=1", "max_gpus=4"]) == 1
    assert "deadline_hours=3 (by 2): trial 001" in " ".join(capsys.readouterr().out.split())


def test_wrong_wishes_are_told_all_at_once(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"runs_dir={runs}", "priority=cheepest", "max_gpu=3", "deadline_hours=soon"]) == 2
    told = capsys.readouterr().err
    assert "priority=cheepest: allowed: cheapest, fastest, smallest, safest (did you mean cheapest?)" in told
    assert "unknown key max_gpu=3 (did you mean max_gpus?)" in told
    assert "deadline_hours=soon: expected a number" in told
    assert main([f"runs_dir={runs}", "sweep=test-20250101-2"]) == 2
    assert "sweep=test-20250101-2: no such sweep" in capsys.readouterr().err
