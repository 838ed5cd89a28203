"""Saves of every strategy: resumed bit for bit in fresh processes, loaded under another one, and left for others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rank_pool import RankPool
from tests.strategies.cells import each_once
from tests.trainers.tiny import changed, config, data, train_here
from trainers.adapter import initial_weight
from trainers.config import SystemConfig, TrialConfig, from_tree
from trainers.errors import UserError
from trainers.result import TrialResult
from trainers.strategies import STRATEGIES

Ranks = Callable[[int], RankPool]

# The embedded model has 4 blocks and 4 heads, 2 of them for keys and values, tied weights and no norms on queries.
CELLS = each_once()
ROWS, BATCH = 24, 8  # 3 updates an epoch


def job_of(system: SystemConfig, adapter: str, out: Path) -> TrialConfig:
    """6 updates of 8 samples, with dropout where there is an adapter: random state counts."""
    dropout = 0.1 if adapter != "full" else 0.0
    base = config(adapter=adapter, global_batch_size=BATCH, lora_dropout=dropout, learning_rate=1e-3)
    base = changed(base, output_dir=str(out), epochs=2)
    return dataclasses.replace(base, system=system)


def cut_after(job: TrialConfig, updates: int) -> TrialConfig:
    return changed(job, max_updates=updates)


def train_on(size: int, job: TrialConfig) -> TrialResult:
    """Train in processes of their own."""
    pool = RankPool(size)
    try:
        results: list[TrialResult] = pool.run(train_here, job, data(train_rows=ROWS), timeout_s=120)
    finally:
        pool.kill()
    return results[0]


def figures(result: TrialResult) -> list[tuple[float, float, float]]:
    return [(u.loss, u.grad_norm, u.learning_rate) for u in result.updates]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if cell.options == {"zero_stage": 2} else pytest.mark.slow)
        for name, cell in CELLS.items()
    ],
)
def test_three_updates_a_save_and_three_more_in_fresh_processes(name: str, tmp_path: Path) -> None:
    cell = CELLS[name]
    whole = job_of(cell.system, cell.adapter, tmp_path / "whole")
    parts = job_of(cell.system, cell.adapter, tmp_path / "parts")
    size = cell.system.num_workers
    right = train_on(size, whole)
    first, second = train_on(size, cut_after(parts, 3)), train_on(size, parts)
    assert len(first.updates) == 3
    assert len(right.updates) == 6
    assert figures(second) == figures(right)
    assert [e.loss for e in second.evaluations[-1:]] == [e.loss for e in right.evaluations[-1:]]
    assert second.saves[-1].bytes > 1000
    left = loaded(tmp_path / "parts", cell.adapter)
    again = loaded(tmp_path / "whole", cell.adapter)
    assert left.keys() == again.keys()
    assert all(torch.equal(left[name], again[name]) for name in left)


def loaded(out: Path, adapter: str) -> dict[str, torch.Tensor]:
    """Load what a run left as others do, and return its trained weights."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from trainers.embedded import model as embedded

    if adapter == "full":
        return dict(AutoModelForCausalLM.from_pretrained(out / "model").state_dict())
    base: Any = embedded.load(torch.float32, "sdpa")
    peft: Any = PeftModel.from_pretrained(base, out / "adapter")
    found = {name: p.detach() for name, p in peft.named_parameters() if "lora_" in name}
    for name, value in found.items():
        assert value.numel() > 0
        assert not torch.equal(value, initial_weight(name, tuple(value.shape), 0)), f"{name} has not changed"
    return found


OTHERS = {
    "fsdp2 to tp": ({"strategy": "fsdp2"}, {"strategy": "fsdp2", "tp": "2"}),
    "tp to pp": ({"strategy": "ddp", "tp": "2"}, {"strategy": "ddp", "pp": "2"}),
    "pp to cp": ({"strategy": "ddp", "pp": "2"}, {"strategy": "fsdp2", "cp": "2"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_a_save_of_one_strategy_goes_on_under_another(name: str, tmp_path: Path, ranks: Ranks) -> None:
    """Sums of another order: equal to the sixth digit, and far from a fresh start, whose state is another."""
    before, after = (from_tree(SystemConfig, {"num_workers": 2, "micro_batch_size": 2, **s}) for s in OTHERS[name])
    jobs = [job_of(system, "lora", tmp_path) for system in (before, after)]
    jobs = [dataclasses.replace(j, learning=dataclasses.replace(j.learning, lora_dropout=0.0)) for j in jobs]
    right = ranks(2).run(train_here, changed(jobs[0], output_dir=None), data(train_rows=ROWS))[0]
    ranks(2).run(train_here, cut_after(jobs[0], 3), data(train_rows=ROWS))
    found = ranks(2).run(train_here, jobs[1], data(train_rows=ROWS))[0]
    for one, other in zip(figures(found)[3:], figures(right)[3:], strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_every_strategy_is_saved_somewhere() -> None:
    assert {cell.system.strategy for cell in CELLS.values()} == set(STRATEGIES)


def test_a_save_that_cannot_be_loaded_says_so(tmp_path: Path, ranks: Ranks) -> None:
    before, after = (
        from_tree(SystemConfig, {"num_workers": 2, "micro_batch_size": 2, **s})
        for s in ({"strategy": "zero", "zero_stage": "2"}, {"strategy": "fsdp2"})
    )
    ranks(2).run(train_here, cut_after(job_of(before, "lora", tmp_path), 1), data(train_rows=8))
    with pytest.raises(
        UserError, match=r"was saved by DeepSpeed ZeRO-2 on 2 ranks, which this configuration \(ddp or fsdp2\)"
    ):
        ranks(2).run(train_here, job_of(after, "lora", tmp_path), data(train_rows=8))
