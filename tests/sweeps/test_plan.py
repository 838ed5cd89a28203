"""Plans: what is predicted for whole spaces, by whom it is asked, and that nothing is started for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sweeps import run, space
from sweeps.forecast import verdict
from sweeps.plan import Plan, make_plan
from sweeps.plan_printed import SHORT, row
from trainers.errors import UserError

ROOT = Path(__file__).parents[2]


def plan_of(folder: Path, name: str, **more: Any) -> Plan:
    return make_plan(space.load(name, {"plan": True, "runs_dir": str(folder), **more}))


def test_the_verdict_rests_on_the_bounds_of_the_ledger() -> None:
    """79.1 GiB, 1.5 outside: 67.4 · 1.15 + 1.5 = 79.0 fits; 91.4 · 0.85 + 1.5 = 79.2 does not; between is a risk."""
    assert verdict(67.4, 1.5, 79.1) == "FITS"
    assert verdict(68.0, 1.5, 79.1) == "AT_RISK"
    assert verdict(91.2, 1.5, 79.1) == "AT_RISK"
    assert verdict(91.4, 1.5, 79.1) == "OOM"


def test_eight_billion_parameters_in_full_do_not_fit_four_gpus_of_24_gib(tmp_path: Path) -> None:
    """8.03e9 · 16 bytes / 4 are 29.9 GiB a GPU of state alone, under any way to shard it."""
    more = {
        "model": "meta-llama/Llama-3.1-8B", "cluster": "a10gx4", "system.offload": ["none"], "system.num_workers": [4],
        "system.strategy": ["fsdp2", "zero"], "system.reduce_dtype": "float32",
    }  # fmt: skip
    plan = plan_of(tmp_path, "full", **more)
    assert plan.predictions
    assert {p.verdict for p in plan.predictions} == {"OOM"}
    sharded = min(plan.predictions, key=lambda p: p.point_gib)
    state = sharded.accounts.weights + sharded.accounts.gradients + sharded.accounts.optimizer_state
    assert state / 2**30 == pytest.approx(29.9, rel=0.03)


def test_a_small_model_fits_one_gpu(tmp_path: Path) -> None:
    """Qwen3-0.6B in full: 0.596e9 · 16 bytes are 8.9 GiB before activations."""
    plan = plan_of(tmp_path, "full", cluster="a10gx4", **{"system.num_workers": [1], "system.strategy": ["ddp"]})
    fits = [p for p in plan.predictions if p.verdict == "FITS"]
    assert fits
    assert all(p.point_gib > 8.9 for p in plan.predictions if p.config.get("offload") in (None, "none"))
    lines = (tmp_path / "full-plan-Qwen3-0.6B-a10gx4" / "predictions.jsonl").read_text().splitlines()
    assert len(lines) == len(plan.predictions)
    assert json.loads(lines[0])["verdict"] == plan.predictions[0].verdict


def test_the_largest_micro_batch_and_the_fewest_gpus(tmp_path: Path) -> None:
    base = {
        "model": "Qwen/Qwen3-8B", "cluster": "h100x8", "system.strategy": ["fsdp2"], "system.offload": ["none"],
        "system.activation_checkpointing": ["full"], "system.reshard_after_forward": [True],
        "learning.global_batch_size": 64,
    }  # fmt: skip
    (best,) = plan_of(tmp_path, "full", **base, solve="micro_batch_size", **{"system.num_workers": [8]}).predictions
    largest = best.config["micro_batch_size"]
    around = {"system.num_workers": [8], "system.micro_batch_size": [largest, 2 * largest]}
    verdicts = {
        p.config["micro_batch_size"]: p.verdict for p in plan_of(tmp_path, "full", **base, **around).predictions
    }
    assert best.verdict == verdicts[largest] == "FITS"
    assert verdicts.get(2 * largest) != "FITS"
    more = {"system.num_workers": [8], "system.micro_batch_size": [1]}
    (fewest,) = plan_of(tmp_path, "full", **base, solve="num_workers", **more).predictions
    assert fewest.verdict == "FITS"
    assert 2 <= fewest.config["num_workers"] <= 8  # 131 GB of state fit two GPUs of 79 GiB at the best


def test_trials_that_differ_in_the_learning_rate_alone_are_one(tmp_path: Path) -> None:
    more = {"system.num_workers": [1], "system.strategy": ["ddp"], "learning.learning_rate": [1e-5, 2e-5, 3e-5]}
    plan = plan_of(tmp_path, "full", cluster="h100x8", **more)
    assert len(plan.predictions) == 4 * 3  # micro batches × recomputation


def test_what_is_missing_is_said_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="plan=true needs cluster="):
        plan_of(tmp_path, "full")
    with pytest.raises(UserError, match=r"knows no such shape \(did you mean Qwen/Qwen3-8B\?\)"):
        plan_of(tmp_path, "full", cluster="h100x8", model="Qwen/Qwen3-8b")


def test_more_gpus_than_the_cluster_has_are_pruned(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "full", cluster="rtx4090x2", **{"system.num_workers": [2, 4]})
    assert {p.config["num_workers"] for p in plan.predictions} == {2}
    assert any("the cluster has 2 GPUs" in reason for c in plan.pruned for reason in c.reasons)


def test_the_command_prints_a_table_and_imports_no_torch_and_no_ray(tmp_path: Path) -> None:
    script = (
        "import sys; from sweeps import run; status = run.main(sys.argv[1:]);"
        "print('imported', [m for m in ('torch', 'ray', 'transformers', 'mlflow') if m in sys.modules]);"
        "sys.exit(status)"
    )
    words = ["space=full", "model=Qwen/Qwen3-8B", "cluster=h100x8", "plan=true", f"runs_dir={tmp_path}"]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "FITS" in done.stdout
    assert "imported []" in done.stdout
    assert (tmp_path / "full-plan-Qwen3-8B-h100x8" / "memory.png").stat().st_size > 10_000


def test_a_row_holds_the_accounts_in_gib(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "full", cluster="h100x8", **{"system.num_workers": [1], "system.strategy": ["ddp"]})
    p = plan.predictions[0]
    cells = [str(cell) for cell in row(p, ["strategy"], list(SHORT))]
    assert cells[5:10] == [f"{getattr(p.accounts, name) / 2**30:.1f}" for name in SHORT]


def test_a_plan_is_not_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["resume=latest", "plan=true"]) == run.EXIT_BAD_INPUT
    assert capsys.readouterr().err.startswith("error: ")
