"""How many target tokens a second: this project's step against TRL's SFTTrainer, the same model, data, batch and dtype.

Run:    pip install -c requirements.lock -e '.[benchmarks]'
        python benchmarks/throughput.py               # SmolLM2-135M's shape, 30 updates, 20 minutes on 2 cores
        python benchmarks/throughput.py --updates 4   # a look
Reads:  four runs take turns, update by update, in one process: whatever disturbs the machine disturbs all alike. TRL as
        its documentation has it fastest on this device (no packing: that needs flash attention), with the rows in the
        given order, and grouped by length; ours as drawn, and with the rows of a window arranged by length. The last
        line is JSON: `ratio` = ours as drawn / TRL in the same order, `ratio_sorted` = ours arranged / TRL in the same
        order, `ratio_sorted_vs_grouped` = ours arranged / TRL grouped; and the losses, which must agree.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

# As a script this file's folder is first on the path, and not the project's.
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.gpu_check import PRESETS, save_random
from trainers import batch as batching
from trainers import model
from trainers.batch import Window
from trainers.config import LearningConfig, SystemConfig
from trainers.data import IGNORED, TokenizedDataset
from trainers.feed import Feed
from trainers.layout import Layout
from trainers.memory import MemoryMeter
from trainers.prepare import TrialData
from trainers.ranks import World, current
from trainers.shape import ModelShape
from trainers.strategies import STRATEGIES, Setting

WARM_UP = 2  # updates whose time does not count
LEARNING_RATE = 1e-4
AGREE = 1e-3  # relative: the losses of the same updates in the same order


@dataclass
class Runner:
    """One competitor: a thread that does an update whenever it is its turn."""

    name: str
    work: Callable[[Runner], None]
    seconds: list[float] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    fault: BaseException | None = None
    _go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _done: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _started: float = 0.0

    def start(self) -> None:
        def run() -> None:
            self._go.acquire()
            self._started = time.perf_counter()
            try:
                self.work(self)
            except BaseException as error:  # it must not leave the others waiting
                self.fault = error
            self._done.release()

        threading.Thread(target=run, daemon=True).start()

    def turn(self) -> None:
        """Let it do one update."""
        self._go.release()
        self._done.acquire()
        if self.fault is not None:
            raise self.fault

    def updated(self, targets: int, loss: float) -> None:
        """Note an update, and wait for the next turn."""
        self.seconds.append(time.perf_counter() - self._started)
        self.targets.append(targets)
        self.losses.append(loss)
        self._done.release()
        self._go.acquire()
        self._started = time.perf_counter()

    @property
    def rate(self) -> float:
        """Target tokens per second after the warm-up."""
        return sum(self.targets[WARM_UP:]) / sum(self.seconds[WARM_UP:])


def rows(count: int, vocabulary: int, longest: int) -> TokenizedDataset:
    """Return rows with the length tail of instruction data: log-normal, median 80 tokens, a third of them targets."""
    draw = random.Random(0)
    lengths = [min(longest, max(12, round(draw.lognormvariate(4.4, 0.7)))) for _ in range(count)]
    tokens = np.random.default_rng(0).integers(0, vocabulary, sum(lengths)).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    is_target = np.zeros(sum(lengths), dtype=bool)
    for start, length in zip(offsets, lengths, strict=False):
        is_target[start + length - length // 3 : start + length] = True
    return TokenizedDataset(tokens, is_target, offsets, np.arange(count), "drawn")


def ours(
    folder: str, data: TrialData, updates: list[Window], chosen: argparse.Namespace, how: str, world: World
) -> Any:
    """Return the work of this project's engine."""

    def work(runner: Runner) -> None:
        learning = LearningConfig(
            adapter="full", learning_rate=LEARNING_RATE, lr_schedule="constant", warmup_fraction=0.0, max_grad_norm=0.0,
            global_batch_size=chosen.batch, param_dtype=chosen.dtype,
        )  # fmt: skip
        system = SystemConfig(micro_batch_size=chosen.micro, arrangement=how)  # type: ignore[arg-type]
        strategy = STRATEGIES["ddp"]
        setting = Setting(learning, system, strategy.plan(system), model.shape(folder), world.device.type)
        engine = strategy.make_engine(folder, None, setting, Layout(setting.plan, world), len(updates))
        feed, meter = Feed(data, 1, 0, chosen.micro, world.device, how), MemoryMeter(world.device)  # type: ignore[arg-type]
        for window in updates:
            micro_batches, counts = feed.window(feed.arranged(window))
            step = engine.step(micro_batches, counts.targets, meter)
            world.synchronize()
            runner.updated(counts.targets, step.loss_sum / counts.targets)

    return work


def trl(folder: str, data: TrialData, updates: list[Window], chosen: argparse.Namespace, sampling: str) -> Any:
    """Return the work of TRL's trainer on the same rows in the same order, or grouped by length."""

    def work(runner: Runner) -> None:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, TrainerCallback
        from trl import SFTConfig, SFTTrainer

        train = data.train
        order = [i for w in updates for i in w.sample_ids]
        samples = [train.sample(i) for i in order]
        dataset = Dataset.from_dict(
            {
                "input_ids": [t.tolist() for t, _ in samples],
                "labels": [np.where(on, t, IGNORED).tolist() for t, on in samples],
            }
        )

        class Turns(TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                runner.updated(int(trainer.window_targets), float(trainer.window_loss))

        class Counted(SFTTrainer):  # type: ignore[misc]
            """Tells the targets and the loss of each update, which it computes anyway."""

            window_targets: Any = 0
            window_loss: Any = 0.0

            def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
                batches, count = super().get_batch_samples(*args, **kwargs)
                self.window_targets, self.window_loss = count, 0.0
                return batches, count

            def training_step(self, *args: Any, **kwargs: Any) -> Any:
                loss = super().training_step(*args, **kwargs)
                self.window_loss += float(loss)
                return loss

        settings = SFTConfig(
            output_dir=tempfile.mkdtemp(prefix="trl-"), max_steps=len(updates), learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=0.0, optim="adamw_torch",
            per_device_train_batch_size=chosen.micro, gradient_accumulation_steps=chosen.batch // chosen.micro,
            gradient_checkpointing=False, bf16=False, use_cpu=not torch.cuda.is_available(), logging_strategy="no",
            save_strategy="no", report_to="none", disable_tqdm=True, max_length=None, dataset_num_proc=None,
            dataset_kwargs={"skip_prepare_dataset": True}, train_sampling_strategy=sampling, seed=0,
        )  # fmt: skip
        base = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, chosen.dtype), attn_implementation="sdpa"
        )
        trainer = Counted(
            base,
            args=settings,
            train_dataset=dataset,
            processing_class=model.tokenizer("embedded"),
            callbacks=[Turns()],
        )
        trainer.train()

    return work


def main() -> int:
    parser = argparse.ArgumentParser(description="target tokens per second against TRL's SFTTrainer")
    parser.add_argument("--model", default="smollm2-135m", help="a preset of search_spaces/models")
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8, help="samples of an update")
    parser.add_argument("--micro", type=int, default=4, help="samples of a micro batch")
    parser.add_argument("--longest", type=int, default=512, help="most tokens of a row")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    chosen = parser.parse_args()
    shape, world = ModelShape.from_yaml(PRESETS / f"{chosen.model}.yaml"), current("auto")
    train = rows(chosen.updates * chosen.batch, shape.vocab_size, chosen.longest)
    data = TrialData(train, rows(2, shape.vocab_size, 16), 0)
    updates = batching.plan_updates(train.samples(), chosen.batch, 0, max_tokens=None, epochs=1)
    with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
        save_random(shape, Path(folder))
        runners = [
            Runner("trl", trl(folder, data, updates, chosen, "sequential")),
            Runner("ours", ours(folder, data, updates, chosen, "drawn", world)),
            Runner("trl grouped", trl(folder, data, updates, chosen, "group_by_length")),
            Runner("ours arranged", ours(folder, data, updates, chosen, "length", world)),
        ]
        for runner in runners:
            runner.start()
        for number in range(chosen.updates):
            for runner in runners[number % 4 :] + runners[: number % 4]:  # none is always first
                runner.turn()
            print(
                f"update {number + 1:3}  "
                + "   ".join(f"{r.name} {r.seconds[-1]:6.2f} s {r.losses[-1]:.5f}" for r in runners),
                flush=True,
            )
    return report(runners)


def report(runners: list[Runner]) -> int:
    """Print the figures; return the exit status."""
    theirs, mine, grouped, arranged = runners
    for r in runners:
        print(
            f"{r.name:14} {r.rate:8.1f} target tokens/s, median update {statistics.median(r.seconds[WARM_UP:]):.2f} s"
        )
    apart = max(abs(a - b) / b for r in (mine, arranged) for a, b in zip(r.losses, theirs.losses, strict=True))
    found = {
        "ratio": mine.rate / theirs.rate,
        "ratio_sorted": arranged.rate / theirs.rate,
        "ratio_sorted_vs_grouped": arranged.rate / grouped.rate,
        "losses_apart": apart,
        "loss": mine.losses[-1],
        "loss_trl": theirs.losses[-1],
        "updates": len(mine.losses),
    }
    print(json.dumps(found))
    return 0 if apart <= AGREE else 1


if __name__ == "__main__":
    sys.exit(main())
