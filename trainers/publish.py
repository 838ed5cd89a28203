"""What a run leaves for others: an adapter that peft loads, or a whole model that transformers loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from trainers.adapter import initial_weight, lora_config, saved_name
from trainers.config import TrialConfig
from trainers.engine import Engine
from trainers.layout import Layout
from trainers.model import hf_config, tokenizer
from trainers.weights import INDEX

ADAPTER, MODEL = "adapter", "model"


def publish(folder: Path, engine: Engine, config: TrialConfig, layout: Layout, again: bool) -> Path:
    """Write the trained weights, whole, into `folder/adapter` or `folder/model`. Every rank must call it.

    `again`: also where there is one already. Each stage of a pipeline is written by one rank that holds it. Raises
    RuntimeError where an adapter is not whole, or is what it was at the start.
    """
    from safetensors.torch import save_file

    adapter = config.learning.adapter != "full"
    target = folder / (ADAPTER if adapter else MODEL)
    partial = folder / f".partial-{target.name}"
    world, stage = layout.world, layout.at["pp"]
    if not again and world.broadcast(target.is_dir):
        return target
    if world.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    world.barrier()
    writes = all(at == 0 for degree, at in layout.at.items() if degree != "pp")
    # Every rank takes part in gathering; only one of a stage keeps what was gathered.
    mine = {saved_name(name): value.cpu().contiguous() for name, value in engine.trained() if writes}
    if writes:
        save_file(mine, partial / _part(stage, layout.plan.pp), {"format": "pt"})
    world.barrier()
    if world.rank == 0:
        (_join_adapter if adapter else _index_model)(partial, config, layout.plan.pp)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    world.barrier()
    return target


def _part(stage: int, stages: int) -> str:
    return "model.safetensors" if stages == 1 else f"model-{stage + 1:05d}-of-{stages:05d}.safetensors"


def _join_adapter(folder: Path, config: TrialConfig, stages: int) -> None:
    """Make peft's two files of the stages' parts."""
    from safetensors.torch import load_file, save_file

    parts = [folder / _part(stage, stages) for stage in range(stages)]
    tensors = {name: value for part in parts for name, value in load_file(part).items()}
    _check(tensors, config.learning.seed)
    save_file(
        {name.replace(".default.", "."): value for name, value in tensors.items()},
        folder / "adapter_model.safetensors",
        {"format": "pt"},
    )
    for part in parts:
        part.unlink()
    described = lora_config(config.learning)
    described.base_model_name_or_path = config.model
    described.revision = config.model_revision
    described.inference_mode = True
    described.save_pretrained(folder)


def _check(tensors: Mapping[str, torch.Tensor], seed: int) -> None:
    """Make sure that an adapter is whole, and has learned something: shards that were saved ungathered have not."""
    empty = [name for name, value in tensors.items() if not value.numel()]
    if empty or not tensors:
        raise RuntimeError(f"the adapter is not whole: {len(empty)} of its {len(tensors)} tensors are empty")
    # B starts at 0 and is what moves first; A has no gradient before it has.
    moved = [n for n, value in tensors.items() if not torch.equal(value, initial_weight(n, tuple(value.shape), seed))]
    if not any("lora_B" in name for name in moved):
        raise RuntimeError("the adapter is what it was before training")


def _index_model(folder: Path, config: TrialConfig, stages: int) -> None:
    """Write what makes the stages' parts a model folder: config, tokenizer and, where there are several, an index."""
    from safetensors import safe_open

    described = hf_config(config.model, config.model_revision)
    described.dtype = torch.float32  # trained weights are kept in it
    described.save_pretrained(folder)
    tokenizer(config.model, config.model_revision).save_pretrained(folder)
    if stages == 1:
        return
    index: dict[str, str] = {}
    for part in (_part(stage, stages) for stage in range(stages)):
        with safe_open(folder / part, framework="pt") as opened:
            index |= dict.fromkeys(opened.keys(), part)
    size = sum((folder / part).stat().st_size for part in set(index.values()))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=1))
