"""Plans beyond the ledger: simulations and their memory, corrected times, more GPUs, host memory."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sweeps import run, space
from sweeps.candidates import setting_of
from sweeps.clusters import load_cluster
from sweeps.correction import measured
from sweeps.forecast import Prediction, on_host
from sweeps.journal import Journal
from sweeps.machines import machine_of
from sweeps.plan import make_plan
from sweeps.plan_printed import print_plan
from sweeps.plan_scaling import best_of_each, scaled
from sweeps.settling import settled
from sweeps.simulations import Simulations, key
from sweeps.workload import FullRows
from tests.sweeps.factories import make_outcome, make_result
from trainers import ledger, steptime
from trainers.errors import UserError
from trainers.ledger import MicroBatch
from trainers.result import GIB, Accounts, RankMemory, Speed
from trainers.shape import ModelShape
from trainers.task import Simulated, Task

ONE = {
    "cluster": "h100x8", "model": "Qwen/Qwen3-8B", "system.num_workers": [8], "system.strategy": ["fsdp2"],
    "system.offload": ["none"], "system.reshard_after_forward": [True], "system.micro_batch_size": [1],
    "system.activation_checkpointing": ["full"], "system.reduce_dtype": "float32",
}  # fmt: skip


def spec_of(folder: Path, **more: Any) -> Any:
    return space.load("full", {"plan": True, "runs_dir": str(folder), **ONE, **more})


class Told(Simulations):
    """Simulations whose outcomes are known."""

    def __init__(self, *outcomes: Simulated) -> None:
        super().__init__(Path("nowhere"), 1)
        self._outcomes = outcomes

    def run(self, tasks: Sequence[Task], done: Callable[[int, int], None] = lambda *_: None) -> list[Simulated]:
        return list(self._outcomes[: len(tasks)])


def peaks(allocated: float, reserved: float) -> dict[str, RankMemory]:
    accounts = Accounts(activations=round(allocated * GIB))
    return {"backward": RankMemory(accounts.total, round(reserved * GIB), accounts)}


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (peaks(60.0, 73.9), "FITS"),  # 73.9 · 1.05 + 1.5 = 79.1, all that an H100 has
        (peaks(60.0, 74.0), "AT_RISK"),  # what is reserved and not in use can be given back
        (peaks(81.6, 82.0), "AT_RISK"),  # 81.6 · 0.95 + 1.5 = 79.0
        (peaks(81.8, 82.0), "OOM"),
    ],
)
def test_a_simulation_settles_a_risk_by_what_is_reserved(outcome: Simulated, verdict: str, tmp_path: Path) -> None:
    """Few blocks tell no more than what is allocated: 31 % more may be reserved."""
    found = make_plan(spec_of(tmp_path))
    (risky,) = (dataclasses.replace(p, verdict="AT_RISK") for p in found.predictions)
    (settled_one,) = settled([risky], "at_risk", found.forecaster, Told(outcome), lambda *_: None)
    assert (settled_one.verdict, settled_one.by, settled_one.account) == (verdict, "simulation", "activations")
    assert settled([found.predictions[0]], "at_risk", found.forecaster, Told(), lambda *_: None)[0].by == "ledger"


def test_a_simulation_that_fails_leaves_the_ledgers_verdict_with_the_reason(tmp_path: Path) -> None:
    found = make_plan(spec_of(tmp_path))
    (one,) = settled(found.predictions, "all", found.forecaster, Told("no such thing"), lambda *_: None)
    assert one == dataclasses.replace(found.predictions[0], note="not simulated: no such thing")


def test_a_simulation_is_done_once(tmp_path: Path) -> None:
    """A plan of a tiny model, really simulated; the second time nothing is missing, and the same is said."""
    model = tmp_path / "model"
    model.mkdir()
    shape = ModelShape("tiny", "llama", 64, 128, 2, 4, 2, 16, 256, 512, True)
    (model / "config.json").write_text(json.dumps(shape.to_hf_config()))
    told: list[tuple[str, int, int]] = []
    tree = {"model": str(model), "learning.seq_len": 64, "simulate": "all"}
    first, again = (make_plan(spec_of(tmp_path, **tree), lambda *done: told.append(done)) for _ in range(2))
    what = "simulating 1 from few blocks, ranks done"
    assert told == [(what, 0, 1), (what, 1, 1)]
    assert [p.by for p in first.predictions] == ["simulation"]
    assert first.predictions == again.predictions
    # Within the ledger's bound, and at least the share of the state: 16 bytes a trained number over 8 ranks.
    (p,) = first.predictions
    state = p.accounts.weights + p.accounts.gradients + p.accounts.optimizer_state
    assert state >= 12 * shape.num_parameters / 8


def test_what_a_simulation_follows_from_is_its_key(tmp_path: Path) -> None:
    found = make_plan(spec_of(tmp_path))
    setting = setting_of(found.predictions[0].config, found.forecaster.context)
    assert setting is not None
    task = Task(found.shape, setting, MicroBatch(1, 64, 64), 0, whole=True)
    faster = dataclasses.replace(setting.learning, learning_rate=1.0)
    assert key(task) == key(dataclasses.replace(task, setting=dataclasses.replace(setting, learning=faster)))
    others = (
        dataclasses.replace(task, rank=1),
        dataclasses.replace(task, batch=MicroBatch(1, 64, 63)),
        dataclasses.replace(task, shape=dataclasses.replace(found.shape, num_hidden_layers=2)),
        dataclasses.replace(task, setting=dataclasses.replace(setting, device="cpu")),
    )
    assert len({key(task), *map(key, others)}) == 5


def speed(seconds: float, length: int, rows: int, peak: float | None = 8 * 9.894e14) -> Speed:
    return Speed(
        rounds=((seconds, seconds),), tokens=2 * rows * length, targets=2 * rows * length, slots=2 * rows * length,
        model_flops=1.0, hardware_flops=1.0, peak_flops=peak, precision=0.01, parts={}, profiled_step_s=seconds,
        busy_s=(seconds,), noisy_rounds=(), disturbances=(), timed_s=1.0, profiled_s=1.0,
    )  # fmt: skip


def test_measured_trials_correct_the_times_of_a_plan(tmp_path: Path) -> None:
    """Trials that took twice what was predicted: so will those that are only planned, and it is said."""
    spec = spec_of(tmp_path)
    before = make_plan(spec)
    config, context = before.predictions[0].config, before.forecaster.context
    setting = setting_of(config, context)
    assert setting is not None
    cluster = load_cluster("h100x8")
    predicted = steptime.predict(before.shape, setting, FullRows().of(setting).usual, machine_of(cluster)).total
    timed = speed(2 * predicted, setting.learning.seq_len, setting.learning.global_batch_size)
    journal = Journal.create(spec.model_copy(update={"plan": False}))
    journal.append(
        make_outcome(
            metrics={"step_time_s": 2 * predicted},
            config=dict(config),
            result=make_result(speed=timed, num_workers=8).to_json(),
        )
    )
    elsewhere = make_result(speed=dataclasses.replace(timed, peak_flops=1e11), num_workers=8)  # as on a CPU
    journal.append(
        make_outcome(metrics={"step_time_s": 99.0}, config=dict(config), result=elsewhere.to_json(), trial_id="002")
    )
    journal.append(make_outcome(trial_id="001", status="OOM", config=dict(config)))
    ((found, seconds),) = measured(journal.outcomes, context, machine_of(cluster))
    assert found.total == pytest.approx(predicted)
    assert seconds == pytest.approx(2 * predicted)
    journal.close()
    after = make_plan(spec_of(tmp_path, corrected_by="latest"))
    assert after.predictions[0].step_time_s == pytest.approx(2 * before.predictions[0].step_time_s)
    assert "compute × 2.00" in str(after.forecaster.correction)
    with pytest.raises(UserError, match="ran with cluster=h100x8, and teaches nothing of cluster=h200x8"):
        make_plan(spec_of(tmp_path, corrected_by="latest", cluster="h200x8"))
    with pytest.raises(UserError, match="corrected_by=none-such: no such sweep"):
        make_plan(spec_of(tmp_path, corrected_by="none-such"))


def test_more_gpus_share_the_window_and_then_ask_for_a_larger_one(tmp_path: Path) -> None:
    found = make_plan(spec_of(tmp_path, **{"learning.global_batch_size": [32]}))
    (steps,) = scaled(best_of_each(found.predictions), found.spec.model, found.forecaster)
    assert [s.num_workers for s in steps] == [8 * 2**i for i in range(10)]  # to 4,096
    assert [s.global_batch_size for s in steps] == [32, 32, 32, *(64 * 2**i for i in range(7))]
    memory = [s.prediction.point_gib for s in steps]
    assert memory == sorted(memory, reverse=True)
    rates = [s.efficiency for s in steps]
    assert rates[0] == 1.0
    assert rates[3:] == sorted(rates[3:], reverse=True)  # from where every GPU has one micro batch, and no more
    assert rates[-1] < 0.5


def test_host_memory_is_part_of_the_verdict(tmp_path: Path) -> None:
    """8.19e9 numbers trained: 8 ranks hold their optimizer state on the host, 8 bytes each, and 3 GiB themselves.

    Offloading all of FSDP2: weights, gradients, moments, 16 bytes, and the copy of what is trained, 4.
    """
    found = make_plan(spec_of(tmp_path))
    config = {**found.predictions[0].config, "offload": "parameters"}
    setting = setting_of(config, found.forecaster.context)
    assert setting is not None
    needed = 20 * found.shape.num_parameters / GIB + 8 * 3.0
    full, cluster = FullRows().of(setting).largest, found.forecaster.cluster
    assert on_host(found.shape, setting, full, cluster) == pytest.approx(needed, rel=1e-3)
    # Activations too: what all but one of 36 blocks keep, their input [2048, 4096] in bfloat16, of every rank.
    more = dataclasses.replace(setting, system=dataclasses.replace(setting.system, offload_activations=True))
    inputs = 8 * 35 * 2048 * 4096 * 2 / GIB
    assert setting.learning.seq_len == 2048
    assert on_host(found.shape, more, full, cluster) == pytest.approx(needed + inputs, rel=1e-3)
    small = found.forecaster.cluster.model_copy(update={"host_memory_gib": needed - 1})
    short = dataclasses.replace(found.forecaster, cluster=small).predict(config)
    assert isinstance(short, Prediction)
    assert (short.verdict, short.phase) == ("OOM", "host memory")


def test_two_vocabulary_tables_are_reduced_in_one_buffer(tmp_path: Path) -> None:
    """248,320 × 5,120 × 2 tables × 4 bytes = 9.47 GiB for a moment, as NeMo Automodel's PR 3708 found."""
    shape = ModelShape("wide", "qwen3", 5120, 13824, 2, 40, 8, 128, 248320, 4096, False, qk_norm=True)
    found = make_plan(spec_of(tmp_path))
    context = dataclasses.replace(found.forecaster.context, shape=shape)
    setting = setting_of({**found.predictions[0].config, "seq_len": 64}, context)
    assert setting is not None
    buffer = 248320 * 5120 * 2 * 4
    assert buffer / GIB == pytest.approx(9.47, abs=0.01)
    temporary = ledger.predict(shape, setting, MicroBatch(1, 64, 64))["backward"].temporary
    assert temporary >= buffer


def test_keys_of_a_plan_start_no_sweep(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["space=full", "solve=num_workers", "scaling=true", "corrected_by=latest", f"runs_dir={tmp_path}"]
    assert run.main(words) == run.EXIT_BAD_INPUT
    faults = capsys.readouterr().err.splitlines()
    assert [fault.split(":")[1].strip() for fault in faults] == [
        "solve=num_workers", "scaling=true", "corrected_by=latest"
    ]  # fmt: skip
    assert all("give plan=true, too" in fault for fault in faults)


@pytest.mark.parametrize("text", ['{"model_type":', "[]", '{"model_type": "llama", "hidden_size": "big"}'])
def test_a_model_folder_with_a_broken_config_is_told_in_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json|hidden_size|missing"):
        make_plan(spec_of(tmp_path, model=str(tmp_path)))


def test_where_every_candidate_is_pruned_the_rules_are_the_answer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no candidate is left to predict: num_workers=16: the cluster has 8 GPUs"):
        make_plan(spec_of(tmp_path, **{"system.num_workers": [16]}))


def test_the_settings_that_all_share_and_the_cluster_are_with_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    made = make_plan(spec_of(tmp_path))
    print_plan(made)
    printed = capsys.readouterr().out
    shared = next(line for line in printed.splitlines() if line.startswith("in all: fsdp2 "))
    assert {"workers=8", "micro=1", "recompute=full"} <= set(shared.split())
    assert "USD/1M tokens" in printed
    line = json.loads((made.folder / "predictions.jsonl").read_text().splitlines()[0])
    assert (line["model"], line["cluster"]) == ("Qwen/Qwen3-8B", "h100x8")


def test_a_plan_reckons_with_the_memory_that_may_be_used(tmp_path: Path) -> None:
    """What fits a device of 80 GB does not fit a tenth of it."""
    free, limited = (make_plan(spec_of(tmp_path, **more)) for more in ({}, {"memory_limit_gib": 2}))
    assert {p.verdict for p in free.predictions} == {"FITS"}
    assert {p.verdict for p in limited.predictions} == {"OOM"}
    assert limited.forecaster.capacity_gib == 2


def test_another_question_does_not_overwrite_the_answer_of_the_first(tmp_path: Path) -> None:
    first, other, again = (
        make_plan(spec_of(tmp_path, **more)).folder for more in ({}, {"solve": "micro_batch_size"}, {})
    )
    assert first == again != other
    assert other.name == f"{first.name}-2"
    assert all((folder / "predictions.jsonl").is_file() for folder in (first, other))


def test_a_space_that_is_wider_than_the_cluster_scales(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipeline over 8 GPUs, asked for on a cluster of 4: on as many nodes as it takes, up to 4,096."""
    words = [f"runs_dir={tmp_path}", "space=tensor_pipeline", "model=Qwen/Qwen3-8B", "cluster=l40sx4", "plan=true"]
    assert run.main([*words, "scaling=true"]) == 0
    told = capsys.readouterr().out
    assert "more than the 4 GPUs of the cluster" in told
    assert re.search(r"^ *4096 ", told, re.MULTILINE)


def test_all_faults_of_a_command_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["space=lora_smal", "cluster=h100x9", "learning.lr=1", "solve=num_workers"]
    assert run.main(words) == run.EXIT_BAD_INPUT
    told = capsys.readouterr().err
    for part in (
        "did you mean lora_small?", "did you mean h100x8?", "did you mean learning.learning_rate?", "give plan=true",
    ):  # fmt: skip
        assert part in told
    assert len(told.splitlines()) == 4


def test_a_plan_is_no_sweep(tmp_path: Path) -> None:
    make_plan(spec_of(tmp_path))
    with pytest.raises(UserError, match="no sweep"):
        Journal.find("latest", Path(spec_of(tmp_path).runs_dir))


def test_where_only_host_memory_is_short_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen3-8B in full on two GPUs of 24 GB: offloaded it would fit them, and not a node's 128 GiB."""
    words = ["space=full", "model=Qwen/Qwen3-8B", "cluster=rtx4090x2", "plan=true", f"runs_dir={tmp_path}"]
    assert run.main([*words, "system.micro_batch_size=[1]"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"Offloaded, some would fit the device, but need 1\d\d GiB of a node's 128 of host memory", told)
    assert "simulate=at_risk runs" not in told
