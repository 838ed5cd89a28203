"""Peaks that others have published, and what this project says of the same configurations.

A row is compared only where the configuration can be said in this project's terms, like with like: allocated with
allocated, reserved with reserved. The others are printed with the reason why not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trainers import ledger
from trainers.config import LearningConfig, SystemConfig, from_tree
from trainers.ledger import MicroBatch
from trainers.result import GIB
from trainers.shape import ModelShape
from trainers.strategies import STRATEGIES, Setting
from trainers.task import Simulated, Task, highest

LLAMA_3_8B = ModelShape("Llama-3-8B", "llama", 4096, 14336, 32, 32, 8, 128, 128256, 131072, False)
LLAMA_3_3B = ModelShape("Llama-3.2-3B", "llama", 3072, 8192, 28, 24, 8, 128, 128256, 131072, True)
LLAMA_2_7B = ModelShape("Llama-2-7B", "llama", 4096, 11008, 32, 32, 32, 128, 32000, 4096, False)
LLAMA_2_70B = ModelShape("Llama-2-70B", "llama", 8192, 28672, 80, 64, 8, 128, 32000, 4096, False)


@dataclass(frozen=True)
class Published:
    """A measured peak and its configuration in our terms."""

    name: str
    gib: float
    kind: Literal["allocated", "reserved"]
    shape: ModelShape
    system: Mapping[str, Any]
    tokens: int
    """of a row; all rows are full"""
    source: str
    learning: Mapping[str, Any] = field(default_factory=dict)
    assumed: str = ""
    """what the source leaves out, or does otherwise"""

    def setting(self) -> Setting:
        typed = from_tree(SystemConfig, dict(self.system))
        plan = STRATEGIES[typed.strategy].plan(typed)
        rows = typed.micro_batch_size * plan.dp
        learned = from_tree(LearningConfig, {"adapter": "full", "global_batch_size": rows, **self.learning})
        return Setting(learned, typed, plan, self.shape, "cuda")

    def batch(self) -> MicroBatch:
        return MicroBatch(int(self.system.get("micro_batch_size", 1)), self.tokens, self.tokens)

    def task(self) -> Task:
        return Task(self.shape, self.setting(), self.batch())


@dataclass(frozen=True)
class Others:
    """What estimators that know only the number of weights say, GiB; None where they do not know the case."""

    accelerate: float
    deepspeed: float | None


GB = 1e9 / GIB
QV = {"adapter": "lora", "lora_targets": "q_proj,v_proj"}
TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
AO = "pytorch/ao, torchao/prototype/float8nocompile/README.md"
PEFT = "huggingface/peft, method_comparison/MetaMathQA/results/"
LITGPT = "Lightning-AI/litgpt, tutorials/resource-tables.md and config_hub/finetune/README.md"
FSDP = {"strategy": "fsdp2", "num_workers": 8}
PADDED = "the longest batch, 768 tokens; its padding mask and its float32 copies of the adapters' inputs are not ours"

ROWS = (
    Published("P01 8B fsdp2 selective", 82.4, "reserved", LLAMA_3_8B,
              {**FSDP, "activation_checkpointing": "selective", "micro_batch_size": 2}, 8192, TITAN),
    Published("P02 8B fsdp2", 53.12, "reserved", LLAMA_3_8B, FSDP, 4096, AO, assumed="micro batch 1; GB is GiB"),
    Published("P02 8B fsdp2 full", 28.07, "reserved", LLAMA_3_8B, {**FSDP, "activation_checkpointing": "full"}, 4096,
              AO, assumed="micro batch 1; GB is GiB"),
    Published("P07 3B LoRA 32 q,v", 20.76, "reserved", LLAMA_3_3B, {"micro_batch_size": 4}, 768, PEFT,
              {**QV, "lora_rank": 32}, PADDED),
    Published("P07 3B LoRA 64 q,v", 21.00, "reserved", LLAMA_3_3B, {"micro_batch_size": 4}, 768, PEFT,
              {**QV, "lora_rank": 64}, PADDED),
    Published("P07 3B LoRA 10 mlp", 23.00, "reserved", LLAMA_3_3B, {"micro_batch_size": 4}, 768, PEFT,
              {"adapter": "lora", "lora_rank": 10, "lora_targets": "gate_proj,up_proj,down_proj"}, PADDED),
    Published("P08 7B LoRA micro 1", 21.30 * GB, "allocated", LLAMA_2_7B, {}, 2048, LITGPT, {**QV, "lora_rank": 8},
              "rank 8 on q and v"),
    Published("P08 7B LoRA micro 2", 29.07 * GB, "allocated", LLAMA_2_7B, {"micro_batch_size": 2}, 2048, LITGPT,
              {**QV, "lora_rank": 8}, "rank 8 on q and v"),
    Published("P09 8B LoRA 32 q,v", 19.73 * GB, "allocated", LLAMA_3_8B, {}, 512, LITGPT, {**QV, "lora_rank": 32}),
    Published("P11 70B LoRA zero 3", 64 * GB, "reserved", LLAMA_2_70B,
              {"strategy": "zero", "zero_stage": 3, "num_workers": 8, "micro_batch_size": 8,
               "activation_checkpointing": "full"}, 2048,
              "huggingface/peft, docs/source/accelerate/deepspeed.md", {"adapter": "lora", "lora_rank": 8},
              "of the device, so that context and NCCL are in it"),
)  # fmt: skip
REFUSED = {
    "P02 8B fsdp2 every 2nd layer": "we recompute all blocks or none",
    "P03 3B full": "weights and moments in bfloat16, loss in pieces: we train float32 weights",
    "P04 8B full, one device": "paged 8-bit optimizer, its step in the backward pass",
    "P05 8B LoRA, QLoRA": "rank, length and micro batch are not told",
    "P06 3B full": "weights and moments in bfloat16: we train float32 weights",
    "P08 7B LoRA micro 4": "it ran out of memory, and has no peak",
    "P10 TinyLlama": "length is not told; weights and moments in bfloat16",
}


def others(row: Published) -> Others:
    """Return what accelerate estimate-memory and DeepSpeed's estimators say of a row."""
    from accelerate.commands.estimate import estimate_training_usage  # noqa: TID251 (to be compared with)
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    weights = row.shape.num_parameters
    accelerate = max(estimate_training_usage(4 * weights, "bfloat16").values()) / GIB
    ranks, stage = row.setting().plan.world, row.system.get("zero_stage")
    if stage is None and row.system.get("strategy") != "fsdp2":
        return Others(accelerate, None)
    if stage in (1, 2):
        needs = estimate_zero2_model_states_mem_needs(weights, ranks, 1, cpu_offload=False)
    else:  # FSDP2 divides as stage 3 does
        largest = row.shape.vocab_size * row.shape.hidden_size
        needs = estimate_zero3_model_states_mem_needs(
            weights, largest, ranks, 1, cpu_offload=False, cpu_offload_params=False, zero_init=True
        )
    return Others(accelerate, needs[1] / GIB)


def compared(row: Published, found: Simulated) -> dict[str, Any]:
    """Return a row's figures in GiB, and how far the simulation is off."""
    predicted = ledger.peak(ledger.predict(row.shape, row.setting(), row.batch()))[1].total / GIB
    told = others(row)
    figures: dict[str, Any] = {
        "row": row.name, "kind": row.kind, "published": row.gib, "ledger_allocated": predicted,
        "accelerate": told.accelerate, "deepspeed": told.deepspeed, "assumed": row.assumed, "source": row.source,
    }  # fmt: skip
    if isinstance(found, str):
        return {**figures, "refused": found}
    allocated, reserved = highest(found, "allocated", "load") / GIB, highest(found, "reserved", "load") / GIB
    like = reserved if row.kind == "reserved" else allocated
    return {**figures, "allocated": allocated, "reserved": reserved, "error": like / row.gib - 1}
