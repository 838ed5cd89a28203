"""The verdict on trials: what it rests on, and that a trial which differs stays off the frontier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sweeps import space
from sweeps.parity import References, judge
from sweeps.sweep import run_sweep
from sweeps.trial import Job
from tests.sweeps.silent import SilentScreen
from tests.sweeps.test_desk import desk_after
from tests.sweeps.test_sweep import TINY
from trainers.engine import NativeEngine
from trainers.result import FirstUpdates, Miniature, Proof, Reference

RIGHT = FirstUpdates((2.0, 1.5), (0.5, 0.4))


@pytest.mark.parametrize(
    ("losses", "norms", "noise", "small", "verdict"),
    [
        ((2.0, 1.5), (0.5, 0.4), 0.0, None, "EQUAL"),
        ((2.0, 1.5 + 4e-4), (0.5, 0.4), 1e-4, None, "EQUAL"),  # 4e-4 / 1.5 is within 4 × 1e-4
        ((2.0, 1.5), (0.5, 0.4 + 4e-4), 1e-4, None, "SEMANTICS_DIFFER"),  # 1e-3 is not
        ((float("nan"), 1.5), (0.5, 0.4), 1e-4, None, "SEMANTICS_DIFFER"),
        ((2.0, 1.5), (0.5, 0.4), 1e-4, Miniature(1e-12, "float64"), "EQUAL"),
        ((2.0, 1.5), (0.5, 0.4), 1e-4, Miniature(1e-9, "float64"), "SEMANTICS_DIFFER"),
        ((2.0, 1.5), (0.5, 0.4), 1e-4, Miniature(1e-9, "float32"), "EQUAL"),
        ((2.0, 1.5), (0.5, 0.4), 1e-4, Miniature(float("inf"), "float32"), "SEMANTICS_DIFFER"),
    ],
)
def test_the_verdict(losses: Any, norms: Any, noise: float, small: Miniature | None, verdict: str) -> None:
    found = judge(
        Proof(FirstUpdates(losses, norms), small), Reference("one process", RIGHT, noise, "float32"), "one process"
    )
    assert found is not None
    assert found.verdict == verdict
    assert bool(found.why) == (verdict == "SEMANTICS_DIFFER")


def test_half_precision_may_differ_by_what_it_rounds() -> None:
    """2⁻⁵ is 3.1e-2."""
    for difference, verdict in ((3e-2, "EQUAL"), (3.3e-2, "SEMANTICS_DIFFER")):
        proof = Proof(FirstUpdates((2.0 * (1 + difference), 1.5), (0.5, 0.4)))
        found = judge(proof, Reference("one process", RIGHT, 1e-6, "bfloat16"), "one process")
        assert found is not None
        assert found.verdict == verdict


def test_without_a_reference_the_small_model_alone_decides() -> None:
    for difference, verdict in ((1e-12, "EQUAL"), (1e-9, "SEMANTICS_DIFFER")):
        found = judge(Proof(RIGHT, Miniature(difference, "float64")), None)
        assert found is not None
        assert (found.verdict, found.tolerance) == (verdict, None)
    assert judge(Proof(RIGHT), None) is None


LEARNING = {"adapter": "lora", "learning_rate": 1e-3}


def measured(source: str, loss: float) -> Proof:
    first = FirstUpdates((loss,), (0.5,))
    return Proof(first, None, Reference(source, first, 1e-7, "float32"))  # type: ignore[arg-type]


def test_trials_are_compared_with_one_process_where_there_is_one() -> None:
    references, trial = References(), Proof(FirstUpdates((2.0,), (0.5,)))
    assert references.judge(LEARNING, trial) is None
    assert LEARNING not in references
    references.add(LEARNING, None, "000")
    assert LEARNING not in references
    references.add(LEARNING, measured("this trial", 3.0), "001")
    found = references.judge(LEARNING, trial)
    assert found is not None
    assert (found.reference, found.verdict) == ("trial 001", "SEMANTICS_DIFFER")
    references.add(LEARNING, measured("one process", 2.0), "002")
    references.add(LEARNING, measured("one process", 4.0), "003")
    found = references.judge({"learning_rate": "1e-3", "adapter": "lora"}, trial)  # the same, in text
    assert found is not None
    assert (found.reference, found.verdict) == ("one process (trial 002)", "EQUAL")
    assert references.judge({**LEARNING, "learning_rate": 2e-3}, trial) is None
    assert references.judge(LEARNING, None) is None


def test_the_first_trial_of_a_learning_configuration_measures_what_is_right(tmp_path: Path) -> None:
    """And so does the second, while the first has not ended."""
    desk = desk_after([], tmp_path)
    jobs = [job for job in (desk.next(4), desk.next(4)) if isinstance(job, Job)]
    assert [job.config["run"]["proof"] for job in jobs] == ["reference", "reference"]
    desk._proofs.add(jobs[0].config["learning"], measured("one process", 2.0), "000")
    third = desk.next(4)
    assert isinstance(third, Job)
    assert third.config["run"]["proof"] == "steps"


def test_a_trial_that_differs_is_kept_off_the_frontier(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever has micro batches of 8 divides by one target too many; it would be the fastest."""
    right = NativeEngine.step

    def wrong(self: Any, batches: Any, targets: int, meter: Any) -> Any:
        return right(self, batches, targets + (self._setting.system.micro_batch_size == 8), meter)

    monkeypatch.setattr(NativeEngine, "step", wrong)
    overrides = {
        "system.micro_batch_size": ["8", "2"],
        "budget.trials": "2",
        "target_eval_loss": "6.0",
        "proof": "reference",
    }
    spec = space.load("lora_small", {**TINY, **overrides, "runs_dir": str(tmp_path / "runs")})
    report = run_sweep(spec, SilentScreen())
    verdicts = {o.config["micro_batch_size"]: o.parity.verdict for o in report.outcomes if o.parity is not None}
    assert verdicts == {8: "SEMANTICS_DIFFER", 2: "EQUAL"}
    by_id = {o.trial_id: o.config["micro_batch_size"] for o in report.outcomes}
    assert {by_id[trial] for point in report.frontier.points for trial in point.trial_ids} == {2}
    assert any("SEMANTICS_DIFFER, and is kept off the frontier" in w for w in report.warnings)
