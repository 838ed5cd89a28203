"""The same job without Ray: `torchrun --nproc-per-node N -m trainers.train config.yaml`, or plain `python -m`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import typing
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainers import config as configs
from trainers import model, ranks, traces
from trainers.config import TrialConfig
from trainers.diagnose import Fault, WorkerFault, is_consequence
from trainers.errors import UserError
from trainers.job import run_rank
from trainers.loop import Hooks
from trainers.plan import Plan
from trainers.prepare import locate_data, prepare
from trainers.ranks import World
from trainers.strategies import DIMENSIONS, STRATEGIES, Setting, illegal
from trainers.timing import doubts, summarize

USAGE = "usage: python -m trainers.train CONFIG.yaml   (or: torchrun --nproc-per-node N -m trainers.train CONFIG.yaml)"


def main(argv: list[str]) -> int:
    """Run a config file's job; return the exit status: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    if len(argv) != 1 or argv[0] in ("-h", "--help"):
        print(USAGE)
        if not argv or argv[0] not in ("-h", "--help"):
            return 2
        print("\n".join(["", "keys of the file, with their defaults:", *keys(TrialConfig)]))
        return 0
    warnings.simplefilter("ignore", FutureWarning)  # of libraries among themselves
    config = TrialConfig()
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
        return failed(error.fault, config)
    except KeyboardInterrupt:
        return interrupted(config)


def refuse(error: UserError) -> int:
    """Print the faults of bad input, on rank 0 only; return the exit status."""
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(f"error: {fault}" for fault in error.faults), file=sys.stderr)
    tell_torchrun("; ".join(error.faults))
    return 2


def tell_torchrun(message: str) -> None:
    """Leave the reason where torchrun looks for it, so that its own last lines repeat it."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        content = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": content}))


def keys(kind: type, prefix: str = "") -> list[str]:
    """Return a line for each key of a config, and for each option of a strategy or degree."""
    lines = []
    for f in dataclasses.fields(kind):
        if dataclasses.is_dataclass(f.default_factory):
            lines += keys(f.default_factory, f"{prefix}{f.name}.")
        elif f.name == "options":
            owners = [(f"strategy={name}", STRATEGIES[name]) for name in STRATEGIES]
            owners += [(f"{name} above 1", DIMENSIONS[name]) for name in DIMENSIONS]  # type: ignore[misc]
            for owner, has in owners:
                lines += [f"  {prefix}{o.name}: {o.default}  ({owner}) {o.help}" for o in has.options]
        else:
            shown = "" if f.default is None else str(f.default).lower() if isinstance(f.default, bool) else f.default
            choices = typing.get_args(typing.get_type_hints(kind)[f.name]) if isinstance(f.default, str) else ()
            allowed = f"({', '.join(c for c in choices if isinstance(c, str))}) " if any(choices[1:]) else ""
            lines.append(f"  {prefix}{f.name}: {shown}  {allowed}{f.metadata.get('help', '')}")
    return lines


def interrupted(config: TrialConfig) -> int:
    """Say what is left of a run that was interrupted; return the exit status."""
    if os.environ.get("RANK", "0") == "0":
        out = config.run.output_dir
        saves = sorted(Path(out, "checkpoints").glob("update-*")) if out else []
        last = f"the same command goes on from {saves[-1]}" if saves else "nothing was saved"
        hint = "" if config.run.save_every_updates else "; run.save_every_updates saves in between"
        print(f"interrupted: {last}{hint}", file=sys.stderr)
    return 130


def failed(fault: Fault, config: TrialConfig) -> int:
    """Print why this rank failed; return the exit status."""
    tell_torchrun(f"rank {fault.rank}, {fault.phase}: {fault.message}")
    if is_consequence(fault.message):
        print(f"rank {fault.rank} ended in {fault.phase}: another rank is gone", file=sys.stderr)
    else:
        said = "".join(f"\n  {line}" for line in fault.lines)
        print(f"failed: {fault.kind}: rank {fault.rank}, {fault.phase}: {fault.message}{said}", file=sys.stderr)
        if kept := traces.kept(config.run, fault.rank):
            print(f"  {kept}", file=sys.stderr)
    return 1


def resolve(config: TrialConfig) -> TrialConfig:
    """Check what can be checked before anything starts, and make paths absolute."""
    faults: list[str] = []
    started, wanted = int(os.environ.get("WORLD_SIZE", "1")), config.system.num_workers
    if started != wanted:
        faults.append(
            f"the config is for system.num_workers={wanted}, but {started} process(es) were started; use torchrun "
            f"--nproc-per-node {wanted}, or set system.num_workers: {started}"
        )
    plan = Plan()
    try:
        plan = STRATEGIES[config.system.strategy].plan(config.system)
        plan.accumulation(config.learning.global_batch_size, config.system.micro_batch_size)
    except ValueError as error:
        faults.append(str(error))
    out = str(Path(config.run.output_dir).expanduser().resolve()) if config.run.output_dir else None
    trace_dir = str(Path(config.run.trace_dir).expanduser().resolve()) if config.run.trace_dir else None
    eval_data = locate_data(config.eval_data) if config.eval_data else None
    device = ranks.resolve_device(config.run.device)
    located = model.locate(config.model)
    shape = model.shape(located, config.model_revision)
    faults += illegal(Setting(config.learning, config.system, plan, shape, device))
    faults += traces.faults(config.run)
    if faults:
        raise UserError(faults)
    return dataclasses.replace(
        config,
        model=located,
        data=locate_data(config.data),
        eval_data=eval_data,
        run=dataclasses.replace(config.run, output_dir=out, trace_dir=trace_dir, device=device),
    )


def run(config: TrialConfig, world: World) -> None:
    """Prepare data on rank 0, train on all, print and write the result on rank 0."""
    prepared = world.broadcast(lambda: prepare(config, model.tokenizer(config.model, config.model_revision)))
    tokens = prepared[config.learning.seq_len]
    if world.rank == 0:
        print("\n".join(tokens.notes))
    told = Progress()
    result = run_rank(config, tokens, world, Hooks(progress=told) if world.rank == 0 else None)
    if world.rank != 0:
        return
    if told.resumed_at == len(result.updates):
        print(f"the run in {config.run.output_dir} had ended already ({result.stop_reason}): nothing was done")
        return
    figures = summarize(result)
    for name, value in figures.items():
        print(f"{name:32} {value:.6g}")
    print(f"stopped: {result.stop_reason}")
    for doubt in doubts(result, config.run.precision):
        print(f"! {doubt}")
    if kept := traces.kept(config.run, world.rank):
        print(kept)
    if not config.run.output_dir:
        print("no weights and no result.json were kept: give run.output_dir to keep them")
    if config.run.output_dir:
        out = Path(config.run.output_dir)
        out.mkdir(parents=True, exist_ok=True)
        (out / "result.json").write_text(json.dumps({"figures": figures, **result.to_json()}, indent=1))
        print(f"wrote {out / 'result.json'}")


class Progress:
    """Prints a line an update, and knows after which one an earlier run is gone on with."""

    resumed_at: int | None = None

    def __call__(self, facts: Mapping[str, Any]) -> None:
        if facts.get("phase") == "resume":
            self.resumed_at = facts["update"]
            print(f"goes on after update {facts['update']}, from {facts['from']}", flush=True)
        if facts.get("phase") == "train":
            print(f"update {facts['update']}/{facts['updates']}  loss {facts['loss']:.4f}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
