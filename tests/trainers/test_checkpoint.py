"""Saves: complete or not there, and a resume that equals the uninterrupted run bit for bit."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.rank_pool import RankPool
from tests.trainers.tiny import OneWeight, build, changed, config, data, targets, train_here
from trainers import checkpoint
from trainers.config import LearningConfig, TrialConfig
from trainers.engine import Engine
from trainers.errors import UserError
from trainers.memory import MemoryMeter
from trainers.prepare import TrialData
from trainers.ranks import current
from trainers.result import TrialResult

Ranks = Callable[[int], RankPool]

LEARNING = LearningConfig(adapter="full", learning_rate=0.1, warmup_fraction=0.0)


class Partly(OneWeight):
    """One weight that is trained and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.full((), 3.0), requires_grad=False)


def engine_after(updates: int) -> Engine:
    world = current("cpu")
    engine = build(Engine, Partly(), LEARNING, world, 10)
    for _ in range(updates):
        engine.step([targets(1.0)], world.size, MemoryMeter(world.device))
    return engine


def state_of(engine: Engine) -> dict[str, Any]:
    (moments,) = engine.optimizer.state_dict()["state"].values()
    return {
        "weight": engine.module.weight.item(),
        "moments": {name: float(value) for name, value in moments.items()},
        "rate": engine.scheduler.get_last_lr(),
        "updates": engine.scheduler.last_epoch,
    }


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def save_after(folder: Path, updates: int) -> dict[str, Any]:
    engine = engine_after(updates)
    state = state_of(engine)
    checkpoint.save(folder, engine, updates, 70, "run a", current("cpu"))
    engine.close()
    return state


def test_a_save_brings_back_weights_optimizer_schedule_and_random_state(tmp_path: Path) -> None:
    right = save_after(tmp_path, 3)
    expected = draws()
    right_next = state_of(engine_after(4))
    fresh = engine_after(0)
    path = checkpoint.latest(tmp_path)
    assert path is not None
    assert checkpoint.resume(path, fresh, "run a", current("cpu")) == (3, 70)
    assert draws() == expected
    assert state_of(fresh) == right
    assert right["moments"]["step"] == 3
    fresh.step([targets(1.0)], 1, MemoryMeter(torch.device("cpu")))
    assert state_of(fresh) == right_next


def test_two_ranks_save_one_state_which_one_rank_can_resume(tmp_path: Path, ranks: Ranks) -> None:
    first, second = ranks(2).run(save_after, tmp_path, 3)
    assert first == second
    (path,) = tmp_path.iterdir()
    assert {f.name for f in path.iterdir()} >= {"random-0.pt", "random-1.pt", "state.json"}
    fresh = engine_after(0)
    checkpoint.resume(path, fresh, "run a", current("cpu"))
    assert state_of(fresh) == first


def test_frozen_weights_are_not_saved(tmp_path: Path) -> None:
    save_after(tmp_path, 1)
    fresh = engine_after(0)
    fresh.module.frozen.data.fill_(5.0)
    path = checkpoint.latest(tmp_path)
    assert path is not None
    checkpoint.resume(path, fresh, "run a", current("cpu"))
    assert float(fresh.module.frozen) == 5.0
    assert checkpoint.size_bytes(path) == sum(f.stat().st_size for f in path.iterdir())


def test_the_newest_complete_save_is_the_latest(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nowhere") is None
    assert checkpoint.latest(tmp_path) is None
    for updates in (2, 1):
        save_after(tmp_path, updates)
    (tmp_path / "update-000009").mkdir()
    (tmp_path / ".partial-000010").mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "update-000002"


def full(*_: Any, **__: Any) -> None:
    raise OSError("No space left on device")


def full_at_the_end(path: Path, target: Path) -> None:
    """Path.rename, which fails for the folder of a save."""
    full() if path.name.startswith(".partial") else os.rename(path, target)


@pytest.mark.parametrize(
    ("where", "failing"),
    [("state_dict_saver.save", full), ("_random_state", full), ("Path.rename", full_at_the_end)],
)
def test_a_crash_in_the_middle_of_a_save_leaves_the_one_before(
    where: str, failing: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = save_after(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(f"trainers.checkpoint.{where}", failing)
        with pytest.raises(OSError, match="No space"):
            save_after(tmp_path, 2)
    assert (tmp_path / ".partial-000002").is_dir()
    path = checkpoint.latest(tmp_path)
    assert path == tmp_path / "update-000001"
    fresh = engine_after(0)
    checkpoint.resume(path, fresh, "run a", current("cpu"))
    assert state_of(fresh) == right
    save_after(tmp_path, 2)  # the next attempt clears what was left
    assert sorted(p.name for p in tmp_path.iterdir()) == ["update-000001", "update-000002"]


def test_a_save_before_the_first_update_resumes_with_an_unused_optimizer(tmp_path: Path) -> None:
    engine = engine_after(0)
    path = checkpoint.save(tmp_path, engine, 0, 0, "run a", current("cpu"))
    fresh = engine_after(0)
    assert checkpoint.resume(path, fresh, "run a", current("cpu")) == (0, 0)
    fresh.step([targets(1.0)], 1, MemoryMeter(torch.device("cpu")))
    assert state_of(fresh) == state_of(engine_after(1))


def test_another_run_is_refused(tmp_path: Path) -> None:
    save_after(tmp_path, 1)
    path = checkpoint.latest(tmp_path)
    assert path is not None
    with pytest.raises(UserError, match="update-000001 was saved by a run with another model, data or learning"):
        checkpoint.resume(path, engine_after(0), "run b", current("cpu"))


# Whole jobs


def in_parts(job: TrialConfig, tokens: TrialData) -> list[TrialResult]:
    """Train the whole run; then its first half into a folder, the rest from there, and the finished run once more."""
    jobs = [changed(job, output_dir=None), changed(job, max_updates=3), job, job]
    return [train_here(part, tokens) for part in jobs]


def exact(result: TrialResult) -> list[tuple[float, ...]]:
    return [(u.update, u.consumed_tokens, u.loss, u.grad_norm, u.learning_rate) for u in result.updates]


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(world: int, tmp_path: Path, ranks: Ranks) -> None:
    """6 updates against 3 and 3 more, with dropout, so that the random state matters too."""
    job = config(world, 1, global_batch_size=2, lora_dropout=0.1, run={"output_dir": str(tmp_path)})
    tokens = data(12, 2)
    results = [in_parts(job, tokens)] if world == 1 else ranks(world).run(in_parts, job, tokens)
    for whole, half, rest, again in results:
        assert [u.update for u in whole.updates] == [0, 1, 2, 3, 4, 5]
        assert exact(half) == exact(whole)[:3]
        assert exact(rest) == exact(whole)[3:]
        assert rest.evaluations[-1].loss == whole.evaluations[-1].loss
        assert rest.fingerprints == again.fingerprints == whole.fingerprints
        assert (again.stop_reason, again.updates, again.saves) == ("budget", (), ())
    assert len({tuple(exact(rest)) for _, _, rest, _ in results}) == 1
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["update-000003", "update-000006"]


def test_dropout_matters_and_differs_between_ranks(ranks: Ranks) -> None:
    """The run above would not notice a lost random state without it."""
    job, tokens = config(2, 1, global_batch_size=2, lora_dropout=0.1), data(4, 2)
    with_dropout = exact(ranks(2).run(train_here, job, tokens)[0])
    learning = dataclasses.replace(job.learning, lora_dropout=0.0)
    without = exact(ranks(2).run(train_here, dataclasses.replace(job, learning=learning), tokens)[0])
    assert with_dropout[1] != without[1]
    assert ranks(2).run(seed_after_training, job, tokens) == [0, 1]


def seed_after_training(job: TrialConfig, tokens: TrialData) -> int:
    """Return the seed from which this rank drew its dropout."""
    train_here(job, tokens)
    return torch.initial_seed()


def test_a_run_with_another_learning_rate_is_refused(tmp_path: Path) -> None:
    tokens = data(8, 2)
    train_here(config(run={"output_dir": str(tmp_path), "max_updates": 1}), tokens)
    with pytest.raises(UserError, match="another output_dir, or the configuration that it was saved with"):
        train_here(config(learning_rate=2e-2, run={"output_dir": str(tmp_path)}), tokens)
    # A system configuration is no part of what is learned: another micro batch goes on.
    assert [
        u.update for u in train_here(config(micro_batch_size=4, run={"output_dir": str(tmp_path)}), tokens).updates
    ] == [1]


def test_saves_every_so_many_updates(tmp_path: Path) -> None:
    result = train_here(
        config(run={"output_dir": str(tmp_path), "save_every_updates": 2}, global_batch_size=2), data(10, 2)
    )
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "update-000002",
        "update-000004",
        "update-000005",
    ]
    consumed = [result.updates[k - 1].consumed_tokens for k in (2, 4, 5)]
    assert [s.consumed_tokens for s in result.saves] == consumed
    assert all(s.bytes > 0 for s in result.saves)
