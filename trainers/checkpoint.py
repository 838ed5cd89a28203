"""Saving and resuming: model, optimizer, scheduler, random state, data position and history, together.

A save is a folder `update-000010` that appears under its name only when it is complete.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException

from trainers.diagnose import OUT_OF_MEMORY, classify
from trainers.engine import Engine
from trainers.errors import UserError
from trainers.ranks import World
from trainers.result import History

_STATE = "state.json"

Identity = Mapping[str, Any]
"""What decides the course of learning, by dotted key: only a run of the same goes on from a save."""


def save(folder: Path, engine: Engine, history: History, identity: Identity, world: World) -> int:
    """Write a save of the state after the updates of `history`; return its bytes. Every rank must call it.

    A resume under another `identity` is refused.
    """
    update = len(history.updates)
    target, partial = folder / f"update-{update:06d}", folder / f".partial-{update:06d}"
    if world.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    world.barrier()
    partial.mkdir(parents=True, exist_ok=True)  # by every rank: a temporary folder is each machine's own
    engine.save(partial)
    torch.save(_random_state(world.device), partial / f"random-{world.rank}.pt")
    if world.rank == 0:
        state = {
            "update": update,
            "identity": dict(identity),
            "format": engine.format,
            "num_workers": world.size,
            "history": history.to_json(),
        }
        (partial / _STATE).write_text(json.dumps(state))
    size = world.sum([_own_bytes(partial, world.rank)])[0]  # also waits until every rank has written
    if world.rank == 0:
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    world.barrier()
    return int(size)


def complete_history(folder: Path, history: History, world: World) -> None:
    """Let the newest save, which was part of no history yet, know of itself."""
    if world.rank == 0:
        path = folder / f"update-{len(history.updates):06d}" / _STATE
        state = json.loads(path.read_text()) | {"history": history.to_json()}
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(state))
        partial.replace(path)


def latest(folder: Path, world: World) -> Path | None:
    """Return the newest complete save in a folder, or None: the same on every rank. Makes the folder.

    Raises UserError where the folder cannot be written, or where not all ranks see the same one.
    """
    found, marker = world.broadcast(lambda: _look(folder))
    unseen = world.sum([float(not marker.is_file())])[0]
    if world.rank == 0:
        marker.unlink()
    if unseen:
        raise UserError(
            f"run.output_dir={folder.parent}: {unseen:g} of {world.size} ranks do not see what rank 0 writes there; "
            "give a folder on a disk that all machines share"
        )
    return found


def check(path: Path, identity: Identity, form: str) -> dict[str, Any]:
    """Return what a save's state file holds.

    UserError: a run of this identity, whose engine saves as `form`, cannot go on from it.
    """
    state = _state(path)
    before, now = state["identity"], json.loads(json.dumps(dict(identity)))
    faults = []
    if different := [key for key in {**before, **now} if before.get(key) != now.get(key)]:
        shown = ", ".join(f"{key}: {before.get(key)} → {now.get(key)}" for key in different)
        faults.append(
            f"{path} was saved by a run of another learning configuration ({shown}); give another output_dir, or the "
            "configuration that it was saved with"
        )
    if state["format"] != form:
        faults.append(
            f"{path} was saved by {state['format']}, which this configuration ({form}) cannot load; go on with what "
            "saved it, or give another output_dir"
        )
    if faults:
        raise UserError(faults)
    return state


def resume(path: Path, engine: Engine, identity: Identity, world: World) -> History:
    """Load a save into a freshly built engine; return what the run had done by then."""
    state = check(path, identity, engine.format)
    try:
        engine.load(path, state["update"])
    except (Exception, CheckpointException) as error:  # torch's own is no Exception
        if classify(error) in OUT_OF_MEMORY:
            raise
        first = (str(error).strip().splitlines() or ["no message"])[-1]
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}: {first:.200}): it is damaged; remove it to go on from the "
            "save before it, or give another output_dir"
        ) from error
    mine = path / f"random-{world.rank}.pt"
    if mine.is_file():  # a larger world than the one that saved has ranks without a state: they keep the seed's
        _restore_random_state(torch.load(mine, weights_only=False), world.device)
    return History.from_json(state["history"])


def _state(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((path / _STATE).read_text())
        return {**state, "identity": dict(state["identity"]), "format": str(state["format"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path / _STATE} cannot be read ({type(error).__name__}): it is damaged, or of an earlier version; remove "
            "the save, or give another output_dir"
        ) from None


def _look(folder: Path) -> tuple[Path | None, Path]:
    """Return the newest complete save, and a new file by which other ranks know the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".seen-", dir=folder, delete=False) as marker:
            pass
    except OSError as error:
        raise UserError(f"run.output_dir={folder.parent} cannot be written: {error}") from None
    found = sorted(p for p in folder.glob("update-*") if (p / _STATE).is_file())
    return (found[-1] if found else None), Path(marker.name)


def _own_bytes(path: Path, rank: int) -> int:
    """Return the bytes that this rank wrote; rank 0 also wrote what belongs to all."""
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file() and _writer(f.name) == rank)


def _writer(name: str) -> int:
    """Return which rank writes a file of this name: the one that it names, else the first."""
    named = re.match(r"(?:__|random-|optimizer-|zero_pp_rank_|bf16_zero_pp_rank_)(\d+)", name)
    return int(named[1]) if named else 0


def _random_state(device: torch.device) -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate(), "numpy": np.random.get_state()}


def _restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
