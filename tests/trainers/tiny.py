"""The smallest models, data sets and jobs that tests of the trainers share."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from trainers.build import Built
from trainers.config import LearningConfig, RunConfig, SystemConfig, TrialConfig
from trainers.data import tokenize
from trainers.embedded import model as embedded
from trainers.embedded import task
from trainers.engine import NativeEngine
from trainers.layout import Layout
from trainers.loop import Hooks, train
from trainers.memory import MemoryMeter
from trainers.prepare import TrialData
from trainers.ranks import World, current
from trainers.result import TrialResult
from trainers.rows import from_records
from trainers.strategies import STRATEGIES, Setting
from trainers.token_loss import Batch

LOSSES = [0.0, 0.2, 1.0, 4.0]


class OneWeight(nn.Module):
    """A model whose loss on token i is exactly weight · LOSSES[i], in float64: the gradient is the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> Any:
        loss = self.weight * torch.tensor(LOSSES, dtype=torch.float64)[input_ids]
        log_p = torch.stack([-loss, torch.log1p(-torch.exp(-loss.clamp(min=1e-9)))], dim=-1)
        return type("Output", (), {"logits": log_p})


def targets(*losses: float) -> Batch:
    """A row whose targets have these losses: position t predicts label t + 1."""
    ids = [LOSSES.index(loss) for loss in losses]
    return {"input_ids": torch.tensor([[*ids, 0]]), "labels": torch.tensor([[-100, *[0] * len(ids)]])}


def no_target() -> Batch:
    return {"input_ids": torch.tensor([[1, 2, 0]]), "labels": torch.full((1, 3), -100)}


def build(
    kind: type[NativeEngine], trained_model: nn.Module, learning: LearningConfig, world: World, updates: int
) -> NativeEngine:
    """Wrap a model that is there already, as the strategy ddp does, in an engine."""
    strategy = STRATEGIES["ddp"]
    system = SystemConfig(num_workers=world.size)
    setting = Setting(learning, system, strategy.plan(system), None, "cpu")
    layout = Layout(setting.plan, world)
    built = Built(trained_model, (strategy.apply(trained_model, setting, layout),))
    return kind(built, setting, layout, updates)


def records(count: int) -> list[dict[str, str]]:
    """Return short rows of the embedded data, 60 to 120 tokens as chats."""
    return [row for row in task.rows() if len(row["prompt"]) + len(row["completion"]) < 90][:count]


def data(train_rows: int = 24, eval_rows: int = 6) -> TrialData:
    rows = records(train_rows + eval_rows)
    tokenizer = embedded.tokenizer()
    train_data, held = (
        tokenize(from_records(part, "test"), tokenizer, seq_len=256)[0]
        for part in (rows[:train_rows], rows[train_rows:])
    )
    assert tokenizer.pad_token_id is not None
    return TrialData(train_data, held, tokenizer.pad_token_id)


def config(
    num_workers: int = 1, micro_batch_size: int = 2, run: dict[str, Any] | None = None, **learning: Any
) -> TrialConfig:
    """A job of LoRA on the embedded model: 4 samples an update."""
    chosen = {"global_batch_size": 4, "learning_rate": 1e-2, "lora_rank": 2, "warmup_fraction": 0.0, **learning}
    return TrialConfig(
        learning=LearningConfig(**chosen),
        system=SystemConfig(num_workers=num_workers, micro_batch_size=micro_batch_size),
        run=RunConfig(device="cpu", **(run or {})),
    )


def train_here(job: TrialConfig, tokens: TrialData, hooks: Hooks | None = None) -> TrialResult:
    """Train on this process's world; a function that ranks can be sent."""
    world = current("cpu")
    return train(job, tokens, world, MemoryMeter(world.device), hooks)


def changed(job: TrialConfig, **run: Any) -> TrialConfig:
    return dataclasses.replace(job, run=dataclasses.replace(job.run, **run))
