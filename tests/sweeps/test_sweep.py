"""Whole sweeps in this process: the target, endings, resuming, what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sweeps import space
from sweeps.desk import derived_target, drift, repeats_itself
from sweeps.forecast import BOUND
from sweeps.journal import Journal
from sweeps.outcome import TrialOutcome
from sweeps.predict import STEP, SUM
from sweeps.spec import SweepSpec
from sweeps.sweep import Report, run_sweep, simplicity, warnings
from tests.sweeps.factories import ONE_WAY
from tests.sweeps.silent import SilentScreen
from trainers.errors import UserError
from trainers.result import Evaluation, TrialResult

TINY = {
    **ONE_WAY,
    "launcher": "inline",
    "system.num_workers": "1",
    "system.micro_batch_size": "8",
    "budget.tokens_per_trial": "4000",
    "eval_every_tokens": "1500",
    "eval_fraction": "0.02",
    "learning.learning_rate": ["1e-2", "3e-3"],
}


def spec_for(folder: Path, **overrides: object) -> SweepSpec:
    given = {**TINY, "runs_dir": str(folder / "runs"), **{k.replace("__", "."): v for k, v in overrides.items()}}
    return space.load("lora_small", given)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory, module_store: str) -> tuple[Report, SilentScreen]:
    """A sweep of two trials without a target."""
    screen = SilentScreen()
    return run_sweep(spec_for(tmp_path_factory.mktemp("swept"), target_eval_loss=None), screen), screen


def test_the_first_trial_sets_the_target(swept: tuple[Report, SilentScreen]) -> None:
    report, screen = swept
    first, second = report.outcomes
    assert first.measured is not None
    assert report.target == derived_target(first.measured)
    assert any("derived from trial 000" in note for note in screen.notes)
    # the reference trains its whole budget; the other stops at the target, or says that it was not reached
    assert first.metrics["consumed_tokens"] >= 4000
    assert first.metrics["cost_per_quality_usd"] > 0
    assert second.reason_kind in (None, "budget")
    assert ("cost_per_quality_usd" in second.metrics) == (second.reason_kind is None)


def test_a_trial_is_beside_what_was_predicted_of_it(swept: tuple[Report, SilentScreen]) -> None:
    """Before it ran, and from the data alone: the batch that it rehearsed, so that the ledger's bound holds."""
    for outcome in swept[0].outcomes:
        measured = outcome.metrics["peak_memory_allocated_gib"]
        assert outcome.metrics[SUM] == pytest.approx(measured, rel=BOUND)
        assert outcome.metrics[STEP] > 0


def test_what_a_sweep_leaves(swept: tuple[Report, SilentScreen]) -> None:
    report, _ = swept
    lines = [json.loads(line) for line in (report.folder / "trials.jsonl").read_text().splitlines()]
    assert [line["trial_id"] for line in lines] == ["000", "001"]
    assert all(line["schema"] == 2 for line in lines)
    front = json.loads((report.folder / "frontier.json").read_text())
    assert front["schema"] == 1
    assert {o["name"]: o["direction"] for o in front["objectives"]} == {
        "peak_memory_gib": "minimize",
        "cost_per_quality_usd": "minimize",
        "target_tokens_per_second": "maximize",
    }
    assert front["points"][0]["config"]["gradient_accumulation_steps"] == 2
    states = [json.loads(line)["state"] for line in (report.folder / "candidates.jsonl").read_text().splitlines()]
    assert states == ["COMPLETED", "COMPLETED"]
    again = SweepSpec.model_validate(Journal(report.folder).spec_tree())
    assert again == report.spec


def test_both_trials_consumed_the_same_samples(swept: tuple[Report, SilentScreen]) -> None:
    first, second = (m for o in swept[0].outcomes if (m := o.measured) is not None)
    shared = min(len(first.fingerprints), len(second.fingerprints))
    assert shared >= 1
    assert first.fingerprints[:shared] == second.fingerprints[:shared]


def test_a_sweep_in_which_all_fail_alike_stops_and_says_why(store: str, tmp_path: Path) -> None:
    """A model folder whose weights are cut off passes every check before the launch, and fails in each trial."""
    from trainers.embedded import model as embedded

    folder = tmp_path / "broken"
    embedded.config().save_pretrained(folder)
    embedded.tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"\x00" * 100)
    rates = ["1e-3", "2e-3", "3e-3", "4e-3", "5e-3"]
    spec = spec_for(tmp_path, model=str(folder), learning__learning_rate=rates, target_eval_loss="6.0")
    report = run_sweep(spec, SilentScreen())
    assert [o.status for o in report.outcomes] == ["FAILED"] * 3
    assert report.ended == "failing"
    assert "failed alike" in report.why
    assert {o.phase for o in report.outcomes} == {"load"}
    assert all(o.traceback and o.reason for o in report.outcomes)
    assert not any(o.metrics for o in report.outcomes)
    assert report.frontier.points == ()


def test_a_target_that_the_base_meets_ends_the_sweep(store: str, tmp_path: Path) -> None:
    report = run_sweep(spec_for(tmp_path, target_eval_loss="9.0"), SilentScreen())
    (outcome,) = report.outcomes
    assert outcome.status == "COMPLETED"
    assert "meets the target 9.0: nothing was trained" in outcome.reason
    assert "already meets target_eval_loss" in report.why
    assert report.untried == 1


def test_a_budget_that_is_spent_is_the_reason_again_when_resumed(store: str, tmp_path: Path) -> None:
    spec = spec_for(tmp_path, budget__trials="1", target_eval_loss="6.0", budget__tokens_per_trial="1500")
    first = run_sweep(spec, SilentScreen())
    again = run_sweep(spec, SilentScreen(), Journal.find(first.sweep_id, tmp_path / "runs").open())
    assert again.why == first.why == "budget.trials=1 is spent"
    assert len(again.outcomes) == 1


def test_minutes_that_are_over_cut_a_trial_short_and_a_resume_runs_it_again(store: str, tmp_path: Path) -> None:
    spec = spec_for(tmp_path, target_eval_loss="0.5", budget__minutes="0.0001", learning__learning_rate="1e-2")
    first = run_sweep(spec, SilentScreen())
    (cut,) = first.outcomes
    assert (cut.status, cut.reason_kind, cut.attempt) == ("STOPPED", "budget", 1)
    assert (first.ended, first.untried) == ("budget", 1)
    longer = spec.model_copy(update={"budget": spec.budget.model_copy(update={"minutes": None})})
    again = run_sweep(longer, SilentScreen(), Journal.find(first.sweep_id, tmp_path / "runs").open())
    (whole,) = again.outcomes  # the last attempt of each trial
    assert (whole.status, whole.trial_id, whole.attempt) == ("COMPLETED", cut.trial_id, 2)
    assert (again.ended, again.untried) == ("complete", 0)
    runs = mlflow_runs(store, first.folder)
    assert sorted((r.data.tags["trial.attempt"], r.info.status) for r in runs if "trial.attempt" in r.data.tags) == [
        ("1", "FINISHED"),
        ("2", "FINISHED"),
    ]


def mlflow_runs(store: str, folder: Path) -> list[Any]:
    import mlflow

    sweep_id = (folder / "mlflow_id").read_text().strip()  # the store holds sweeps of other tests

    client = mlflow.MlflowClient(store)
    experiment = client.get_experiment_by_name("lora_small")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id], f"tags.sweep.id = '{sweep_id}'"))


def test_a_fault_of_our_own_is_concluded_and_raised(store: str, tmp_path: Path) -> None:
    """What was measured stays: frontier, candidates and an ended run in MLflow."""

    class Breaking(SilentScreen):
        def ended(self, outcome: TrialOutcome) -> None:
            raise ZeroDivisionError("a fault in the sweep itself")

    with pytest.raises(ZeroDivisionError):
        run_sweep(spec_for(tmp_path, target_eval_loss="6.0", budget__tokens_per_trial="1500"), Breaking())
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(json.loads((folder / "frontier.json").read_text())["points"]) == 1
    states = [json.loads(line)["state"] for line in (folder / "candidates.jsonl").read_text().splitlines()]
    assert sorted(states) == ["COMPLETED", "untried"]
    runs = mlflow_runs(store, folder)
    assert {r.data.tags["sweep.role"]: r.info.status for r in runs} == {"sweep": "FAILED", "trial": "FINISHED"}


def test_a_ray_that_does_not_start_leaves_nothing(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def fails(*_: object, **__: object) -> None:
        raise Exception("no port is free")  # as Ray does

    monkeypatch.setattr(ray, "init", fails)
    with pytest.raises(UserError, match="cannot start Ray on this machine: no port is free"):
        run_sweep(spec_for(tmp_path, launcher="ray"), SilentScreen())
    assert not (tmp_path / "runs").exists()


def test_faults_of_space_and_data_are_told_at_once(tmp_path: Path) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text('{"prompt": "a"}\n')
    spec = spec_for(tmp_path, data=str(data), system__num_workers="3")
    with pytest.raises(UserError) as raised:
        run_sweep(spec, SilentScreen())
    said = "\n".join(raised.value.faults)
    assert "no candidate of this space is legal" in said
    assert "bad.jsonl" in said


def test_of_equal_points_the_simplest_comes_first(swept: tuple[Report, SilentScreen]) -> None:
    outcome = swept[0].outcomes[0]
    configs: list[dict[str, Any]] = [{"tp": 2}, {"tp": 1}, {"tp": None, "pp": 2, "cp": 2}, {}]
    made = [
        outcome.model_copy(update={"trial_id": f"00{i}", "config": config, "num_workers": 4 - i})
        for i, config in enumerate(configs)
    ]
    assert [o.trial_id for o in sorted(made, key=simplicity)] == ["003", "001", "000", "002"]


def test_real_model_folder(store: str, tmp_path: Path) -> None:
    """A Hugging Face folder, full fine-tuning and plain prompt/completion data of one's own."""
    import torch

    from trainers.embedded import model as embedded
    from trainers.embedded import task

    folder = tmp_path / "my model"
    embedded.load(torch.float32, "sdpa").save_pretrained(folder)
    embedded.tokenizer().save_pretrained(folder)
    data = tmp_path / "my data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in task.rows()[:60]))
    spec = spec_for(
        tmp_path, model=str(folder), data=str(data), learning__adapter="full", learning__learning_rate="1e-3",
        budget__tokens_per_trial="2000",
    )  # fmt: skip
    report = run_sweep(spec, SilentScreen())
    (outcome,) = report.outcomes
    assert outcome.status == "COMPLETED"
    assert outcome.metrics["eval_loss"] < outcome.metrics["eval_loss_start"]
    assert "lora_rank" not in outcome.config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"system.num_workers": "2"}, "launcher=inline runs in this one process"),
        ({"learning.seq_len": "8192"}, "longer than the model's 4096 positions"),
        ({"system.micro_batch_size": "5"}, "global_batch_size=16 is not divisible by micro_batch_size=5"),
        ({"system.attn_implementation": "flash_attention_2"}, "needs CUDA"),
    ],
)
def test_a_space_without_a_legal_candidate(tmp_path: Path, overrides: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match="no candidate of this space is legal") as raised:
        run_sweep(space.load("lora_small", {**TINY, "runs_dir": str(tmp_path / "runs"), **overrides}), SilentScreen())
    assert message in str(raised.value)
    assert not (tmp_path / "runs").exists()


def result(losses: list[tuple[int, float]], **changes: Any) -> TrialResult:
    evaluations = tuple(Evaluation(i, tokens, loss, 0.5) for i, (tokens, loss) in enumerate(losses))
    known: dict[str, Any] = {
        "stop_reason": "budget", "updates": (), "evaluations": evaluations, "saves": (), "memory": {},
        "host_peak_bytes": 0, "fingerprints": (), "seconds": {}, "num_workers": 1, "effective_config": {},
    }  # fmt: skip
    return TrialResult(**{**known, **changes})


def test_derived_target_by_hand() -> None:
    # half of 400 tokens is 200, midway between 100 (4.0) and 300 (2.0)
    assert derived_target(result([(0, 5.0), (100, 4.0), (300, 2.0), (400, 1.9)])) == pytest.approx(3.0)
    assert derived_target(result([(0, 5.0), (100, 5.5), (200, 6.0)])) is None  # nothing was learned
    assert derived_target(result([(0, 5.0)])) is None


def outcome(trial_id: str, **changes: Any) -> TrialOutcome:
    known: dict[str, Any] = {
        "sweep_id": "s", "trial_id": trial_id, "candidate_id": trial_id, "status": "FAILED", "started_at": 0.0,
        "ended_at": 1.0, "num_workers": 1, "config": {}, "reason_kind": "crash", "reason": "no such layer",
        "phase": "load",
    }  # fmt: skip
    return TrialOutcome(**{**known, **changes})


def test_repeats_itself() -> None:
    failed = [outcome(f"00{i}") for i in range(3)]
    assert repeats_itself(failed)
    assert not repeats_itself(failed[:2])
    assert not repeats_itself([*failed[:2], outcome("002", reason="another")])
    assert not repeats_itself([outcome("009", status="COMPLETED", reason_kind=None, reason=""), *failed])
    oom = {"status": "OOM", "reason_kind": "device_oom"}
    assert not repeats_itself([outcome(f"00{i}", **oom) for i in range(3)])  # a result, not a mistake


def test_drift_names_what_differs() -> None:
    given = {"learning": {"learning_rate": 0.01}, "system": {"micro_batch_size": 4}}
    from trainers.config import TrialConfig, from_tree, to_tree

    ran = to_tree(from_tree(TrialConfig, given))
    assert drift(given, ran) == ""
    ran["learning"] = {**ran["learning"], "learning_rate": 0.0002}
    assert "learning" in drift(given, ran)
    assert "0.0002" in drift(given, ran)


def test_trials_that_should_differ_and_do_not_are_pointed_out() -> None:
    same = {"status": "COMPLETED", "reason_kind": None, "reason": "", "metrics": {"train_loss": 1.25, "eval_loss": 1.5}}
    a = outcome("000", trial_config={"learning": {"learning_rate": 1e-5}}, **same)
    b = outcome("001", trial_config={"learning": {"learning_rate": 1e-2}}, **same)
    c = outcome("002", trial_config={"learning": {"learning_rate": 1e-5}}, **same)
    assert any("000 and 001" in w for w in warnings([a, b], 0.03))
    assert warnings([a, c], 0.03) == []
    d = outcome("003", trial_config={"learning": {"learning_rate": 1e-5, "seq_len": 64}}, **same)
    assert warnings([a, d], 0.03) == []  # rows that are shorter than both lengths
    # After one update alone the training losses are those of the base, and say nothing.
    one = [t.model_copy(update={"metrics": {"train_loss": 1.25, "eval_loss": e}}) for t, e in ((a, 1.5), (b, 1.4))]
    assert warnings(one, 0.03) == []


def test_the_store_is_checked_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9"):
        run_sweep(spec_for(tmp_path), SilentScreen())
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_written(store: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spec = spec_for(tmp_path).model_copy(update={"runs_dir": str(tmp_path / "file" / "runs")})
    with pytest.raises(UserError, match="cannot write to"):
        run_sweep(spec, SilentScreen())
