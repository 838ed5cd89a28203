"""Seconds of a trial outside training, beside the same trials in a plain Tune + TorchTrainer script (plain_tune.py).

Run:    python benchmarks/startup.py            # five minutes on 2 cores
        python benchmarks/startup.py --trials 4 --workers 2
Reads:  both train the same configurations of the embedded model, one after another, with the same number of ranks, the
        same environment and the same job; from when the first trial is handed out to when the last one has ended, Ray
        itself started before. What is not training, evaluating or saving: processes, imports, process group, model,
        rehearsal, polling. The last line is JSON: ratio, seconds_per_trial, plain_seconds_per_trial.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.plain_tune import busy
from sweeps import space
from sweeps.candidates import Cluster, Context, enumerate_candidates, trial_tree
from sweeps.launch import RAY_ENVIRONMENT

ROOT = Path(__file__).resolve().parent.parent


def arguments(trials: int, workers: int) -> dict[str, Any]:
    """Return a space of so many learning rates, and all else as it is."""
    return {
        "learning.learning_rate": [0.003 + 0.0005 * n for n in range(trials)], "system.strategy": "ddp",
        "system.num_workers": workers, "system.micro_batch_size": 4, "system.activation_checkpointing": "none",
        "searcher": "grid", "proof": "none", "measure_seconds": 0, "remeasure_every": 0, "budget.trials": None,
        "budget.tokens_per_trial": 12000, "eval_every_tokens": 12000, "target_eval_loss": 0.1,
    }  # fmt: skip


def ours(trials: int, workers: int, folder: Path, environment: dict[str, str]) -> tuple[float, float]:
    """Run the sweep; return the seconds from the first trial's start to the last one's end, and those at work."""
    words = [f"{key}={json.dumps(value)}" for key, value in arguments(trials, workers).items()]
    command = [
        sys.executable,
        str(ROOT / "sweeps" / "run.py"),
        "space=lora_small",
        *words,
        f"runs_dir={folder / 'runs'}",
    ]
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    (journal,) = (folder / "runs").glob("*/trials.jsonl")
    outcomes = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    assert len(outcomes) == trials
    seconds = max(o["ended_at"] for o in outcomes) - min(o["started_at"] for o in outcomes)
    return seconds, sum(busy(o["result"]) for o in outcomes)


def plain(trials: int, workers: int, folder: Path, environment: dict[str, str]) -> tuple[float, float]:
    """Run the same trials in the plain script."""
    spec = space.load("lora_small", arguments(trials, workers))
    candidates = enumerate_candidates(spec, Context(Cluster("cpu", workers, ""), None, None, "ray"))
    jobs = [trial_tree(spec, candidate, "cpu", spec.target_eval_loss) for candidate in candidates]
    told = {"jobs": jobs, "workers": workers, "storage": str(folder / "ray"), "environment": {"OMP_NUM_THREADS": "1"}}
    told["environment"] |= {**RAY_ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    path = folder / "jobs.json"
    path.write_text(json.dumps(told), encoding="utf-8")
    command = [sys.executable, str(ROOT / "benchmarks" / "plain_tune.py"), str(path)]
    done = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return found["seconds"], found["training"]


def main() -> int:
    parser = argparse.ArgumentParser(description="seconds of a trial outside training, beside a plain script")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    environment = {**os.environ, **RAY_ENVIRONMENT, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    outside = {}
    for name, run in (("ours", ours), ("plain", plain)):
        with tempfile.TemporaryDirectory(prefix="startup-") as folder:
            seconds, training = run(chosen.trials, chosen.workers, Path(folder), environment)
        outside[name] = (seconds - training) / chosen.trials
        print(f"{name:6} {chosen.trials} trials of {chosen.workers} workers: {seconds:.1f} s, {training:.1f} s of them "
              f"at work; {outside[name]:.2f} s a trial outside", flush=True)  # fmt: skip
    print(json.dumps({
        "ratio": outside["ours"] / outside["plain"], "seconds_per_trial": outside["ours"],
        "plain_seconds_per_trial": outside["plain"],
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
