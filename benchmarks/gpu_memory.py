"""The second half of gpu_check.py: memory by account, speed and mfu of some configurations, a real out-of-memory."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from trainers import ledger, model
from trainers.config import LearningConfig, RunConfig, SystemConfig, TrialConfig
from trainers.data import TokenizedDataset
from trainers.diagnose import WorkerFault
from trainers.job import run_rank
from trainers.ledger import MicroBatch
from trainers.prepare import TrialData
from trainers.ranks import World
from trainers.result import GIB, TrialResult
from trainers.shape import ModelShape
from trainers.simulate import Simulator
from trainers.strategies import STRATEGIES, Setting
from trainers.task import Task, highest
from trainers.timing import peak_phase, summarize

RESULTS = Path(__file__).resolve().parent / "results"
BATCH = 8
FIGURES = ("step_time_s", "step_time_precision", "tokens_per_second", "mfu", "hfu", "peak_memory_reserved_gib")


def measure(folder: str, vocabulary: int, seq_len: int, world: World) -> bool:
    """Measure LoRA and full, recomputation none and full, micro batch 1 and 4; then run out of memory on purpose.

    Prints a line a case, writes all to results/<device>.json, and returns whether every case did what it should.
    """
    data = full_rows(seq_len, vocabulary)
    found, good = [], True
    print(f"{'case':24} {'peak in':22} {'accounts, GiB':64} tok/s  mfu  ledger, simulation: allocated, reserved")
    for adapter, recompute, micro in itertools.product(("lora", "full"), ("none", "full"), (1, 4)):
        job = configured(folder, adapter, recompute, micro, seq_len, world)
        row: dict[str, Any] = {"case": f"{adapter} {recompute} micro {micro}"}
        try:
            result = run_rank(job, data, world)
            row |= figures(result) | predictions(result, job, model.shape(folder), world)
        except WorkerFault as error:  # on a small device a result, too
            row |= {"fault": error.fault.kind, "phase": error.fault.phase, "details": error.fault.lines}
        found.append(row)
        print(line(row), flush=True)
    smallest = min((r["peak_memory_reserved_gib"] for r in found if "fault" not in r), default=0.0)
    caught = out_of_memory(folder, smallest / 2, seq_len, data, world)
    print(f"with {smallest / 2:.3f} GiB: {caught['fault']} in {caught['phase']}: {'; '.join(caught['details'])}")
    good = caught["fault"] in ("device_oom", "host_oom")
    RESULTS.mkdir(exist_ok=True)
    name = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
    path = RESULTS / f"{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-').lower()}.json"
    path.write_text(json.dumps({"device": name, "torch": torch.__version__, "cases": found, "oom": caught}, indent=1))
    print(f"wrote {path}")
    return good


def configured(folder: str, adapter: str, recompute: str, micro: int, seq_len: int, world: World) -> TrialConfig:
    return TrialConfig(
        model=folder,
        learning=LearningConfig(adapter=adapter, global_batch_size=BATCH, seq_len=seq_len),  # type: ignore[arg-type]
        system=SystemConfig(micro_batch_size=micro, activation_checkpointing=recompute),  # type: ignore[arg-type]
        run=RunConfig(device=world.device.type, max_updates=1, measure_seconds=5.0),  # type: ignore[arg-type]
    )


def figures(result: TrialResult) -> dict[str, Any]:
    """Return what a case measured."""
    peak = peak_phase(result)
    assert peak is not None
    of_peak = result.memory[peak[0]].worst
    by_phase = {name: dataclasses.asdict(phase.worst) for name, phase in result.memory.items()}
    summary = summarize(result)
    accounts = {name: value / GIB for name, value in dataclasses.asdict(of_peak.accounts).items()}
    return {"peak_in": peak[0], "accounts_gib": accounts, "memory": by_phase} | {n: summary.get(n) for n in FIGURES}


def predictions(result: TrialResult, job: TrialConfig, shape: ModelShape | None, world: World) -> dict[str, Any]:
    """Return what ledger and simulation say of a case that ran, and by how much they are off."""
    peak = peak_phase(result)
    if shape is None or peak is None or result.largest is None:
        return {}
    plan = STRATEGIES[job.system.strategy].plan(job.system)
    setting = Setting(job.learning, job.system, plan, shape, world.device.type)
    batch = MicroBatch(**result.largest)
    closed = ledger.peak(ledger.predict(shape, setting, batch))[1].total
    found = {"ledger_gib": closed / GIB, "ledger_error": closed / result.memory[peak[0]].allocated - 1}
    with Simulator(1) as simulator:
        (simulated,) = simulator.run([Task(shape, setting, batch)])
    if isinstance(simulated, str):
        return {**found, "not_simulated": simulated}
    kinds: tuple[Literal["allocated", "reserved"], ...] = ("allocated", "reserved")
    for kind in kinds:
        told = highest(simulated, kind)
        real = highest({name: phase.worst for name, phase in result.memory.items()}, kind)
        found |= {f"simulated_{kind}_gib": told / GIB, f"simulated_{kind}_error": told / real - 1}
    return found


def line(row: dict[str, Any]) -> str:
    if "fault" in row:
        return f"{row['case']:24} {row['fault']} in {row['phase']}: {'; '.join(row['details'])}"
    accounts = "  ".join(f"{name[:10]} {value:.3f}" for name, value in row["accounts_gib"].items())
    mfu = f"{row['mfu']:.1%}" if row["mfu"] is not None else ""
    names = ("ledger_error", "simulated_allocated_error", "simulated_reserved_error")
    errors = " ".join(f"{row[name]:+.1%}" for name in names if name in row)
    return f"{row['case']:24} {row['peak_in']:22} {accounts:64} {row['tokens_per_second']:.0f}  {mfu}  {errors}"


def out_of_memory(folder: str, gib: float, seq_len: int, data: TrialData, world: World) -> dict[str, Any]:
    """Run a case with less memory than any needs; return what was understood of its end."""
    job = configured(folder, "full", "none", 4, seq_len, world)
    job = dataclasses.replace(job, run=dataclasses.replace(job.run, memory_limit_gib=max(gib, 1e-3)))
    try:
        run_rank(job, data, world)
    except WorkerFault as error:
        fault = error.fault
        return {"fault": fault.kind, "phase": fault.phase, "message": fault.message, "details": fault.lines}
    return {"fault": "none", "phase": "none", "message": "", "details": []}


def full_rows(seq_len: int, vocabulary: int) -> TrialData:
    """Return rows that all have `seq_len` tokens, the second half of them targets."""
    count = 2 * BATCH
    tokens = np.random.default_rng(0).integers(0, vocabulary, count * seq_len).astype(np.int32)
    is_target = np.tile(np.arange(seq_len) >= seq_len // 2, count)
    offsets = np.arange(count + 1, dtype=np.int64) * seq_len
    rows = TokenizedDataset(tokens, is_target, offsets, np.arange(count), "drawn")
    return TrialData(rows, rows, 0)
