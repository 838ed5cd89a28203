"""What binds a trial and what to change, on outcomes made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sweeps.advice import Advice, advise
from sweeps.outcome import TrialOutcome
from sweeps.scaling import scaling
from trainers.result import GIB, Accounts, PhaseMemory, RankMemory, TrialResult
from trainers.split import PARTS

DDP = {
    "strategy": "ddp", "adapter": "full", "num_workers": 2, "micro_batch_size": 4, "activation_checkpointing": "none",
    "gradient_accumulation_steps": 2,
}  # fmt: skip


def trial(
    number: int, accounts: Accounts | None = None, status: str = "COMPLETED", phase: str | None = None, **more: Any
) -> TrialOutcome:
    """A trial whose peak is `accounts`; `more`: figures, and `config` with what differs from DDP."""
    config = {**DDP, **more.pop("config", {})}
    result = None
    figures = dict(more)
    if accounts is not None:
        peak = PhaseMemory((RankMemory(accounts.total, accounts.total, accounts),))
        figures["peak_memory_gib"] = accounts.total / GIB
        result = TrialResult("budget", (), (), (), {"backward": peak}, 0, (), {}, 2, {}).to_json()
    return TrialOutcome(
        sweep_id="s", trial_id=f"{number:03d}", candidate_id=str(number), status=status, phase=phase, started_at=0,  # type: ignore[arg-type]
        ended_at=1, num_workers=config["num_workers"], config=config, metrics=figures, result=result,
    )  # fmt: skip


def gib(**accounts: float) -> Accounts:
    return Accounts(**{name: int(value * GIB) for name, value in accounts.items()})


def parts(**shares: float) -> dict[str, float]:
    return {f"{part}_share": shares.get(part, 0.0) for part in PARTS}


def first(found: list[Advice], trial_id: str, figure: str) -> Advice:
    return next(a for a in found if a.trial_id == trial_id and a.figure == figure)


def test_activations_bind_and_half_the_batch_halves_them_which_came_true() -> None:
    before = trial(0, gib(weights=2, activations=6, temporary=2))
    after = trial(
        1,
        gib(weights=2, activations=3, temporary=1.2),
        config={"micro_batch_size": 2},
    )
    advice = first(advise([before, after], None), "000", "peak_memory_gib")
    assert advice.binds == "activations in backward (60% of the peak)"
    assert advice.change == {"micro_batch_size": 2}
    assert advice.expected == pytest.approx(6.0)
    assert advice.verdict == "trial 001: 10 → 6.2, came true"


def test_a_change_that_brings_less_says_so() -> None:
    before = trial(0, gib(weights=2, activations=6, temporary=2))
    for peak, said in ((9.0, "helped, by less or more than expected"), (10.5, "did not help")):
        after = trial(1, gib(activations=peak), config={"micro_batch_size": 2})
        verdict = first(advise([before, after], None), "000", "peak_memory_gib").verdict
        assert verdict == f"trial 001: 10 → {peak:.4g}, {said}"


def test_the_state_binds_and_is_sharded() -> None:
    before = trial(0, gib(weights=2, gradients=2, optimizer_state=4, activations=1))
    advice = first(advise([before], None), "000", "peak_memory_gib")
    assert advice.change == {"strategy": "fsdp2"}
    assert advice.expected == pytest.approx(5.0)  # 8 over two ranks, and 1
    sharded = trial(1, gib(weights=1, gradients=1, optimizer_state=2, activations=1), config={"strategy": "fsdp2"})
    advice = first(advise([sharded], None), "001", "peak_memory_gib")
    assert advice.change == {"adapter": "lora"}
    assert advice.expected == pytest.approx(1 + 1 + 0.05 * 3)


@pytest.mark.parametrize(
    ("phase", "change"),
    [
        ("first_optimizer_step", {"adapter": "lora"}),
        ("load", {"strategy": "fsdp2"}),
        ("backward", {"micro_batch_size": 2}),
    ],
)
def test_after_an_oom_the_phase_tells(phase: str, change: dict[str, Any]) -> None:
    (advice,) = advise([trial(0, status="OOM", phase=phase)], None)
    assert advice.binds == f"out of memory in {phase.replace('_', ' ')}"
    assert advice.change == change
    fits = trial(1, gib(weights=1), config=change)
    found = first(advise([trial(0, status="OOM", phase=phase), fits], None), "000", "peak_memory_gib")
    assert found.verdict == "trial 001: fits, came true"


def test_waiting_for_others_binds() -> None:
    slow = trial(0, target_tokens_per_second=1000.0, **parts(forward=0.3, backward=0.4, collective=0.25, other=0.05))
    advice = first(advise([slow], None), "000", "target_tokens_per_second")
    assert advice.binds == "collectives (25% of the step)"
    assert advice.change == {"micro_batch_size": 8}
    assert advice.expected == pytest.approx(1000 / 0.75)


def test_a_step_that_only_computes() -> None:
    busy = trial(0, target_tokens_per_second=1000.0, mfu=0.45, **parts(forward=0.3, backward=0.7))
    assert first(advise([busy], None), "000", "target_tokens_per_second").binds == "computation (mfu 45%)"


def test_scaling_worked_by_hand() -> None:
    """1,000 → 2,800 target tokens/s on 4 GPUs: 2.8 times, 70 %, 1.43 times the GPU time."""
    one = trial(0, gib(weights=1), target_tokens_per_second=1000.0, config={"num_workers": 1})
    four = trial(
        1, gib(weights=1), target_tokens_per_second=2800.0, config={"num_workers": 4, "gradient_accumulation_steps": 1}
    )
    other = trial(2, gib(weights=1), target_tokens_per_second=500.0, config={"num_workers": 4, "micro_batch_size": 1})
    (group,) = scaling([one, four, other])
    least, most = group.points
    assert (least.speedup, least.efficiency, least.gpu_time_ratio) == (1, 1, 1)
    assert (most.trial_id, most.num_workers) == ("001", 4)
    assert most.speedup == pytest.approx(2.8)
    assert most.efficiency == pytest.approx(0.7)
    assert most.gpu_time_ratio == pytest.approx(1.43, abs=0.005)


BUSY = parts(forward=0.3, backward=0.7)


def test_what_the_sweep_has_refuted_is_told_and_the_next_way_follows() -> None:
    before = trial(0, gib(weights=2, activations=6))
    worse = trial(1, gib(weights=2, activations=7), config={"micro_batch_size": 2})
    found = [a for a in advise([before, worse], None) if a.trial_id == "000" and a.figure == "peak_memory_gib"]
    assert [(a.change, a.refuted) for a in found] == [
        ({"micro_batch_size": 2}, True),
        ({"activation_checkpointing": "full"}, False),
    ]


def test_a_larger_batch_that_did_not_fit_is_refuted_whatever_the_learning_rate() -> None:
    before = trial(0, gib(weights=2), target_tokens_per_second=1000.0, config={"learning_rate": 1e-3}, **BUSY)
    does_not_fit = trial(1, status="OOM", phase="backward", config={"micro_batch_size": 8, "learning_rate": 1e-4})
    advice = first(advise([before, does_not_fit], None), "000", "target_tokens_per_second")
    assert (advice.verdict, advice.refuted) == ("trial 001: OOM", True)


def test_what_may_not_run_is_not_advised() -> None:
    before = trial(0, gib(weights=2, activations=6), target_tokens_per_second=1000.0, **BUSY)
    found = advise([before], None, legal=lambda config: config["micro_batch_size"] == 4)
    assert [a.change for a in found] == [{"activation_checkpointing": "full"}]


def test_what_is_no_more_than_the_drift_of_the_machine_is_no_success() -> None:
    before = trial(0, gib(weights=2), target_tokens_per_second=1000.0, **BUSY)
    after = trial(1, gib(weights=2), target_tokens_per_second=1100.0, config={"micro_batch_size": 8}, **BUSY)
    again = trial(2, gib(weights=2), target_tokens_per_second=900.0, **BUSY).model_copy(update={"repeats": "001"})
    verdict = first(advise([before, after, again], None), "000", "target_tokens_per_second").verdict
    assert verdict == "trial 001: 1000 → 1100, no more than the noise (± 18%)"  # 1100 was 900 when it was timed again


def test_what_is_expected_is_the_ledgers_proportion_of_what_was_measured() -> None:
    """The ledger says 20 for the batch of 4 and 12 for that of 2; 8 GiB were measured: 4.8."""
    before = trial(0, gib(weights=2, activations=6))
    said = {4: 20.0, 2: 12.0, 1: 7.0}
    found = advise([before], None, ledger=lambda config: gib(weights=said[config["micro_batch_size"]]))
    assert first(found, "000", "peak_memory_gib").expected == pytest.approx(4.8)


def test_after_an_oom_the_ledger_says_what_the_change_would_take() -> None:
    ran = trial(0, gib(weights=1), config={"micro_batch_size": 1})
    died = trial(1, status="OOM", phase="backward")
    found = advise([ran, died], None, ledger=lambda _: gib(weights=3.0))
    assert first(found, "001", "peak_memory_gib").expected == pytest.approx(3.0)
