"""Does every strategy that makes sense on one device train as it should there, and what does it take?

Run:    python benchmarks/gpu_check.py                            # a Qwen3-0.6B-shaped model in bfloat16, on one GPU
        python benchmarks/gpu_check.py --model embedded --device cpu     # the same cases, small, anywhere
Takes:  about five minutes on an H100. Prints a line a case, and exits with 1 where one fails. Then memory by account,
        speed and mfu of some configurations, and a real out-of-memory (--part measure), written to results/.
Reads:  `loss` and `norm`, relative differences of the first updates from one process in float32; `limit`, four times
        what the order of the samples changes in the case's own dtype; the peak of memory; and the rate of tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# As a script this file's folder is first on the path, and not the project's.
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.gpu_memory import measure
from trainers import model
from trainers.config import LearningConfig, RunConfig, SystemConfig, TrialConfig, from_tree
from trainers.job import run_rank
from trainers.prepare import TrialData, prepare
from trainers.ranks import World, current
from trainers.result import GIB, Reference, TrialResult
from trainers.shape import ModelShape
from trainers.timing import summarize
from trainers.tolerance import LEAST_TOLERANCE, LIMITS, TIMES_NOISE

PRESETS = Path(__file__).resolve().parent.parent / "search_spaces" / "models"
UPDATES = 4
SYSTEMS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp selective": {"activation_checkpointing": "selective"},
    "ddp full": {"activation_checkpointing": "full"},
    "ddp offload": {"offload_activations": True},
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp2 full": {"strategy": "fsdp2", "activation_checkpointing": "full"},
    "fsdp2 offload": {"strategy": "fsdp2", "offload": "parameters"},
    "zero 1": {"strategy": "zero", "zero_stage": 1},
    "zero 2": {"strategy": "zero", "zero_stage": 2},
    "zero 3": {"strategy": "zero", "zero_stage": 3},
}
CASES = {
    **{f"full {name}": ("full", system) for name, system in SYSTEMS.items()},
    **{f"{adapter} {name}": (adapter, SYSTEMS[name]) for adapter in ("lora", "qlora") for name in
       ("ddp", "ddp full", "fsdp2", "zero 3")},
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="check every strategy on one device")
    parser.add_argument("--model", default="qwen3-0.6b", help="embedded, a preset of search_spaces/models, or a folder")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--part", default="all", choices=("all", "check", "measure"))
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a row, of the part measure")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    chosen = parser.parse_args()
    world = current(chosen.device)
    with located(chosen.model) as folder:
        status = check(folder, chosen.dtype, chosen.only, world) if chosen.part in ("all", "check") else 0
        if chosen.part in ("all", "measure"):
            shape = model.shape(folder)
            vocabulary = shape.vocab_size if shape is not None else 256
            status |= not measure(folder, vocabulary, chosen.seq_len, world)
        return status


def check(folder: str, dtype: str, only: str, world: World) -> int:
    """Run the cases and print them; return the exit status."""
    base = TrialConfig(model=folder, run=RunConfig(device=world.device.type, max_updates=UPDATES))  # type: ignore[arg-type]
    tokens = prepare(base, model.tokenizer("embedded"))[base.learning.seq_len]
    print(f"{torch.cuda.get_device_name() if world.device.type == 'cuda' else 'cpu'}, torch {torch.__version__}")
    print(f"{'case':24} {'loss':>8} {'norm':>8} {'limit':>8} {'miniature':>10} {'GiB':>7} {'tok/s':>8} {'step s':>7}")
    right: dict[str, Reference] = {}
    noise: dict[str, Reference] = {}
    failed = 0
    for name, (adapter, tree) in CASES.items():
        if only not in name:
            continue
        started = time.perf_counter()
        try:
            if adapter not in right:
                right[adapter] = measured(base, adapter, {}, "float32", tokens, world, "reference")[1]
            proof = "steps" if adapter in noise else "reference"
            result, reference = measured(base, adapter, tree, dtype, tokens, world, proof)
        except Exception as error:  # a case that fails is a line, not the end
            print(f"{name:24} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
            failed += 1
            continue
        noise.setdefault(adapter, reference)
        failed += not shown(name, result, right[adapter], noise[adapter], time.perf_counter() - started)
    print(f"{failed} failed")
    return 1 if failed else 0


def measured(
    base: TrialConfig, adapter: str, tree: dict[str, Any], dtype: str, tokens: TrialData, world: World, proof: str
) -> tuple[TrialResult, Any]:
    """Train a case; return what was measured, and what one process did where that was asked for."""
    learning = LearningConfig(adapter=adapter, param_dtype=dtype, learning_rate=1e-4, global_batch_size=16)  # type: ignore[arg-type]
    system = from_tree(SystemConfig, {"micro_batch_size": 4, **tree})
    run = dataclasses.replace(base.run, proof=proof)  # type: ignore[arg-type]
    result = run_rank(dataclasses.replace(base, learning=learning, system=system, run=run), tokens, world)
    assert result.proof is not None
    return result, result.proof.reference


def shown(name: str, result: TrialResult, right: Reference, noise: Reference, seconds: float) -> bool:
    """Print a case; tell whether it is within what rounding explains."""
    assert result.proof is not None
    first, small = result.proof.first, result.proof.miniature
    loss = dataclasses.replace(first, grad_norms=()).difference(dataclasses.replace(right.first, grad_norms=()))
    norm = dataclasses.replace(first, losses=()).difference(dataclasses.replace(right.first, losses=()))
    # The order of the samples, and one process's own distance from float32.
    limit = max(
        LEAST_TOLERANCE[noise.dtype], TIMES_NOISE * noise.noise, TIMES_NOISE * noise.first.difference(right.first)
    )
    figures = summarize(result)
    peak = max(m.reserved for m in result.memory.values()) / GIB
    good = loss <= limit and norm <= limit and (small is None or small.difference <= LIMITS[small.dtype])
    print(
        f"{name:24} {loss:8.1e} {norm:8.1e} {limit:8.1e} {small.difference if small else float('nan'):10.1e} "
        f"{peak:7.3f} {figures.get('tokens_per_second', 0):8.0f} {figures.get('step_time_s', 0):7.3f}"
        f"{'' if good else '  DIFFERS'}   ({seconds:.0f} s)",
        flush=True,
    )
    return good


@contextmanager
def located(name: str) -> Iterator[str]:
    """Give a model: the embedded one, a folder, or random weights of a preset's shape."""
    preset = PRESETS / f"{name}.yaml"
    if not preset.is_file():
        yield model.locate(name)
        return
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        save_random(ModelShape.from_yaml(preset), Path(folder))
        yield folder


def save_random(shape: ModelShape, folder: Path) -> None:
    """Save random weights of a shape, in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    given = {name: value for name, value in shape.to_hf_config().items() if name != "dtype"}
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
