"""A simulated step against a real one of the same micro batches, on gloo ranks: every account of every phase."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.rank_pool import RankPool
from trainers import model
from trainers.config import LearningConfig, SystemConfig, from_tree
from trainers.layout import Layout
from trainers.ledger import MicroBatch, peak, predict
from trainers.memory import MemoryMeter
from trainers.memory_trace import MemoryTrace
from trainers.ranks import current
from trainers.result import Accounts, RankMemory
from trainers.shape import ModelShape
from trainers.simulate import Simulator, imagined
from trainers.strategies import STRATEGIES, Setting, illegal
from trainers.task import Task, ends

Ranks = Callable[[int], RankPool]
BATCH = MicroBatch(rows=4, tokens=96, heads=40)
SLACK = 4 * BATCH.rows * BATCH.tokens * 8  # bytes: inputs of two micro batches, alive or not when a phase begins


def setting_of(system: dict[str, Any], learning: dict[str, Any]) -> Setting:
    typed = from_tree(SystemConfig, {"micro_batch_size": BATCH.rows, **system})
    learned = from_tree(LearningConfig, {"global_batch_size": 32, "lora_rank": 4, **learning})
    return Setting(learned, typed, STRATEGIES[typed.strategy].plan(typed), shape(), "cpu")


def shape() -> ModelShape:
    found = model.shape("embedded")
    assert found is not None
    return found


def measured(system: dict[str, Any], learning: dict[str, Any]) -> dict[str, RankMemory]:
    """Do for real what is simulated, on this rank."""
    setting = setting_of(system, learning)
    layout = Layout(setting.plan, current("cpu"))
    meter = MemoryMeter(torch.device("cpu"))
    engine = STRATEGIES[setting.system.strategy].make_engine("embedded", None, setting, layout, 2)
    try:
        with meter.tracing(engine.owned):
            for steps in (1, 2):
                engine.step([imagined(BATCH, setting) for _ in range(steps)], 1, meter)
            with meter.phase("eval"):
                engine.evaluate([imagined(BATCH, setting)])
        return meter.own_peaks()
    finally:
        engine.close()


@pytest.fixture(scope="module")
def simulator() -> Iterator[Simulator]:
    with Simulator(1) as made:
        yield made


LORA, FULL = {"adapter": "lora"}, {"adapter": "full"}
CASES = {
    "alone": ({}, FULL),
    "alone, recomputed": ({"activation_checkpointing": "full"}, LORA),
    "ddp": ({"num_workers": 2}, LORA),
    "ddp selective": ({"num_workers": 2, "activation_checkpointing": "selective"}, FULL),
    "fsdp2": ({"strategy": "fsdp2", "num_workers": 2}, FULL),
    "fsdp2 alone": ({"strategy": "fsdp2"}, LORA),
    "fsdp2 whole gradients": ({"strategy": "fsdp2", "num_workers": 2, "sync_each_batch": False}, FULL),
    "fsdp2 kept": ({"strategy": "fsdp2", "num_workers": 2, "reshard_after_forward": False}, LORA),
    "torch zero": ({"strategy": "zero", "zero_stage": 1, "zero_engine": "torch", "num_workers": 2}, FULL),
    "zero 1": ({"strategy": "zero", "zero_stage": 1, "num_workers": 2}, LORA),
    "zero 1 in half": ({"strategy": "zero", "zero_stage": 1, "num_workers": 2}, {**FULL, "param_dtype": "bfloat16"}),
    "zero 2": ({"strategy": "zero", "zero_stage": 2, "num_workers": 2}, FULL),
    "zero 3": ({"strategy": "zero", "zero_stage": 3, "num_workers": 2}, LORA),
    "tp": ({"num_workers": 2, "tp": 2}, LORA),
    "pp": ({"num_workers": 2, "pp": 2}, LORA),
    "cp": ({"num_workers": 2, "cp": 2}, FULL),
}


OFTEN = ("alone", "fsdp2", "zero 3", "tp", "pp", "cp")


@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_a_simulated_step_takes_what_a_real_one_takes(name: str, ranks: Ranks, simulator: Simulator) -> None:
    system, learning = CASES[name]
    setting = setting_of(system, learning)
    real = ranks(setting.plan.world).run(measured, system, learning)[0]
    (found,) = simulator.run([Task(shape(), setting, BATCH)])
    assert not isinstance(found, str), found
    for phase in real:
        # Beside tp and pp what is received is there at once, where real ranks wait, with more or fewer buffers.
        slack = SLACK if setting.plan.tp == setting.plan.pp == 1 else 0.06 * real[phase].allocated
        for account in Accounts.names():
            here, there = (getattr(m[phase].accounts, account) for m in (real, found))
            assert there == pytest.approx(here, abs=slack), f"{account} in {phase}: {here} measured, {there} simulated"


DEEP = dataclasses.replace(model.shape("embedded") or shape(), num_hidden_layers=16)
DEEP_CASES = ("fsdp2", "tp", "pp")


@pytest.mark.parametrize("name", [n if n == "fsdp2" else pytest.param(n, marks=pytest.mark.slow) for n in DEEP_CASES])
def test_two_shallow_models_tell_what_a_deep_one_takes(name: str, simulator: Simulator) -> None:
    """Every phase of 16 blocks, from 5 and 7 of them (of each stage, where there are two: 10 and 14)."""
    system, learning = CASES[name]
    setting = dataclasses.replace(setting_of(system, learning), shape=DEEP, device="cuda")
    whole, extrapolated = simulator.run([Task(DEEP, setting, BATCH, 0, w) for w in (True, False)])
    assert not isinstance(whole, str), whole
    assert not isinstance(extrapolated, str), extrapolated
    for phase, memory in whole.items():
        assert extrapolated[phase].allocated == pytest.approx(memory.allocated, rel=2e-3), phase
        assert memory.reserved >= memory.allocated


def test_no_simulation_changes_the_next(simulator: Simulator) -> None:
    """One process, one after another: DeepSpeed's stage 3 exchanged torch's linear layer for one that keeps more."""
    alone, sharded = (setting_of(*CASES[name]) for name in ("alone, recomputed", "zero 3"))
    alone = dataclasses.replace(alone, system=dataclasses.replace(alone.system, activation_checkpointing="none"))
    first, _, again = simulator.run([Task(shape(), one, BATCH) for one in (alone, sharded, alone)])
    assert first == again


def linear_after(system: dict[str, Any], learning: dict[str, Any]) -> bool:
    """Return whether torch's linear layer is its own after an engine was closed."""
    own = torch.nn.functional.linear
    measured(system, learning)
    return torch.nn.functional.linear is own


@pytest.mark.slow
def test_a_closed_engine_leaves_torch_as_it_was(ranks: Ranks) -> None:
    assert ranks(2).run(linear_after, *CASES["zero 3"]) == [True, True]


def loss_of_a_divided_vocabulary() -> tuple[int, int]:
    """Return the bytes of this rank's logits, and those that the loss needs beside them at most."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel
    from torch.nn.functional import cross_entropy

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    logits = distribute_tensor(torch.randn(64, 4096), mesh, [Shard(1)]).requires_grad_()
    targets = torch.zeros(64, dtype=torch.int64)
    trace = MemoryTrace(torch.device("cpu"), lambda: [("temporary", logits.detach())])
    with trace, loss_parallel():
        trace.start("loss")
        loss = cross_entropy(logits, targets)
        trace.stop()
        trace.start("backward")
        loss.backward()
        trace.stop()
    size = logits.to_local().nbytes
    return size, trace.peaks()["backward"].accounts.total - size


def test_what_happens_within_an_operation_on_divided_tensors_is_seen(ranks: Ranks) -> None:
    """torch's loss over a divided vocabulary: log-probabilities, and three times the gradient's size to make it."""
    for size, beside in ranks(2).run(loss_of_a_divided_vocabulary):
        assert beside == pytest.approx(4 * size, rel=0.02)


def drawn_setting(shape: ModelShape, system: dict[str, Any], device: str, adapter: str) -> Setting:
    typed = from_tree(SystemConfig, system)
    learned = from_tree(LearningConfig, {"adapter": adapter, "global_batch_size": 64})
    return Setting(learned, typed, STRATEGIES[typed.strategy].plan(typed), shape, device)


WAYS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2},
    {"strategy": "fsdp2", "num_workers": 4},
    {"strategy": "fsdp2", "num_workers": 4, "reshard_after_forward": False},
    {"num_workers": 2, "tp": 2},
    {"strategy": "fsdp2", "num_workers": 4, "cp": 2},
    {"num_workers": 2, "pp": 2},
]


def unseen(
    ways: Sequence[dict[str, Any]], recomputing: Sequence[str]
) -> Iterator[tuple[ModelShape, Setting, MicroBatch]]:
    """Yield configurations drawn at random: shapes, dtypes, adapters, recomputation, lengths."""
    draw = random.Random(7)
    for system, recompute in itertools.product(ways, recomputing):
        heads, groups = draw.choice([4, 8]), draw.choice([1, 2])
        kind, hidden = draw.choice(["llama", "qwen3"]), 32 * draw.randint(4, 12)
        shape = ModelShape(
            "drawn", kind, hidden, hidden * draw.choice([2, 3]), draw.randint(4, 8), heads,
            heads // groups, 32, 2000 * draw.randint(1, 20), 4096,
            draw.choice([True, False]), qk_norm=kind == "qwen3",
        )  # fmt: skip
        batch = MicroBatch(draw.choice([1, 2, 4]), 64 * draw.randint(2, 12), 64)
        typed = drawn_setting(
            shape,
            {**system, "activation_checkpointing": recompute, "micro_batch_size": batch.rows},
            draw.choice(["cpu", "cuda"]),
            draw.choice(["full", "lora"]),
        )
        assert not illegal(typed)
        yield shape, typed, batch


def simulated(simulator: Simulator, drawn: Sequence[tuple[ModelShape, Setting, MicroBatch]]) -> Iterator[int]:
    """Yield the bytes at the peak of the rank that holds most: of a pipeline the first or the last."""
    for shape, one, batch in drawn:
        found = simulator.run([Task(shape, one, batch, rank) for rank in ends(one)])
        assert not any(isinstance(peaks, str) for peaks in found), found
        yield max(memory.allocated for peaks in found for memory in peaks.values())  # type: ignore[union-attr]


SOME, ALL = (WAYS[:3], ("none",)), (WAYS, ("none", "full"))


@pytest.mark.parametrize("drawn", [SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_the_ledger_is_near_the_simulation_on_shapes_that_it_has_not_seen(drawn: Any, simulator: Simulator) -> None:
    configurations = list(unseen(*drawn))
    right = list(simulated(simulator, configurations))
    found = [peak(predict(*one))[1].total for one in configurations]
    errors = [ours / theirs - 1 for ours, theirs in zip(found, right, strict=True)]
    assert max(abs(e) for e in errors) <= 0.15, errors
    assert sorted(abs(e) for e in errors)[len(errors) // 2] <= 0.05, errors
