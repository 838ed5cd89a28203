"""Saving and resuming: model, optimizer, scheduler, random state and data position, together.

A save is a folder `update-000010` that appears under its name only when it is complete.
"""

from __future__ import annotations

import json
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from trainers.engine import Engine
from trainers.errors import UserError
from trainers.ranks import World

# Frozen weights are not saved: they are the base model's. Flat optimizer keys survive another split of the model.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True, ignore_frozen_params=True, strict=False)
_STATE = "state.json"


def save(folder: Path, engine: Engine, update: int, consumed_tokens: int, identity: str, world: World) -> Path:
    """Write a save of the state after `update` updates. Every rank must call it; returns the save's path.

    `identity` names the run's learning configuration and data: a resume under another one is refused.
    """
    target = folder / f"update-{update:06d}"
    partial = folder / f".partial-{update:06d}"
    if world.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    world.barrier()
    partial.mkdir(parents=True, exist_ok=True)  # by every rank: without a shared disk each machine has its own
    model, optimizer = get_state_dict(engine.module, engine.optimizer, options=_OPTIONS)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    state_dict_saver.save({"model": model, "optimizer": optimizer}, checkpoint_id=partial, no_dist=world.size == 1)
    torch.save(_random_state(), partial / f"random-{world.rank}.pt")
    world.barrier()
    if world.rank == 0:
        state = {
            "update": update,
            "consumed_tokens": consumed_tokens,
            "identity": identity,
            "scheduler": _plain(engine.scheduler.state_dict()),
            "num_workers": world.size,
        }
        (partial / _STATE).write_text(json.dumps(state))
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    world.barrier()
    return target


def latest(folder: Path) -> Path | None:
    """Return the newest complete save in a folder, or None."""
    found = sorted(p for p in folder.glob("update-*") if (p / _STATE).is_file()) if folder.is_dir() else []
    return found[-1] if found else None


def resume(path: Path, engine: Engine, identity: str, world: World) -> tuple[int, int]:
    """Load a save into a freshly built engine; return (updates done, tokens consumed)."""
    state = json.loads((path / _STATE).read_text())
    if state["identity"] != identity:
        raise UserError(
            f"{path} was saved by a run with another model, data or learning configuration; give another "
            "output_dir, or the configuration that it was saved with"
        )
    model, optimizer = get_state_dict(engine.module, engine.optimizer, options=_OPTIONS)
    state_dict_loader.load({"model": model, "optimizer": optimizer}, checkpoint_id=path, no_dist=world.size == 1)
    set_state_dict(
        engine.module, engine.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=_OPTIONS
    )
    engine.scheduler.load_state_dict(state["scheduler"])
    if state["update"] == 0:
        engine.reset_optimizer()  # saving gave an unused optimizer a state of one step
    mine = path / f"random-{world.rank}.pt"
    if mine.is_file():  # a larger world than the one that saved has ranks without a state: they keep the seed's
        _restore_random_state(torch.load(mine, weights_only=False))
    return int(state["update"]), int(state["consumed_tokens"])


def size_bytes(path: Path) -> int:
    """Return the bytes of a save on disk."""
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in state.items() if isinstance(v, (int, float, str, bool, list))}


def _random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate(), "numpy": np.random.get_state()}


def _restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
