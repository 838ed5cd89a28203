"""The peer of startup.py: trials as Ray's documentation has them, a Tuner over functions that fit a TorchTrainer.

In its fastest form: actors reused, no report queue, quick polling (the environment that startup.py sets for both).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)


def loop(config: Mapping[str, Any]) -> dict[str, Any]:
    """Train one trial on one rank: the same job as in a sweep."""
    import ray
    import torch

    from trainers.config import TrialConfig, from_tree
    from trainers.job import run_rank
    from trainers.ranks import current

    torch.set_num_threads(1)
    typed = from_tree(TrialConfig, config["job"])
    return run_rank(typed, ray.get(config["data"]), current("cpu")).to_json()


def busy(result: Mapping[str, Any]) -> float:
    """Return the seconds of a trial's updates, evaluations and saves."""
    found = sum(update["step_time_s"] for update in result["updates"])
    return float(found + sum(event["seconds"] for event in (*result["evaluations"], *result["saves"])))


def main(path: str) -> int:
    """Run the jobs of a JSON file one after another; print a line of JSON: seconds in all, and of training."""
    import ray
    from ray import tune
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from trainers import model
    from trainers.config import TrialConfig, from_tree
    from trainers.prepare import prepare

    told = json.loads(Path(path).read_text(encoding="utf-8"))
    jobs, workers, storage = told["jobs"], told["workers"], told["storage"]
    config = from_tree(TrialConfig, jobs[0])
    data = prepare(config, model.tokenizer(config.model))[config.learning.seq_len]
    ray.init("local", include_dashboard=False, num_cpus=workers, log_to_driver=False,
             runtime_env={"env_vars": told["environment"]})  # fmt: skip
    stored = ray.put(data)

    def trial(chosen: Mapping[str, Any]) -> None:
        trainer = TorchTrainer(
            loop,
            train_loop_config={"job": jobs[chosen["n"]], "data": stored},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(name=f"trial-{chosen['n']}-{time.time_ns()}", storage_path=storage,
                                 failure_config=FailureConfig(max_failures=0)),
        )  # fmt: skip
        result = trainer.fit().return_value
        tune.report({"training": busy(result)})

    start = time.time()
    found = tune.Tuner(
        tune.with_resources(trial, {"node:__internal_head__": 0.001}),
        param_space={"n": tune.grid_search(list(range(len(jobs))))},
        tune_config=tune.TuneConfig(max_concurrent_trials=1, reuse_actors=True),
        run_config=tune.RunConfig(name="plain", storage_path=storage, verbose=0),
    ).fit()
    seconds = time.time() - start
    training = sum(result.metrics["training"] for result in found)
    print(json.dumps({"seconds": seconds, "training": training}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
