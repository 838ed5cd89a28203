"""The same job without Ray: `torchrun --nproc-per-node N -m trainers.train config.yaml`, or plain `python -m`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainers import config as configs
from trainers import model, ranks
from trainers.config import TrialConfig
from trainers.diagnose import WorkerFault
from trainers.errors import UserError
from trainers.job import run_rank
from trainers.loop import Hooks
from trainers.prepare import locate_data, prepare
from trainers.ranks import World
from trainers.strategies import STRATEGIES, Setting, illegal
from trainers.timing import summarize

USAGE = "usage: python -m trainers.train CONFIG.yaml   (or: torchrun --nproc-per-node N -m trainers.train CONFIG.yaml)"


def main(argv: list[str]) -> int:
    """Run a config file's job; return the exit status: 0 done, 1 failed, 2 bad input."""
    if len(argv) != 1 or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    try:
        config = resolve(configs.load(Path(argv[0])))
        with ranks.joined(config.run.device) as world:
            run(config, world)
        return 0
    except UserError as error:
        return refuse(error)
    except WorkerFault as error:
        if isinstance(error.__cause__, UserError):
            return refuse(error.__cause__)
        print(f"failed: {error.fault.kind}: {error}", file=sys.stderr)
        return 1


def refuse(error: UserError) -> int:
    """Print the faults of bad input, on rank 0 only; return the exit status."""
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(f"error: {fault}" for fault in error.faults), file=sys.stderr)
    return 2


def resolve(config: TrialConfig) -> TrialConfig:
    """Check what can be checked before anything starts, and make paths absolute."""
    ranks_started = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks_started != config.system.num_workers:
        raise UserError(
            f"the config is for system.num_workers={config.system.num_workers}, but {ranks_started} "
            f"process(es) were started; use torchrun --nproc-per-node {config.system.num_workers}"
        )
    try:
        plan = STRATEGIES[config.system.strategy].plan(config.system)
        plan.accumulation(config.learning.global_batch_size, config.system.micro_batch_size)
    except ValueError as error:
        raise UserError(str(error)) from None
    out = str(Path(config.run.output_dir).expanduser().resolve()) if config.run.output_dir else None
    eval_data = locate_data(config.eval_data) if config.eval_data else None
    device = ranks.resolve_device(config.run.device)
    located = model.locate(config.model)
    shape = model.shape(located, config.model_revision)
    if rules := illegal(Setting(config.learning, config.system, plan, shape, device)):
        raise UserError(rules)
    return dataclasses.replace(
        config,
        model=located,
        data=locate_data(config.data),
        eval_data=eval_data,
        run=dataclasses.replace(config.run, output_dir=out, device=device),
    )


def run(config: TrialConfig, world: World) -> None:
    """Prepare data on rank 0, train on all, print and write the result on rank 0."""
    prepared = world.broadcast(lambda: prepare(config, model.tokenizer(config.model, config.model_revision)))
    tokens = prepared[config.learning.seq_len]
    if world.rank == 0:
        print("\n".join(tokens.notes))
    result = run_rank(config, tokens, world, Hooks(progress=_print) if world.rank == 0 else None)
    if world.rank != 0:
        return
    figures = summarize(result)
    for name, value in figures.items():
        print(f"{name:32} {value:.6g}")
    print(f"stopped: {result.stop_reason}")
    if not config.run.output_dir:
        print("nothing was kept: give run.output_dir to keep saves and result.json")
    if config.run.output_dir:
        out = Path(config.run.output_dir)
        out.mkdir(parents=True, exist_ok=True)
        (out / "result.json").write_text(json.dumps({"figures": figures, **result.to_json()}, indent=1))
        print(f"wrote {out / 'result.json'}")


def _print(facts: Mapping[str, Any]) -> None:
    if facts.get("phase") == "train":
        print(f"update {facts['update']}/{facts['updates']}  loss {facts['loss']:.4f}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
