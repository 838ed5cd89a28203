"""The closed form against sums by hand and published counts; tests/strategies holds it to the simulation."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from trainers.config import LearningConfig, SystemConfig, from_tree
from trainers.ledger import MicroBatch, kept_of_block, parameters, peak, predict
from trainers.shape import ModelShape
from trainers.strategies import NATIVE, STRATEGIES, Setting

LLAMA_8B = ModelShape("llama-3.1-8b", "llama", 4096, 14336, 32, 32, 8, 128, 128256, 131072, False)
QWEN_600M = ModelShape("qwen3-0.6b", "qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 40960, True, qk_norm=True)
TOKEN = MicroBatch(rows=1, tokens=1, heads=1)


def setting(shape: ModelShape, system: dict[str, Any], device: str = "cuda", **learning: Any) -> Setting:
    typed = from_tree(SystemConfig, system)
    learned = from_tree(LearningConfig, {"adapter": "full", "global_batch_size": 64, **learning})
    return Setting(learned, typed, STRATEGIES[typed.strategy].plan(typed), shape, device)


def test_six_hundred_million_parameters_at_16_bytes_are_8_94_gib() -> None:
    """The worked value of the design: 0.6e9 × 16 = 9.6e9 bytes, before activations, logits and buffers."""
    assert NATIVE.total == 16
    assert 0.6e9 * NATIVE.total / 2**30 == pytest.approx(8.94, abs=0.005)
    found = predict(QWEN_600M, setting(QWEN_600M, {}), TOKEN)["optimizer"]
    assert found.total == pytest.approx(QWEN_600M.num_parameters * 16, rel=1e-3)


def test_what_a_block_keeps_per_token() -> None:
    """bfloat16: 16 h + 4 q + 4 k + 8 f + 8 + 4 heads, read off autograd's saved tensors: 200,840 bytes for Llama-3-8B.

    Qwen3-0.6B 71,848, with its norms of queries and keys: 6 q + 6 k + 4 heads + 4 key-value heads.
    """
    assert kept_of_block(LLAMA_8B, setting(LLAMA_8B, {}), TOKEN) == 200_840
    assert kept_of_block(QWEN_600M, setting(QWEN_600M, {}), TOKEN) == 71_848
    # Of an adapter's base no weight is trained: what norms scale is not kept. 12 h, and 14 r of the adapters.
    lora = kept_of_block(LLAMA_8B, setting(LLAMA_8B, {}, adapter="lora", lora_rank=8), TOKEN)
    assert lora == 200_840 - 4 * 4096 + 14 * 8


def test_the_logits_take_12_bytes_each_in_the_backward_pass() -> None:
    few, many = (
        predict(QWEN_600M, setting(QWEN_600M, {}, param_dtype="float32"), MicroBatch(1, 4096, heads))["backward"]
        for heads in (3000, 4000)
    )
    assert many.temporary - few.temporary == 12 * 1000 * 151936


def test_lora_on_one_gpu_takes_what_was_published() -> None:
    """Llama-3-8B, rank 32 on q and v, bfloat16, one row of 512 tokens: 19.73 GB (litgpt, config_hub/finetune)."""
    adapter = {"adapter": "lora", "lora_rank": 32, "lora_targets": "q_proj,v_proj"}
    found = peak(predict(LLAMA_8B, setting(LLAMA_8B, {}, **adapter), MicroBatch(1, 512, 512)))[1]
    assert found.total == pytest.approx(19.73e9, rel=0.03)


@pytest.mark.parametrize(
    ("system", "weights", "state"),
    [
        ({"strategy": "ddp", "num_workers": 8}, 4, 8),
        ({"strategy": "fsdp2", "num_workers": 8}, 4 / 8, 8 / 8),
        ({"strategy": "fsdp2", "num_workers": 8, "dp_replicate": 2}, 4 / 4, 8 / 4),
        ({"strategy": "fsdp2", "num_workers": 8, "tp": 2}, 4 / 8, 8 / 8),
        ({"strategy": "zero", "zero_stage": 1, "num_workers": 8}, 2, 12 / 8),
        ({"strategy": "zero", "zero_stage": 3, "num_workers": 8}, 2 / 8, 12 / 8),
    ],
)
def test_the_state_of_a_rank(system: dict[str, Any], weights: float, state: float) -> None:
    found = predict(LLAMA_8B, setting(LLAMA_8B, system), TOKEN)["optimizer"]
    assert found.weights == pytest.approx(weights * LLAMA_8B.num_parameters, rel=1e-6)
    assert found.optimizer_state == pytest.approx(state * LLAMA_8B.num_parameters, rel=1e-6)


def test_a_quantized_base_takes_half_a_byte_a_weight_and_its_scales() -> None:
    """arXiv 2305.14314: 4 bits, 8 for the scale of 64, 32 for that of 256 of these: 4.127 bits a weight."""
    own = parameters(LLAMA_8B, setting(LLAMA_8B, {}, adapter="qlora"))
    matrices = sum(i * o for i, o in LLAMA_8B.linear_layers.values())
    assert (own.frozen_block - 2 * 2 * 4096) / matrices * 8 == pytest.approx(4.127, abs=0.001)


def test_it_imports_no_torch() -> None:
    """On a busy machine that takes a quarter of a minute, and a plan asks of thousands of candidates."""
    script = (
        "import sys; from trainers import ledger; from trainers.config import *; from trainers.shape import ModelShape;"
        "from trainers.strategies import STRATEGIES, Setting;"
        "shape = ModelShape('a', 'llama', 64, 128, 2, 4, 2, 16, 100, 64, True);"
        "rows = [SystemConfig(strategy=s, num_workers=2, options={o.name: o.default for o in STRATEGIES[s].options})"
        " for s in ('ddp', 'fsdp2', 'zero')];"
        "[ledger.predict(shape, Setting(LearningConfig(), r, STRATEGIES[r.strategy].plan(r), shape, 'cuda'),"
        " ledger.MicroBatch(1, 64, 64)) for r in rows];"
        "print([m for m in ('torch', 'peft', 'deepspeed', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_is_kept_in_host_memory_is_not_on_the_device() -> None:
    sharded = {"strategy": "fsdp2", "num_workers": 8, "offload": "parameters"}
    found = predict(LLAMA_8B, setting(LLAMA_8B, sharded), TOKEN)["optimizer"]
    assert (found.weights, found.gradients, found.optimizer_state) == (0, 0, 0)
    staged = {"strategy": "zero", "zero_stage": 2, "num_workers": 8, "offload": "optimizer"}
    found = predict(LLAMA_8B, setting(LLAMA_8B, staged), TOKEN)["optimizer"]
    assert found.weights == pytest.approx(2 * LLAMA_8B.num_parameters)
    assert found.optimizer_state == 0
    long = MicroBatch(1, 8192, 1)
    kept, offloaded = (
        predict(LLAMA_8B, setting(LLAMA_8B, {"offload_activations": on}), long)["forward"].activations
        for on in (False, True)
    )
    assert kept / offloaded == pytest.approx(32, rel=0.2)  # of 32 blocks one


def test_what_selective_recomputation_has_kept_is_not_made_again() -> None:
    """FSDP2 on two CPU workers, 8 rows of 544 tokens of which 359 have logits: a trial's trace counted 137.8 MiB."""
    embedded = ModelShape("embedded", "llama", 128, 344, 4, 4, 2, 32, 260, 4096, True)
    more = {"strategy": "fsdp2", "num_workers": 2, "micro_batch_size": 8, "activation_checkpointing": "selective"}
    one = setting(embedded, more, device="cpu", adapter="lora", lora_rank=8, global_batch_size=16)
    assert peak(predict(embedded, one, MicroBatch(8, 544, 359)))[1].total / 2**20 == pytest.approx(137.8, rel=0.02)


SIMULATED = {  # MiB at the peak, of the real code on fake tensors: a rank's row of 512 tokens; alone, with 3 before it
    "ddp": ({"num_workers": 2}, 10282.2, 12108.9),
    "fsdp2": ({"strategy": "fsdp2", "num_workers": 4}, 3582.4, 4150.8),
    "fsdp2, alone": ({"strategy": "fsdp2", "num_workers": 1}, 10282.2, 10972.0),
    "zero 1": ({"strategy": "zero", "zero_stage": 1, "num_workers": 2}, 9095.0, 9835.0),
    "zero 1, alone": ({"strategy": "zero", "zero_stage": 1, "num_workers": 1}, 12505.7, 13245.6),
    "zero 2": ({"strategy": "zero", "zero_stage": 2, "num_workers": 2}, 8740.6, 8883.1),
    "zero 2, alone": ({"strategy": "zero", "zero_stage": 2, "num_workers": 1}, 13288.1, 13430.6),
    "zero 3": ({"strategy": "zero", "zero_stage": 3, "num_workers": 4}, 6601.4, 6601.4),
    "zero 3, alone": ({"strategy": "zero", "zero_stage": 3, "num_workers": 1}, 14002.7, 14002.7),
    "tp": ({"num_workers": 2, "tp": 2}, 5141.7, 6232.1),
    "cp": ({"num_workers": 2, "cp": 2}, 10282.2, 11198.5),
}


@pytest.mark.parametrize("way", SIMULATED)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_peak_of_every_strategy_in_bfloat16(way: str, accumulation: int) -> None:
    system, *simulated = SIMULATED[way]
    ranks = system["num_workers"] // (system.get("tp", 1) * system.get("cp", 1))
    config = setting(QWEN_600M, system, global_batch_size=accumulation * ranks, param_dtype="bfloat16")
    phases = {name: a for name, a in predict(QWEN_600M, config, MicroBatch(1, 512, 512)).items() if name != "load"}
    assert peak(phases)[1].total / 2**20 == pytest.approx(simulated[accumulation > 1], rel=0.045)


@pytest.mark.parametrize(
    ("system", "simulated"),
    [
        ({"strategy": "zero", "zero_stage": 3, "num_workers": 1}, 2968.5),
        ({"strategy": "zero", "zero_stage": 3, "num_workers": 4}, 3189.4),
        ({"strategy": "zero", "zero_stage": 2, "num_workers": 4}, 2895.3),
        ({"strategy": "fsdp2", "num_workers": 2}, 2331.9),
    ],
)
def test_the_peak_of_an_adapter(system: dict[str, Any], simulated: float) -> None:
    """A rank alone gathers nothing, and uses frozen weights as they lie."""
    config = setting(QWEN_600M, system, global_batch_size=system["num_workers"], adapter="lora", param_dtype="bfloat16")
    found = peak(predict(QWEN_600M, config, MicroBatch(1, 512, 512)))[1]
    assert found.total / 2**20 == pytest.approx(simulated, rel=0.02)


def test_gradients_that_wait_in_a_bucket_are_gradients() -> None:
    """ZeRO-2 on one rank in float32, 8 updates: 8.62e6 numbers of 4 bytes, as summed before, and in the bucket."""
    small = ModelShape("small", "llama", 256, 704, 6, 8, 4, 32, 8192, 1024, False)
    config = setting(small, {"strategy": "zero", "zero_stage": 2}, "cpu", global_batch_size=8, param_dtype="float32")
    phases = predict(small, config, MicroBatch(1, 128, 128))
    assert phases["backward"].gradients == 2 * 4 * small.num_parameters == 68_970_496
    assert phases["backward"].temporary == pytest.approx(4 * small.num_parameters, rel=1e-3)  # a copy, as it is sent
    assert phases["optimizer"].gradients == 0  # by then one flat tensor has all, beside what AdamW makes of it
    assert phases["optimizer"].temporary == 3 * 4 * small.num_parameters


def test_deepspeed_keeps_sums_of_gradients_where_the_optimizer_is() -> None:
    """Stage 3 on 4 GPUs, all offloaded: of gradients a bucket of 5e8 numbers of 2 bytes stays on the device."""
    system = {"strategy": "zero", "zero_stage": 3, "num_workers": 4, "offload": "parameters"}
    found = predict(LLAMA_8B, setting(LLAMA_8B, system, param_dtype="bfloat16"), TOKEN)["optimizer"]
    assert (found.weights, found.optimizer_state) == (0, 0)
    assert found.gradients == 5e8 * 2
