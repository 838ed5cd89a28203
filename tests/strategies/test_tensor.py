"""What the contract suite leaves open of tensor parallelism: other kinds of models, dropout, uneven pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.rank_pool import RankPool
from tests.strategies import cells
from tests.strategies.cells import SAMPLES, SHAPES, Cell
from tests.strategies.job import train
from tests.strategies.reference import Trace, reference
from tests.strategies.test_contract import LIMITS, far, learning_of, whole
from tests.trainers import test_parity as proofs
from trainers.config import LearningConfig, SystemConfig
from trainers.layout import Layout
from trainers.plan import Plan
from trainers.ranks import current
from trainers.shape import ModelShape
from trainers.strategies import illegal
from trainers.weights import held

pytestmark = pytest.mark.slow  # all on DTensors: what the contract suite has of them runs every day
Ranks = Callable[[int], RankPool]

KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},  # biases on queries, keys and values
    "mistral": {"sliding_window": 8, "tie_word_embeddings": False},
    "llama": {"attention_bias": True, "tie_word_embeddings": False},  # a bias on what is divided over its inputs
}
PADDING = 70  # a row of the second rank's: its embedding is not trained


def shape_of(kind: str) -> ModelShape:
    return replace(SHAPES["llama"], name=kind, model_type=kind, **KINDS[kind])


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model of each kind."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("others")
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim", "max_position_embeddings")  # fmt: skip
    for kind, special in KINDS.items():
        torch.manual_seed(7)
        sizes = {name: getattr(SHAPES["llama"], name) for name in names}
        config = AutoConfig.for_model(kind, **sizes, **special, pad_token_id=PADDING)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        model.save_pretrained(folder / kind)
    return folder


def cell(kind: str, adapter: str, strategy: str, workers: int, **more: Any) -> Cell:
    system = SystemConfig(strategy=strategy, num_workers=workers, tp=2, **more)
    return Cell(replace(system, micro_batch_size=SAMPLES // 2 // (workers // 2)), adapter, kind)


def train_other(shape: ModelShape, *job: Any) -> Trace:
    cells.SHAPES[shape.model_type] = shape
    return train(*job)


@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds(kind: str, adapter: str, others: Path, ranks: Ranks) -> None:
    one = cell(kind, adapter, "fsdp2", 2)
    learning = learning_of(one, "sgd")
    right = reference(others, kind, learning, "sgd", 2, SAMPLES, "float64")
    found = ranks(2).run(train_other, shape_of(kind), others, one, learning, "sgd", 2, "float64")
    assert far(whole(found), right) <= LIMITS["float64", "sgd"]


def dropped(models: Path, one: Cell, learning: LearningConfig) -> Trace:
    torch.manual_seed(3)
    return train(models, one, learning, "sgd", 2, "float64")


def test_dropout_of_an_adapter_is_alike_on_the_ranks_of_a_group(models: Path, ranks: Ranks) -> None:
    one = cell("qwen3", "lora", "ddp", 2)
    learning = replace(learning_of(one, "sgd"), lora_dropout=0.3)
    found = whole(ranks(2).run(dropped, models, one, learning))  # which compares what every rank holds
    without = ranks(2).run(dropped, models, one, learning_of(one, "sgd"))
    assert far(found, without[0]) > 1e-3


def in_half(models: Path, one: Cell, learning: LearningConfig) -> Trace:
    return train(models, one, learning, "adamw", 2, "bfloat16")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_half_precision(adapter: str, strategy: str, models: Path, ranks: Ranks) -> None:
    one = cell("qwen3", adapter, strategy, 4)
    learning = learning_of(one, "adamw")
    right = reference(models, "qwen3", learning, "adamw", 2, SAMPLES, "float64")
    found = whole(ranks(4).run(in_half, models, one, learning))
    for got, wanted in zip(found.losses + found.norms, right.losses + right.norms, strict=True):
        assert got == pytest.approx(wanted, rel=0.03)


def uneven(rows: int, columns: int) -> list[bool]:
    """Shard a matrix over tp, along either side, then over dp; tell whether `held` names what this rank holds."""
    layout = Layout(Plan(dp_shard=2, tp=2), current("cpu"))
    matrix = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    right = []
    for style in (ColwiseParallel(), RowwiseParallel()):
        linear = nn.Linear(columns, rows, bias=False)
        with torch.no_grad():
            linear.weight.copy_(matrix)
        parallelize_module(linear, layout.mesh["tp"], style, src_data_rank=None)
        fully_shard(linear, mesh=layout.shard)
        weight: Any = linear.weight
        index = tuple(slice(start, start + length) for start, length in zip(*held(weight), strict=True))
        right.append(torch.equal(matrix[index], weight.to_local()))
    return right


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (10, 6), (6, 10), (2, 2)])
def test_what_a_rank_holds_of_a_matrix(rows: int, columns: int, ranks: Ranks) -> None:
    assert all(all(right) for right in ranks(4).run(uneven, rows, columns))


@pytest.mark.parametrize(
    ("tp", "adapter", "strategy", "rules"),
    [
        (2, "full", "fsdp2", []),
        (2, "qlora", "ddp", ["tp=2 with adapter=qlora: quantized weights cannot be sliced; use full or lora"]),
        (3, "full", "ddp", [
            "tp=3 does not divide the model's 8 attention heads; tp can be 1, 2, 4",
            "tp=3 does not divide the model's 4 key and value heads; tp can be 1, 2, 4",
            "tp=3 does not divide the model's 128 rows of vocabulary; tp can be 1, 2, 4",
        ]),
        (8, "full", "ddp", ["tp=8 does not divide the model's 4 key and value heads; tp can be 1, 2, 4"]),
    ],
)  # fmt: skip
def test_rules(tp: int, adapter: str, strategy: str, rules: list[str]) -> None:
    system = SystemConfig(strategy=strategy, num_workers=tp, tp=tp)
    learning = LearningConfig(adapter=adapter)  # type: ignore[arg-type]
    assert illegal(replace(Cell(system, adapter, "llama").setting(learning), dtype=None)) == rules


def test_the_proof_within_a_trial_in_half_precision(ranks: Ranks) -> None:
    """Partial sums are rounded before they are added: the most that right code is ever from one process."""
    proofs.test_right_code_is_equal("tp", "bfloat16", ranks)
