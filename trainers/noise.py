"""What disturbs a measurement: a device that slows itself down, and other work on the machine."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

_CGROUP_CPU = Path("/sys/fs/cgroup/cpu.stat")
_STAT = Path("/proc/stat")
_QUERY = "clocks_event_reasons.active"
# Bits of nvidia-smi's clocks_event_reasons.active that mean a device runs slower than it could under load (NVML's
# nvmlClocksEventReason*): power cap, hardware slowdown, thermal limits, power brake.
_SLOWED = {0x4: "its power limit", 0x8: "hardware slowdown", 0x20: "software thermal slowdown",
           0x40: "hardware thermal slowdown", 0x80: "power brake"}  # fmt: skip

STOLEN = 0.01  # of the CPU time that was wanted: less is usual between guests of one machine


@dataclass(frozen=True)
class Machine:
    """Counters of this machine at one moment."""

    throttled: int = 0  # periods in which the cgroup had used up its CPU time
    stolen: int = 0  # ticks that a hypervisor gave to others
    busy: int = 0  # ticks in which a processor of this machine had work, the stolen ones too

    @staticmethod
    def now() -> Machine:
        throttled = stolen = busy = 0
        with suppress(OSError, ValueError, StopIteration):
            lines = (line.split() for line in _CGROUP_CPU.read_text().splitlines())
            throttled = int(next(value for name, value in lines if name == "nr_throttled"))
        with suppress(OSError, ValueError, IndexError):
            user, nice, system, _, _, irq, softirq, stolen = map(int, _STAT.read_text().split("\n", 1)[0].split()[1:9])
            busy = user + nice + system + irq + softirq + stolen
        return Machine(throttled, stolen, busy)


def disturbances(before: Machine, after: Machine, device: torch.device) -> list[str]:
    """Return what slowed this machine down between two moments, or the device now: a phrase each."""
    found = []
    if after.throttled > before.throttled:
        found.append(f"the cgroup's CPU limit was reached {after.throttled - before.throttled} times")
    ticks, wanted = after.stolen - before.stolen, after.busy - before.busy
    if ticks > STOLEN * wanted:
        found.append(f"a hypervisor took {ticks / max(wanted, 1):.0%} of the CPU time")
    if device.type == "cuda":
        found += _slowed(device)
    return found


def _slowed(device: torch.device) -> list[str]:
    identity = str(getattr(torch.cuda.get_device_properties(device), "uuid", device.index or 0))
    identity = identity if identity.isdigit() else f"GPU-{identity.removeprefix('GPU-')}"
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader", "-i", identity]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        reasons = int(asked.stdout.strip().splitlines()[0], 16)
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return []
    return [f"the GPU is slowed by {name}" for bit, name in _SLOWED.items() if reasons & bit]
