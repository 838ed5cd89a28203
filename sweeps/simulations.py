"""Simulations of candidates, each done once: what they came to is kept by the hash of all that it follows from."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from trainers.result import Accounts, RankMemory
from trainers.task import Simulated, Task

MOST_PROCESSES = 8  # each holds the libraries, about a GiB
LIBRARIES = ("torch", "transformers", "peft", "deepspeed", "bitsandbytes")


class Simulations:
    """Simulateds in a folder, and processes that make what is missing."""

    def __init__(self, folder: Path, processes: int | None = None) -> None:
        self._folder = folder
        self._processes = processes or min(MOST_PROCESSES, os.cpu_count() or 1)

    def run(self, tasks: Sequence[Task], done: Callable[[int, int], None] = lambda *_: None) -> list[Simulated]:
        """Return what each task comes to, in order; `done` is told how many of the missing ones there are."""
        keys = [key(task) for task in tasks]
        found = {k: outcome for k in dict.fromkeys(keys) if (outcome := self._read(k)) is not None}
        missing = [(k, task) for k, task in dict(zip(keys, tasks, strict=True)).items() if k not in found]
        if missing:
            from trainers.simulate import Simulator

            done(0, len(missing))
            with Simulator(min(self._processes, len(missing))) as simulator:
                for i, ((k, _), outcome) in enumerate(
                    zip(missing, simulator.each([task for _, task in missing]), strict=True)
                ):
                    found[k] = outcome
                    self._write(k, outcome)
                    done(i + 1, len(missing))
        return [found[k] for k in keys]

    def _read(self, name: str) -> Simulated | None:
        path = self._folder / f"{name}.json"
        if not path.is_file():
            return None
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return {phase: RankMemory(**{**m, "accounts": Accounts(**m["accounts"])}) for phase, m in data.items()}
        except (ValueError, TypeError, KeyError, AttributeError):  # cut off by a crash: made again
            return None

    def _write(self, name: str, outcome: Simulated) -> None:
        if isinstance(outcome, str):
            return  # another version may be able to
        self._folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({phase: dataclasses.asdict(memory) for phase, memory in outcome.items()})
        (self._folder / f"{name}.json").write_text(text, encoding="utf-8")


def key(task: Task) -> str:
    """Return the hash of a task, of the libraries' versions and of the code that is simulated."""
    told: dict[str, Any] = {**dataclasses.asdict(task), "versions": _versions(), "code": _code()}
    del told["shape"]["name"], told["setting"]["shape"]
    for free in ("learning_rate", "seed"):
        told["setting"]["learning"].pop(free, None)
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:24]


@cache
def _versions() -> dict[str, str]:
    """Return the versions of the libraries that a simulation runs."""
    return {name: _version(name) for name in LIBRARIES}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


@cache
def _code() -> str:
    """Return the hash of this project's code that a simulation runs."""
    import trainers

    folder = Path(str(trainers.__file__)).parent
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()
