"""The proof within a trial: right code passes it, and every planted fault is caught, in float32 and bfloat16."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sweeps.parity import judge
from tests.rank_pool import RankPool
from tests.trainers.tiny import changed, config, data, train_here
from trainers import token_loss
from trainers.config import SystemConfig, TrialConfig, from_tree
from trainers.data import tokenize
from trainers.deepspeed_engine import DeepSpeedEngine
from trainers.embedded import model as embedded
from trainers.engine import NativeEngine
from trainers.prepare import TrialData
from trainers.ranks import current
from trainers.result import TrialResult
from trainers.rows import from_records
from trainers.strategies import STRATEGIES

Ranks = Callable[[int], RankPool]

SYSTEMS = {
    "ddp": {"strategy": "ddp"},
    "fsdp2": {"strategy": "fsdp2", "activation_checkpointing": "full"},
    "zero": {"strategy": "zero", "zero_stage": "2"},
    "pp": {"strategy": "ddp", "pp": "2", "pp_schedule": "interleaved_1f1b"},
    "cp": {"strategy": "fsdp2", "cp": "2"},
    "tp": {"strategy": "fsdp2", "tp": "2"},
}


def job(system: dict[str, str], **learning: Any) -> TrialConfig:
    chosen = from_tree(SystemConfig, {"num_workers": "2", "micro_batch_size": "1", **system})
    base = changed(config(**learning), max_updates=2, proof="reference")
    return dataclasses.replace(base, system=chosen)


def uneven() -> TrialData:
    """Rows of 3 targets and of 60, so that a mean of means is far from the mean."""
    rows = [{"prompt": f"Say {i}.", "completion": "ok" if i % 2 else "abcdefghij" * 6} for i in range(10)]
    tokenizer = embedded.tokenizer()
    train, held = (tokenize(from_records(part, "test"), tokenizer, seq_len=256)[0] for part in (rows[:8], rows[8:]))
    assert tokenizer.pad_token_id is not None
    return TrialData(train, held, tokenizer.pad_token_id)


def verdict(result: TrialResult) -> str:
    assert result.proof is not None
    assert result.proof.reference is not None
    assert result.proof.reference.source == "one process"
    return judge(result.proof, result.proof.reference, "one process").verdict


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("zero", "float32"), ("pp", "float32"), *((name, "bfloat16") for name in ("fsdp2", "zero"))],
)
def test_right_code_is_equal(name: str, dtype: str, ranks: Ranks) -> None:
    results = ranks(2).run(train_here, job(SYSTEMS[name], param_dtype=dtype), data(train_rows=8))
    assert [verdict(r) for r in results] == ["EQUAL", "EQUAL"]


def mean_of_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over each rank's targets, averaged over the ranks."""
    size = current("cpu").size
    for kind in (NativeEngine, DeepSpeedEngine):
        right = kind.step

        def wrong(self: Any, batches: Any, window_targets: int, meter: Any, right: Any = right) -> Any:
            own = sum(int((batch["labels"] != -100).sum()) for batch in batches)
            alone = self._layout.world.size == 1
            return right(self, batches, window_targets if alone else own * size, meter)

        monkeypatch.setattr(kind, "step", wrong)


def dropped_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank's share of the gradient is lost."""
    rank, right = current("cpu").rank, token_loss.loss_of

    def wrong(model: Any, batch: Any) -> torch.Tensor:
        loss = right(model, batch)
        return loss if rank == 0 or not loss.requires_grad else loss.detach() + 0.0 * loss

    monkeypatch.setattr(token_loss, "loss_of", wrong)


def divided_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed divides by accumulation, as it does when it is not told otherwise, after we did."""
    right = DeepSpeedEngine._initialize

    def wrong(self: Any) -> Any:
        made = right(self)
        backward = made.backward
        made.backward = lambda loss, **options: backward(loss / 2, **options)
        return made

    monkeypatch.setattr(DeepSpeedEngine, "_initialize", wrong)


def train_wrong(fault: Callable[[pytest.MonkeyPatch], None], trial: TrialConfig, tokens: TrialData) -> TrialResult:
    """Train with a fault that does not touch the one process that is compared with."""
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        return train_here(trial, tokens)


@pytest.mark.parametrize(
    ("fault", "name", "dtype"),
    [
        (mean_of_means, "ddp", "float32"),
        (mean_of_means, "zero", "bfloat16"),
        (dropped_gradient, "fsdp2", "float32"),
        (dropped_gradient, "ddp", "bfloat16"),
        (divided_twice, "zero", "float32"),
        (divided_twice, "zero", "bfloat16"),
    ],
)
def test_a_planted_fault_is_caught(fault: Callable[..., None], name: str, dtype: str, ranks: Ranks) -> None:
    """By the first updates alone, too: the miniature is not needed for it."""
    result = ranks(2).run(train_wrong, fault, job(SYSTEMS[name], param_dtype=dtype), uneven())[0]
    assert verdict(result) == "SEMANTICS_DIFFER"
    proof = dataclasses.replace(result.proof, miniature=None)
    assert proof.reference is not None
    assert judge(proof, proof.reference, "one process").verdict == "SEMANTICS_DIFFER"
    assert result.proof.miniature.difference > 1e-3


@pytest.mark.parametrize("name", ["ddp", "zero", "cp", "tp"])
def test_a_step_of_a_small_model_equals_one_process(name: str, ranks: Ranks) -> None:
    trial = changed(job(SYSTEMS[name]), proof="steps")
    for result in ranks(2).run(train_here, trial, data(train_rows=8)):
        small = result.proof.miniature
        assert small.dtype == ("float32" if name == "zero" else "float64")
        assert small.difference <= (1e-5 if name == "zero" else 1e-10)
        assert result.proof.reference is None


def test_dropout_is_off_for_the_proof(ranks: Ranks) -> None:
    """The first updates without dropout are those of a run that has none; the trained ones are others."""
    plain, dropped = (
        ranks(2).run(train_here, job(SYSTEMS["ddp"], lora_dropout=rate), data(train_rows=8))[0] for rate in (0.0, 0.3)
    )
    assert dropped.proof.first == plain.proof.first
    assert verdict(dropped) == "EQUAL"
    assert [u.loss for u in plain.updates] == list(plain.proof.first.losses)
    assert dropped.updates[1].loss != plain.updates[1].loss


def test_a_model_that_does_not_fit_one_process_is_its_own_reference(ranks: Ranks) -> None:
    result = ranks(2).run(train_too_large, job(SYSTEMS["fsdp2"]), data(train_rows=8))[0]
    assert result.proof.reference.source == "this trial"
    assert result.proof.reference.first.difference(result.proof.first) == 0
    assert result.proof.reference.noise < 1e-5


def train_too_large(trial: TrialConfig, tokens: TrialData) -> TrialResult:
    def out_of_memory(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(STRATEGIES["ddp"], "make_engine", out_of_memory)
        return train_here(trial, tokens)
