"""What measuring costs: timed steps against a bare loop of plain torch, and the share of traced and profiled steps.

Run:    python benchmarks/overhead.py            # about three minutes on 2 cores
Reads:  both loops train copies of one model on the same batches and take turns, step by step. The last line is JSON:
        `overhead`, the median over pairs of (ours - bare) / bare, aim below 0.01; its quartiles; `measuring_share`, the
        seconds of traced and profiled steps over a whole probe, aim at most 0.25.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

# As a script this file's folder is first on the path, and not the project's.
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.gpu_check import save_random
from trainers import model
from trainers.config import LearningConfig, RunConfig, SystemConfig, TrialConfig
from trainers.data import IGNORED
from trainers.job import run_rank
from trainers.layout import Layout
from trainers.memory import MemoryMeter
from trainers.prepare import prepare
from trainers.ranks import World, current
from trainers.shape import ModelShape
from trainers.strategies import STRATEGIES, Setting
from trainers.token_loss import Batch, prepared

SHAPE = ModelShape("middle", "llama", 512, 1408, 8, 8, 4, 64, 8192, 1024, True)
ROWS, TOKENS, STEPS = 4, 192, 2  # rows of a micro batch, tokens of a row, micro batches of an update


def main() -> int:
    parser = argparse.ArgumentParser(description="what measuring costs")
    parser.add_argument("--pairs", type=int, default=60)
    chosen = parser.parse_args()
    world = current("auto")
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        save_random(SHAPE, Path(folder))
        found = overhead(folder, chosen.pairs, world)
        share = measuring_share(folder, world)
    print(json.dumps({**found, "measuring_share": share}))
    return 0


def overhead(folder: str, pairs: int, world: World) -> dict[str, float]:
    """Return by how much a timed step of the engine is slower than a bare one, as a fraction."""
    learning = LearningConfig(adapter="full", learning_rate=1e-4, global_batch_size=ROWS * STEPS, param_dtype="float32")
    system = SystemConfig(micro_batch_size=ROWS)
    strategy = STRATEGIES["ddp"]
    setting = Setting(learning, system, strategy.plan(system), model.shape(folder), world.device.type)
    engine = strategy.make_engine(folder, None, setting, Layout(setting.plan, world), pairs + 2)
    bare = Bare(copy.deepcopy(engine.module), learning)
    batches = drawn(world)
    targets = sum(int((b["labels"][:, 1:] != IGNORED).sum()) for b in batches)
    meter = MemoryMeter(world.device)
    ratios = []
    for pair in range(pairs + 2):
        seconds = {}
        for which in ("ours", "bare") if pair % 2 else ("bare", "ours"):
            start = time.perf_counter()
            engine.step(batches, targets, meter) if which == "ours" else bare.step(batches, targets)
            world.synchronize()
            seconds[which] = time.perf_counter() - start
        if pair >= 2:
            ratios.append((seconds["ours"] - seconds["bare"]) / seconds["bare"])
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"{pairs} pairs, a bare step takes {seconds['bare']:.3f} s: quartiles {low:+.2%} {middle:+.2%} {high:+.2%}")
    return {"overhead": middle, "overhead_low": low, "overhead_high": high, "pairs": pairs}


class Bare:
    """The same update in plain torch, without names, phases or counts."""

    def __init__(self, trained: nn.Module, learning: LearningConfig) -> None:
        self.model = trained
        self.parameters = list(trained.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=learning.learning_rate, weight_decay=0.0)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 1.0)
        self.limit = learning.max_grad_norm

    def step(self, batches: Sequence[Batch], targets: int) -> float:
        total = 0.0
        for batch in batches:
            ready = prepared(batch, heads=True)
            columns = ready["head_columns"]
            logits = self.model(
                input_ids=ready["input_ids"], position_ids=ready["position_ids"], use_cache=False,
                logits_to_keep=columns,
            ).logits  # fmt: skip
            labels = ready["targets"][:, columns]
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
            (loss / targets).backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(self.parameters, self.limit)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def drawn(world: World) -> list[Batch]:
    """Return the micro batches of an update; the last third of each row is targets."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(STEPS):
        ids = torch.randint(0, SHAPE.vocab_size, (ROWS, TOKENS), generator=generator)
        labels = ids.clone()
        labels[:, : TOKENS - TOKENS // 3] = IGNORED
        batches.append({"input_ids": ids.to(world.device), "labels": labels.to(world.device)})
    return batches


def measuring_share(folder: str, world: World) -> float:
    """Return the share of traced and profiled steps in a probe: these, the timed ones, an evaluation and a save."""
    config = TrialConfig(
        model=folder,
        learning=LearningConfig(),
        system=SystemConfig(micro_batch_size=4),
        run=RunConfig(device=world.device.type, measure_seconds=20.0, max_updates=1),  # type: ignore[arg-type]
    )
    data = prepare(config, model.tokenizer("embedded"))[config.learning.seq_len]
    result = run_rank(config, data, world)
    assert result.speed is not None
    apart = result.seconds["rehearsal"] + result.speed.profiled_s
    others = {
        "timed": result.speed.timed_s,
        "evaluation": result.evaluations[0].seconds,
        "save": result.saves[0].seconds,
    }
    told = {"rehearsal": result.seconds["rehearsal"], "profiled": result.speed.profiled_s, **others}
    print("seconds of a probe: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in told.items()))
    return apart / (apart + sum(others.values()))


if __name__ == "__main__":
    sys.exit(main())
