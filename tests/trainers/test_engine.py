"""The engine against one backward pass over the whole window, in float64, and against values worked by hand.

The reference is naive on purpose: one sample at a time, no padding, no accumulation, no ranks. A mutated engine (mean
of means, the fault of most trainers) goes through the same comparison and must fail it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.rank_pool import RankPool
from tests.strategies.reference import exact_norms
from tests.trainers.tiny import OneWeight, build, no_target, targets
from trainers import batch, token_loss
from trainers.adapter import apply_adapter
from trainers.batch import Window
from trainers.config import LearningConfig
from trainers.data import TokenizedDataset
from trainers.engine import NativeEngine, Step, schedule
from trainers.loop import Feed
from trainers.memory import MemoryMeter
from trainers.prepare import TrialData
from trainers.ranks import current
from trainers.token_loss import Batch, loss_sum

Ranks = Callable[[int], RankPool]

EXACT = 1e-10
WRONG = 1e-3
WORLDS = (1, 2)
UPDATES = 4
PAD = 0

# Micro batches of 2. At dp=2 rank 0 gets every other sample: (0, 2) (4, 6), rank 1 (1, 3) (5, 7). Samples 1 and 3
# have no target: rank 1's first micro batch contributes nothing. Windows 2 and 3 are short; the last is one sample, so
# rank 1 has an empty micro batch.
WINDOWS = (
    Window(0, 0, tuple(range(8))),
    Window(1, 0, tuple(range(8, 16))),
    Window(2, 0, (16, 17, 18, 19, 20)),
    Window(3, 0, (21,)),
)
WITHOUT_TARGETS = (1, 3)
LORA = LearningConfig(
    adapter="lora",
    lora_rank=4,
    lora_alpha=8,
    learning_rate=1e-2,
    lr_schedule="linear",
    warmup_fraction=0.0,
    weight_decay=0.1,
)
FULL = dataclasses.replace(LORA, adapter="full")


def dataset() -> TokenizedDataset:
    """22 samples of 3 to 12 tokens with 0 to 9 targets each, unequal between ranks."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 13, 22)
    tokens = rng.integers(1, 64, lengths.sum()).astype(np.int32)
    targets = rng.random(lengths.sum()) < 0.5
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    targets[offsets[:-1]] = False
    targets[offsets[1:] - 1] = True
    for i in WITHOUT_TARGETS:
        targets[offsets[i] : offsets[i + 1]] = False
    return TokenizedDataset(tokens, targets, offsets, np.arange(22), "test")


def model(learning: LearningConfig) -> nn.Module:
    """A Llama of 2 layers in float64; Hugging Face's RMSNorm computes in float32, so that is replaced."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            initializer_range=0.2,
            attn_implementation="sdpa",
        )
    )
    adapted = apply_adapter(base, learning).double()
    exact_norms(adapted)
    return adapted


@dataclasses.dataclass
class Course:
    """What one run went through: per update the loss, the norm, the clipped gradients and the weights after it."""

    losses: list[float]
    norms: list[float]
    gradients: list[list[torch.Tensor]]
    weights: list[list[torch.Tensor]]


def reference(learning: LearningConfig) -> Course:
    """Train on whole windows in one process: mean over all targets, clip, AdamW, linear decay."""
    data, trained_model = dataset(), model(learning)
    trained = [p for p in trained_model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=learning.learning_rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=learning.weight_decay
    )
    course = Course([], [], [], [])
    for k, window in enumerate(WINDOWS):
        losses = []
        for i in window.sample_ids:
            tokens, targets = (torch.from_numpy(array) for array in data.sample(i))
            log_p = torch.log_softmax(trained_model(input_ids=tokens[None].long()).logits[0], dim=-1)
            losses += [-log_p[t - 1, tokens[t]] for t in range(1, len(tokens)) if targets[t]]
        loss = torch.stack(losses).sum() / len(losses)
        optimizer.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float((p.grad**2).sum()) for p in trained))
        if learning.max_grad_norm and norm > learning.max_grad_norm:
            for p in trained:
                p.grad *= learning.max_grad_norm / (norm + 1e-6)
        for group in optimizer.param_groups:
            group["lr"] = learning.learning_rate * (1 - k / UPDATES)
        optimizer.step()
        course.losses.append(loss.item())
        course.norms.append(norm)
        course.gradients.append([p.grad.clone() for p in trained])
        course.weights.append([p.detach().clone() for p in trained])
    return course


def mean(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return loss_sum(logits, targets) / max(int((targets != -100).sum()), 1)


class MeanOfMeans(NativeEngine):
    """The mutation: each micro batch is averaged over its own targets, then the averages are averaged."""

    def step(self, micro_batches: Sequence[Batch], window_targets: int, meter: MemoryMeter) -> Step:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(token_loss, "loss_sum", mean)
            return super().step(micro_batches, len(micro_batches) * self._layout.world.size, meter)


def run_engine(kind: type[NativeEngine], learning: LearningConfig) -> Course:
    """Train through the engine on this process's world: 4 micro steps a full window at world 1, 2 at world 2."""
    world = current("cpu")
    data = TrialData(dataset(), dataset(), PAD)
    feed = Feed(data, world.size, world.rank, 2, world.device)
    engine = build(kind, model(learning), learning, world, UPDATES)
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    course = Course([], [], [], [])
    engine.optimizer.register_step_pre_hook(
        lambda *_: course.gradients.append([p.grad.detach().clone() for p in trained])
    )
    for window in WINDOWS:
        micro_batches, counts = feed.window(window)
        step = engine.step(micro_batches, counts.targets, MemoryMeter(world.device))
        assert type(step.grad_norm) is float
        course.losses.append(step.loss_sum / counts.targets)
        course.norms.append(step.grad_norm)
        course.weights.append([p.detach().clone() for p in trained])
    engine.close()
    return course


def difference(found: Course, right: Course) -> dict[str, float]:
    """Return the largest relative error of each quantity, over all updates."""

    def tensors(a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> float:
        errors = [
            float(torch.stack([(x - y).norm() for x, y in zip(u, v, strict=True)]).norm())
            / float(torch.stack([y.norm() for y in v]).norm())
            for u, v in zip(a, b, strict=True)
        ]
        return max(errors)

    def numbers(a: list[float], b: list[float]) -> float:
        return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))

    return {
        "loss": numbers(found.losses, right.losses),
        "grad_norm": numbers(found.norms, right.norms),
        "gradients": tensors(found.gradients, right.gradients),
        "weights": tensors(found.weights, right.weights),
    }


@pytest.fixture(scope="module", params=["full", "lora"])
def case(request: pytest.FixtureRequest) -> tuple[LearningConfig, Course]:
    """A learning configuration that clips at half of the first window's true norm, and its reference."""
    free = dataclasses.replace(FULL if request.param == "full" else LORA, max_grad_norm=0)
    learning = dataclasses.replace(free, max_grad_norm=reference(free).norms[0] / 2)
    return learning, reference(learning)


def on(world: int, ranks: Ranks, kind: type[NativeEngine], learning: LearningConfig) -> list[Course]:
    return [run_engine(kind, learning)] if world == 1 else ranks(world).run(run_engine, kind, learning)


def test_the_windows_are_as_uneven_as_they_are_meant_to_be() -> None:
    """The last window leaves rank 1 an empty micro batch; ranks and micro batches differ in targets; one has none."""
    samples = dataset().samples()
    first = batch.split(WINDOWS[0], 2, 2)
    targets = [[batch.count(m, samples).targets for m in share] for share in first]
    assert targets[1][0] == 0
    assert len({count for share in targets for count in share}) == 4
    assert batch.split(WINDOWS[2], 2, 2)[1][1] == ()
    assert batch.split(WINDOWS[3], 2, 2) == [[(21,)], [()]]


@pytest.mark.parametrize("world", WORLDS)
def test_the_engine_equals_one_backward_over_the_window(
    world: int, case: tuple[LearningConfig, Course], ranks: Ranks
) -> None:
    learning, right = case
    assert right.norms[0] == pytest.approx(2 * learning.max_grad_norm)
    for course in on(world, ranks, NativeEngine, learning):
        assert max(difference(course, right).values()) <= EXACT, difference(course, right)


@pytest.mark.parametrize("world", WORLDS)
def test_mean_of_means_would_be_noticed(world: int, case: tuple[LearningConfig, Course], ranks: Ranks) -> None:
    learning, right = case
    for course in on(world, ranks, MeanOfMeans, learning):
        found = difference(course, right)
        assert min(found[name] for name in ("loss", "grad_norm", "gradients", "weights")) > WRONG, found


# Worked values


def losses_and_norms(kind: type[NativeEngine], shares: list[list[list[Batch]]]) -> list[tuple[float, float]]:
    """Do the updates `shares[rank][update]`; return the mean loss and the gradient of each."""
    world = current("cpu")
    learning = dataclasses.replace(FULL, learning_rate=1e-15, max_grad_norm=0, weight_decay=0)
    engine = build(kind, OneWeight(), learning, world, len(shares[0]))
    found = []
    for update, mine in enumerate(shares[world.rank]):
        labels = [b["labels"][:, 1:] for share in shares for b in share[update]]
        total = sum(int((row != -100).sum()) for row in labels)
        step = engine.step(mine, total, MemoryMeter(world.device))
        found.append((step.loss_sum / total, step.grad_norm))
    engine.close()
    return found


ONE_AND_THREE = (targets(0.2), targets(1.0, 1.0, 1.0), 0.8, 0.6)
ONE_AND_NINE = (targets(4.0), targets(*[1.0] * 9), 1.3, 2.5)
NONE_AND_ONE = (no_target(), targets(0.2), 0.2, 0.1)


@pytest.mark.parametrize(
    ("first", "second", "mean", "mean_of_means"),
    [ONE_AND_THREE, ONE_AND_NINE, NONE_AND_ONE],
    ids=["1 of 0.2 and 3 of 1", "1 of 4 and 9 of 1", "none and 1 of 0.2"],
)
def test_worked_means(first: Batch, second: Batch, mean: float, mean_of_means: float, ranks: Ranks) -> None:
    in_turn, apart = [[[first, second]]], [[[first]], [[second]]]
    for found in (losses_and_norms(NativeEngine, in_turn), *ranks(2).run(losses_and_norms, NativeEngine, apart)):
        assert found == [(pytest.approx(mean, abs=1e-12), pytest.approx(mean, abs=1e-12))]
    for wrong in (losses_and_norms(MeanOfMeans, in_turn), *ranks(2).run(losses_and_norms, MeanOfMeans, apart)):
        assert wrong[0][1] == pytest.approx(mean_of_means, abs=1e-12)


def test_a_short_last_window_has_its_full_weight() -> None:
    """6 micro batches of constant loss 1 at accumulation 4: the second window contributes 1.0, not 0.5."""
    one = targets(1.0)
    found = losses_and_norms(NativeEngine, [[[one] * 4, [one] * 2]])
    assert found == [(pytest.approx(1.0), pytest.approx(1.0))] * 2


def test_a_window_without_targets_is_zero_and_finite() -> None:
    engine = build(NativeEngine, OneWeight(), FULL, current("cpu"), 1)
    step = engine.step([no_target()], 0, MemoryMeter(torch.device("cpu")))
    assert (step.loss_sum, step.grad_norm) == (0.0, 0.0)


def test_logits_are_made_where_a_row_has_a_target() -> None:
    """Position t predicts token t + 1: targets 3 and 4 of one row and 4 of the other need positions 2 and 3."""
    labels = torch.tensor([[-100, -100, -100, 7, 8, -100], [-100, -100, -100, -100, 9, -100]])
    assert token_loss.head_columns(labels).tolist() == [2, 3]
    assert token_loss.head_columns(torch.full((2, 4), -100)).tolist() == [0]  # one at least: the output head takes part
    batch = token_loss.prepared({"input_ids": torch.zeros_like(labels), "labels": labels}, heads=True)
    assert batch["targets"][:, batch["head_columns"]].tolist() == [[7, 8], [-100, 9]]


def test_half_precision_logits_give_a_float32_loss() -> None:
    batch = token_loss.prepared(targets(*[1.0] * 300))
    logits = OneWeight()(**{k: batch[k] for k in ("input_ids", "position_ids")}, use_cache=False).logits.bfloat16()
    loss = loss_sum(logits, batch["targets"])
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(300, rel=1e-2)  # summed in bfloat16 it would stop at 256


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # 10 updates, 2 of warm-up at 1/3 and 2/3 of the peak; then 8 updates whose progress is 0, 1/8, … 7/8.
        ("constant", [1 / 3, 2 / 3] + [1.0] * 8),
        ("linear", [1 / 3, 2 / 3] + [1 - k / 8 for k in range(8)]),
        ("cosine", [1 / 3, 2 / 3, 1, 0.9619398, 0.8535534, 0.6913417, 0.5, 0.3086583, 0.1464466, 0.0380602]),
    ],
)
def test_schedules(kind: Any, expected: list[float]) -> None:
    learning = LearningConfig(lr_schedule=kind, warmup_fraction=0.2)
    assert [schedule(learning, k, 10) for k in range(10)] == pytest.approx(expected, abs=1e-7)
    assert schedule(dataclasses.replace(learning, warmup_fraction=0.0), 0, 10) == 1.0
    assert schedule(dataclasses.replace(learning, warmup_fraction=1.0), 9, 10) == pytest.approx(10 / 11)


def test_the_step_reports_the_rate_it_used() -> None:
    engine = build(NativeEngine, OneWeight(), dataclasses.replace(FULL, learning_rate=0.5), current("cpu"), 4)
    meter = MemoryMeter(torch.device("cpu"))
    rates = [engine.step([targets(1.0)], 1, meter).learning_rate for _ in range(4)]
    assert rates == [0.5, 0.375, 0.25, 0.125]


def test_a_snapshot_brings_back_weights_and_a_new_optimizer() -> None:
    engine = build(NativeEngine, OneWeight(), dataclasses.replace(FULL, learning_rate=0.5), current("cpu"), 4)
    before = engine.snapshot()
    engine.step([targets(1.0)], 1, MemoryMeter(torch.device("cpu")))
    assert float(engine.module.weight) != 1.0
    engine.restore(before)
    assert float(engine.module.weight) == 1.0
    assert engine.optimizer.state_dict()["state"] == {}
    assert engine.scheduler.last_epoch == 0
