"""Saves: complete or not there, and a resume that equals the uninterrupted run bit for bit."""

from __future__ import annotations

import dataclasses
import math
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
from trainers.engine import NativeEngine
from trainers.errors import UserError
from trainers.memory import MemoryMeter
from trainers.prepare import TrialData
from trainers.ranks import current
from trainers.result import Evaluation, History, Save, TrialResult, Update

Ranks = Callable[[int], RankPool]

LEARNING = LearningConfig(adapter="full", learning_rate=0.1, warmup_fraction=0.0)


class Partly(OneWeight):
    """One weight that is trained and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.full((), 3.0), requires_grad=False)


RUN_A = {"learning.seed": 0}


def engine_after(updates: int) -> NativeEngine:
    world = current("cpu")
    engine = build(NativeEngine, Partly(), LEARNING, world, 10)
    for _ in range(updates):
        engine.step([targets(1.0)], world.size, MemoryMeter(world.device))
    return engine


def state_of(engine: NativeEngine) -> dict[str, Any]:
    (moments,) = engine.optimizer.state_dict()["state"].values()
    return {
        "weight": engine.module.weight.item(),
        "moments": {name: float(value) for name, value in moments.items()},
        "rate": engine.scheduler.get_last_lr(),
        "updates": engine.scheduler.last_epoch,
    }


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def history_of(updates: int) -> History:
    """`updates` updates of 35 tokens each; the losses were not finite at first."""
    done = [Update(i, 35 * (i + 1), 35, 30, 40, math.nan if i == 0 else 1.5, 0.5, 0.1, 2.0) for i in range(updates)]
    return History(done, [Evaluation(0, 0, 3.5, 0.25)], [Save(35, 1.0, 1000)])


def save_after(folder: Path, updates: int) -> dict[str, Any]:
    engine = engine_after(updates)
    state = state_of(engine)
    state["bytes"] = checkpoint.save(folder, engine, history_of(updates), RUN_A, current("cpu"))
    engine.close()
    return state


def newest(folder: Path) -> Path:
    path = checkpoint.latest(folder, current("cpu"))
    assert path is not None
    return path


def test_a_save_brings_back_weights_optimizer_schedule_and_random_state(tmp_path: Path) -> None:
    right = save_after(tmp_path, 3)
    del right["bytes"]
    expected = draws()
    right_next = state_of(engine_after(4))
    fresh = engine_after(0)
    history = checkpoint.resume(newest(tmp_path), fresh, RUN_A, current("cpu"))
    assert repr(history) == repr(history_of(3))  # as text, for NaN is not equal to itself
    assert history.consumed_tokens == 105
    assert draws() == expected
    assert state_of(fresh) == right
    assert right["moments"]["step"] == 3
    fresh.step([targets(1.0)], 1, MemoryMeter(torch.device("cpu")))
    assert state_of(fresh) == right_next


def test_two_ranks_save_one_state_which_one_rank_can_resume(tmp_path: Path, ranks: Ranks) -> None:
    first, second = ranks(2).run(save_after, tmp_path, 3)
    assert first == second
    size = first.pop("bytes")
    (path,) = tmp_path.iterdir()
    assert {f.name for f in path.iterdir()} >= {"random-0.pt", "random-1.pt", "state.json"}
    assert size == sum(f.stat().st_size for f in path.iterdir())
    fresh = engine_after(0)
    checkpoint.resume(path, fresh, RUN_A, current("cpu"))
    assert state_of(fresh) == first


def test_frozen_weights_are_not_saved(tmp_path: Path) -> None:
    size = save_after(tmp_path, 1)["bytes"]
    assert size == sum(f.stat().st_size for f in newest(tmp_path).iterdir())
    fresh = engine_after(0)
    fresh.module.frozen.data.fill_(5.0)
    checkpoint.resume(newest(tmp_path), fresh, RUN_A, current("cpu"))
    assert float(fresh.module.frozen) == 5.0


def test_the_newest_complete_save_is_the_latest(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nowhere", current("cpu")) is None
    assert checkpoint.latest(tmp_path, current("cpu")) is None
    for updates in (2, 1):
        save_after(tmp_path, updates)
    (tmp_path / "update-000009").mkdir()
    (tmp_path / ".partial-000010").mkdir()
    assert newest(tmp_path) == tmp_path / "update-000002"
    assert not list(tmp_path.glob(".seen-*"))


def test_ranks_that_do_not_share_the_folder_are_refused(tmp_path: Path, ranks: Ranks) -> None:
    assert set(ranks(2).run(refusal, tmp_path, True)) == {""}
    (said,) = set(ranks(2).run(refusal, tmp_path, False))
    assert said.startswith(f"run.output_dir={tmp_path.parent}: 1 of 2 ranks do not see what rank 0 writes there; give")


def refusal(folder: Path, shared: bool) -> str:
    """Return why a rank refuses to go on; on a disk that is not shared, rank 1 sees no file."""
    world = current("cpu")
    with pytest.MonkeyPatch.context() as patch:
        if not shared and world.rank == 1:
            patch.setattr(Path, "is_file", lambda _: False)
        try:
            checkpoint.latest(folder, world)
        except UserError as error:
            return str(error)
    return ""


def test_a_folder_that_cannot_be_made_is_refused_on_every_rank(tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / "file").write_text("")
    (said,) = set(ranks(2).run(refusal, tmp_path / "file" / "checkpoints", True))
    assert said.startswith(f"run.output_dir={tmp_path / 'file'} cannot be written: ")


def full(*_: Any, **__: Any) -> None:
    raise OSError("No space left on device")


def full_at_the_end(path: Path, target: Path) -> None:
    """Path.rename, which fails for the folder of a save."""
    full() if path.name.startswith(".partial") else os.rename(path, target)


@pytest.mark.parametrize(
    ("where", "failing"),
    [
        ("trainers.engine.NativeEngine.save", full),
        ("trainers.checkpoint._random_state", full),
        ("trainers.checkpoint.Path.rename", full_at_the_end),
    ],
)
def test_a_crash_in_the_middle_of_a_save_leaves_the_one_before(
    where: str, failing: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = save_after(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(where, failing)
        with pytest.raises(OSError, match="No space"):
            save_after(tmp_path, 2)
    assert (tmp_path / ".partial-000002").is_dir()
    path = newest(tmp_path)
    assert path == tmp_path / "update-000001"
    del right["bytes"]
    fresh = engine_after(0)
    checkpoint.resume(path, fresh, RUN_A, current("cpu"))
    assert state_of(fresh) == right
    save_after(tmp_path, 2)  # the next attempt clears what was left
    assert sorted(p.name for p in tmp_path.iterdir()) == ["update-000001", "update-000002"]


def test_a_save_before_the_first_update_resumes_with_an_unused_optimizer(tmp_path: Path) -> None:
    engine = engine_after(0)
    checkpoint.save(tmp_path, engine, History(), RUN_A, current("cpu"))
    fresh = engine_after(0)
    assert checkpoint.resume(newest(tmp_path), fresh, RUN_A, current("cpu")) == History()
    fresh.step([targets(1.0)], 1, MemoryMeter(torch.device("cpu")))
    assert state_of(fresh) == state_of(engine_after(1))


def test_another_run_is_refused(tmp_path: Path) -> None:
    save_after(tmp_path, 1)
    path = newest(tmp_path)
    with pytest.raises(UserError, match=r"of another learning configuration \(learning.seed: 0 → 1\)"):
        checkpoint.resume(path, engine_after(0), {"learning.seed": 1}, current("cpu"))


def test_a_save_of_another_engine_is_refused_with_what_saved_it(tmp_path: Path) -> None:
    save_after(tmp_path, 1)
    with pytest.raises(UserError, match=r"was saved by ddp or fsdp2, which this configuration .DeepSpeed ZeRO-3 on 2"):
        checkpoint.check(newest(tmp_path), RUN_A, "DeepSpeed ZeRO-3 on 2 ranks")


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json"])
def test_a_damaged_save_is_one_sentence(name: str, tmp_path: Path) -> None:
    save_after(tmp_path, 1)
    path = newest(tmp_path)
    (path / name).write_bytes(b"")
    with pytest.raises(UserError, match=r"update-000001.* cannot be read .*: it is damaged"):
        checkpoint.resume(path, engine_after(0), RUN_A, current("cpu"))


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
        assert exact(rest) == exact(again) == exact(whole)  # the history is kept, what came before the save included
        assert rest.evaluations[-1].loss == whole.evaluations[-1].loss
        assert rest.evaluations[0] == half.evaluations[0]
        assert rest.updates[:3] == half.updates  # their times too
        assert rest.fingerprints == again.fingerprints == whole.fingerprints
        assert rest.memory.keys() == again.memory.keys() | {"save"} == whole.memory.keys()
        assert again.stop_reason == "budget"
        assert again.saves == rest.saves  # it makes no other, and the record of those that there are is kept
        assert [s.consumed_tokens for s in rest.saves] == [whole.updates[k].consumed_tokens for k in (2, 5)]
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
    result = train_here(config(micro_batch_size=4, run={"output_dir": str(tmp_path)}), tokens)
    assert [u.update for u in result.updates] == [0, 1]


def test_a_run_that_reached_its_target_does_not_train_on_when_started_again(tmp_path: Path) -> None:
    tokens = data(12, 2)
    start = train_here(config(global_batch_size=2, run={"max_updates": 1}), tokens).evaluations
    target = (start[0].loss + start[1].loss) / 2  # met after the first of six updates
    job = config(
        global_batch_size=2, run={"output_dir": str(tmp_path), "eval_every_tokens": 1, "target_eval_loss": target}
    )
    first, second = train_here(job, tokens), train_here(job, tokens)
    assert (first.stop_reason, len(first.updates)) == ("target", 1)
    assert (second.stop_reason, second.updates, second.evaluations) == ("target", first.updates, first.evaluations)


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
