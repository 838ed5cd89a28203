"""What the contract suite's equal windows do not show of pipelines: uneven ones, evaluation, saves; and the rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rank_pool import RankPool
from tests.strategies.cells import SHAPES, Cell
from tests.strategies.reference import collated, exact_norms, targets_of, window
from trainers import batch as batching
from trainers.config import LearningConfig, SystemConfig, from_tree
from trainers.layout import Layout
from trainers.memory import MemoryMeter
from trainers.ranks import current
from trainers.strategies import STRATEGIES, Setting, illegal

Ranks = Callable[[int], RankPool]
Trained = dict[str, torch.Tensor]

BATCH = 4
WINDOWS = (4, 3, 1, 4)  # samples; of other lengths each
LEARNING = LearningConfig(
    adapter="full", learning_rate=1e-3, lr_schedule="constant", warmup_fraction=0.0, max_grad_norm=0.5,
    global_batch_size=BATCH,
)  # fmt: skip


def cell(family: str = "qwen3", adapter: str = "full", **system: Any) -> Cell:
    return Cell(from_tree(SystemConfig, {"num_workers": system.get("pp", 1), **system}), adapter, family)


@dataclass(frozen=True)
class Course:
    """What a run gave: losses and norms of its windows; evaluations before, after, and of the restored state."""

    losses: list[float]
    norms: list[float]
    evaluations: list[float]
    trained: Trained


class Run:
    """An engine on this rank, with its share of windows."""

    def __init__(self, folder: Path, cell: Cell, learning: LearningConfig, dtype: str) -> None:
        self.setting = cell.setting(learning, dtype)
        assert not illegal(self.setting)
        self.layout = Layout(self.setting.plan, current("cpu"))
        self.meter = MemoryMeter(self.layout.device)
        self.engine = STRATEGIES[cell.system.strategy].make_engine(
            str(folder / cell.family), None, self.setting, self.layout, len(WINDOWS),
            prepare=exact_norms if dtype == "float64" else None,
        )  # fmt: skip

    def batches(self, update: int, count: int) -> tuple[list[dict[str, torch.Tensor]], int]:
        samples = window(update, count)
        everyone = batching.split(
            batching.Window(update, 0, tuple(range(count))), self.setting.plan.dp, self.setting.system.micro_batch_size
        )
        mine = everyone[self.layout.dp_rank]
        return [collated([samples[i] for i in ids]) for ids in mine], targets_of(samples)

    def evaluate(self) -> float:
        return self.engine.evaluate(
            [batch for update, count in ((7, 4), (8, 3)) for batch in self.batches(update, count)[0]]
        )

    def step(self, update: int, count: int) -> tuple[float, float]:
        batches, targets = self.batches(update, count)
        step = self.engine.step(batches, targets, self.meter)
        return step.loss_sum / targets, step.grad_norm


def course(folder: Path, cell: Cell, learning: LearningConfig, dtype: str) -> Course:
    run = Run(folder, cell, learning, dtype)
    before = run.engine.snapshot()
    evaluations = [run.evaluate()]
    steps = [run.step(update, count) for update, count in enumerate(WINDOWS)]
    evaluations.append(run.evaluate())
    trained = dict(run.engine.trained())
    run.engine.restore(before)
    evaluations.append(run.evaluate())
    run.engine.close()
    losses, norms = zip(*steps, strict=True)
    return Course(list(losses), list(norms), evaluations, trained)


def far(ranks: list[Course], right: Course) -> float:
    """Return the largest difference; ranks agree on figures, and to the last bit on a weight that several hold."""
    joined: Trained = {}
    for rank in ranks:
        assert (rank.losses, rank.norms, rank.evaluations) == (ranks[0].losses, ranks[0].norms, ranks[0].evaluations)
        for name, value in rank.trained.items():
            assert torch.equal(joined.setdefault(name, value), value), name
    assert joined.keys() == right.trained.keys()
    weights = max(float((joined[name] - value).abs().max()) for name, value in right.trained.items())
    found, wanted = (c.losses + c.norms + [e / 40 for e in c.evaluations] for c in (ranks[0], right))
    return max(weights, *(abs(a - b) for a, b in zip(found, wanted, strict=True)))


@pytest.mark.parametrize(
    "system",
    [
        {"pp": 2},
        {"pp": 2, "offload_activations": True},
        {"pp": 3, "pp_schedule": "gpipe"},  # of four blocks: uneven stages
        {"pp": 2, "strategy": "fsdp2", "reshard_after_forward": False, "pp_schedule": "interleaved_1f1b"},
        {"pp": 2, "strategy": "fsdp2", "reshard_after_forward": False, "pp_schedule": "zero_bubble", "num_workers": 4},
        {"pp": 2, "pp_schedule": "zero_bubble", "offload_activations": True},
    ],
    ids=lambda system: "-".join(f"{k}={v}" for k, v in system.items()),
)
def test_short_windows_of_other_lengths(system: dict[str, Any], models: Path, ranks: Ranks) -> None:
    """Windows with too few samples, micro batches without any, other lengths each time; and evaluation in between."""
    job = (LEARNING, "float64")
    right = ranks(1).run(course, models, cell(), *job)[0]
    divided = cell(**system)
    assert far(ranks(divided.system.num_workers).run(course, models, divided, *job), right) <= 1e-10
    assert right.evaluations[0] == right.evaluations[2] != right.evaluations[1]


def test_float32(models: Path, ranks: Ranks) -> None:
    lora = replace(LEARNING, adapter="lora")
    right = ranks(1).run(course, models, cell("llama", "lora"), lora, "float32")[0]
    assert far(ranks(2).run(course, models, cell("llama", "lora", pp=2), lora, "float32"), right) <= 1e-4


def saved(folder: Path, cell: Cell, to: Path) -> tuple[Trained, tuple[float, float]]:
    """Do an update, save, do another; return the weights at the save, and the second update's figures."""
    run = Run(folder, cell, LEARNING, "float64")
    run.step(0, 4)
    run.engine.save(to)
    result = dict(run.engine.trained()), run.step(1, 4)
    run.engine.close()
    return result


def resumed(folder: Path, cell: Cell, to: Path) -> tuple[Trained, tuple[float, float]]:
    run = Run(folder, cell, LEARNING, "float64")
    run.engine.load(to, 1)
    result = dict(run.engine.trained()), run.step(1, 4)
    run.engine.close()
    return result


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2)])
def test_saves_fit_other_numbers_of_stages(before: int, after: int, models: Path, ranks: Ranks, tmp_path: Path) -> None:
    wrote = ranks(before).run(saved, models, cell(pp=before), tmp_path)
    read = ranks(after).run(resumed, models, cell(pp=after), tmp_path)
    weights = {name: value for rank in wrote for name, value in rank[0].items()}
    for rank in read:
        assert all(torch.equal(weights[name], value) for name, value in rank[0].items())
        assert rank[1] == pytest.approx(wrote[0][1], abs=1e-10)


def rules(batch: int = BATCH, **system: Any) -> str:
    given = cell(**{"num_workers": 2, "pp": 2, **system})
    learning = replace(LEARNING, global_batch_size=batch)
    return "\n".join(illegal(replace(given.setting(learning), shape=SHAPES["qwen3"])))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, ""),
        ({"pp_schedule": "gpipe", "micro_batch_size": 4}, ""),
        ({"pp_schedule": "zero_bubble"}, ""),
        ({"micro_batch_size": 4}, "= 1 micro batches: pp_schedule=1f1b needs at least pp=2 of them"),
        ({"pp_schedule": "interleaved_1f1b", "batch": 5}, "5 // pp=2 = 2 equal rounds"),
        ({"pp": 8, "num_workers": 8, "batch": 8}, "makes 8 stages; the model has 4 layers"),
        ({"pp": 4, "num_workers": 4, "pp_schedule": "interleaved_1f1b"}, "makes 8 stages; the model has 4 layers"),
        ({"pp_schedule": "zero_bubble", "strategy": "fsdp2"}, "reshard_after_forward must be false"),
        (
            {"pp_schedule": "zero_bubble", "activation_checkpointing": "full"},
            "pp_schedule=zero_bubble with activation_checkpointing=full",
        ),
    ],
)
def test_rules(given: dict[str, Any], said: str) -> None:
    found = rules(**given)
    assert said in found
    assert found.count("\n") == 0
    assert bool(found) == bool(said)


def test_the_rule_of_a_strategy_that_does_not_exist_yet() -> None:
    setting = cell(pp=2).setting(LEARNING)
    given: Setting = replace(setting, system=replace(setting.system, strategy="zero"))
    from trainers.strategies import DIMENSIONS

    assert "strategy=zero" in DIMENSIONS["pp"].validate(given)[0]
