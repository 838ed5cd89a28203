"""Where a job ran: device, library versions. Facts that a measurement cannot be read without."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from trainers.ranks import World
from trainers.result import GIB

_LIBRARIES = ("torch", "transformers", "peft", "ray")


def describe(world: World) -> dict[str, str]:
    """Return names and versions; values are short text."""
    facts = {"python": platform.python_version(), "platform": platform.system().lower(), "device": _device(world)}
    facts["backend"] = "nccl" if world.device.type == "cuda" else "gloo"
    facts["threads_per_worker"] = str(torch.get_num_threads())
    if world.device.type == "cuda":
        facts["cuda"] = str(torch.version.cuda)
        facts["device_memory_gib"] = f"{torch.cuda.get_device_properties(world.device).total_memory / GIB:.2f}"
    for name in _LIBRARIES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            continue
    return facts


def _device(world: World) -> str:
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return f"CPU {model or platform.machine()} ({os.cpu_count()} cores)"
