"""Context parallelism: what the contract suite cannot see of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.rank_pool import RankPool
from tests.strategies.cells import SHAPES, Cell
from tests.strategies.reference import exact_norms
from trainers.config import LearningConfig, SystemConfig, from_tree
from trainers.context_attention import FUNCTIONS, part
from trainers.layout import Layout
from trainers.memory import MemoryMeter
from trainers.plan import Plan
from trainers.ranks import current
from trainers.shape import ModelShape
from trainers.strategies import DIMENSIONS, STRATEGIES, Setting

Ranks = Callable[[int], RankPool]
ROW = (5, 3, 9, 4, 8, 2, 7)  # 6 of them are targets: all but the first
METHODS = ("ulysses", "allgather")


def cell(**system: Any) -> Cell:
    return Cell(from_tree(SystemConfig, {"num_workers": system.get("cp", 1), **system}), "full", "llama")


def losses_of_row(folder: Path, chosen: Cell) -> tuple[float, float, int]:
    """Return the loss sum of training, of evaluation (before it) and the targets of ROW that this rank was given."""
    setting = chosen.setting(LearningConfig(adapter="full"))
    layout = Layout(setting.plan, current("cpu"))
    strategy = STRATEGIES[chosen.system.strategy]
    engine: Any = strategy.make_engine(str(folder / "llama"), None, setting, layout, 1, prepare=exact_norms)
    ids = torch.tensor([ROW])
    batch = {"input_ids": ids, "labels": ids.clone()}
    try:
        evaluated = engine.evaluate([batch])
        trained = engine.step([batch], len(ROW) - 1, MemoryMeter(layout.device)).loss_sum
        return trained, evaluated, int((engine._prepare(batch)["targets"] != -100).sum())
    finally:
        engine.close()


@pytest.mark.parametrize("method", METHODS)
def test_a_row_of_odd_length_keeps_its_targets_and_its_loss(method: str, models: Path, ranks: Ranks) -> None:
    whole, _, targets = losses_of_row(models, cell(strategy="ddp"))
    assert targets == 6
    found = ranks(2).run(losses_of_row, models, cell(strategy="ddp", cp=2, cp_method=method))
    assert sum(targets for _, _, targets in found) == 6
    assert [loss for trained, evaluated, _ in found for loss in (trained, evaluated)] == pytest.approx([whole] * 4)


def attention_of_parts(method: str, heads: int, key_value_heads: int, size: int) -> float:
    """Return how far this rank's attention and its gradients are from its part of the whole sequence's."""
    layout = Layout(Plan.of(size, cp=size), current("cpu"))
    layer: Any = SimpleNamespace(context_mesh=layout.mesh["cp"])
    torch.manual_seed(0)
    whole = [torch.randn(2, h, 8 * size, 4, dtype=torch.float64) for h in (heads, key_value_heads, key_value_heads)]
    whole = [t.requires_grad_() for t in whole]
    weight = torch.randn(2, heads, 8 * size, 4, dtype=torch.float64)
    right = scaled_dot_product_attention(*whole, is_causal=True, scale=0.3, enable_gqa=True)
    wanted = [right, *torch.autograd.grad((right * weight).sum(), whole)]

    def mine(t: torch.Tensor) -> torch.Tensor:
        return part(t.detach().transpose(1, 2).flatten(2), layout.at["cp"], size, method)

    parts = [mine(t).unflatten(2, (t.shape[1], -1)).transpose(1, 2).requires_grad_() for t in whole]
    out, _ = FUNCTIONS[method](layer, *parts, None, scaling=0.3)
    # The gradient of the output is given transposed: collectives must not see its strides.
    gradients = torch.autograd.grad(
        out, parts, mine(weight).unflatten(2, (heads, -1)).transpose(1, 2).contiguous().transpose(1, 2)
    )
    found = [out.flatten(2), *(g.transpose(1, 2).flatten(2) for g in gradients)]
    return max(float((f - mine(w)).detach().abs().max()) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("size", "heads", "key_value_heads"), [(2, 2, 1), (4, 4, 1), (4, 8, 2), (4, 12, 6), (2, 6, 6)])
def test_attention_and_its_gradients_are_those_of_the_whole_sequence(
    method: str, size: int, heads: int, key_value_heads: int, ranks: Ranks
) -> None:
    assert max(ranks(size).run(attention_of_parts, method, heads, key_value_heads, size)) < 1e-12


def test_gathering_asks_for_no_number_of_heads(ranks: Ranks) -> None:
    assert max(ranks(2).run(attention_of_parts, "allgather", 3, 1, 2)) < 1e-12


def test_parts_cover_a_sequence_and_share_out_causal_work() -> None:
    tokens = torch.arange(24)[None]
    assert part(tokens, 1, 3, "ulysses").tolist() == [list(range(8, 16))]
    mirrored = [part(tokens, rank, 3, "allgather") for rank in range(3)]
    assert mirrored[0].tolist() == [[0, 1, 2, 3, 20, 21, 22, 23]]
    assert torch.equal(torch.cat(mirrored, 1).sort().values, tokens)
    assert len({int(p.sum()) for p in mirrored}) == 1


RULES = [
    ({"cp": 3}, {}, "cp=3: cp_method=ulysses shares out 8 attention heads, so cp must be one of 1, 2, 4, 8"),
    ({"cp": 2, "attn_implementation": "eager"}, {}, "attn_implementation=eager beside cp=2"),
    ({"cp": 2, "attn_implementation": "flash_attention_2"}, {}, "attn_implementation=flash_attention_2 beside cp=2"),
    ({"cp": 2, "cp_method": "ring"}, {}, "cp_method=ring on cpu: only CUDA has it, use ulysses or allgather"),
    ({"cp": 2}, {"sliding_window": 16}, "attends to a window of 16 tokens"),
]


@pytest.mark.parametrize(("system", "shape", "rule"), RULES)
def test_what_is_illegal_is_said_in_one_sentence(system: dict[str, Any], shape: dict[str, Any], rule: str) -> None:
    chosen = cell(**system)
    plan = Plan.of(chosen.system.num_workers, cp=chosen.system.cp)
    model = ModelShape(**{**vars(SHAPES["llama"]), **shape})
    (found,) = DIMENSIONS["cp"].validate(Setting(LearningConfig(), chosen.system, plan, model, "cpu"))
    assert rule in found


def test_tensor_parallelism_leaves_fewer_heads_to_share_out() -> None:
    chosen = cell(cp=4, num_workers=16)
    setting = Setting(LearningConfig(), chosen.system, Plan(dp_shard=1, tp=4, cp=4), SHAPES["llama"], "cpu")
    (rule,) = DIMENSIONS["cp"].validate(setting)
    assert "cp=4 beside tp=4" in rule
    assert "one of 1, 2;" in rule
