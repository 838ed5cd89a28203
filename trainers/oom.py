"""What the texts of out-of-memory errors say: of which memory, why, and how much was asked for. Standard library only.

The formats are those of torch up to 2.0, of 2.1 ("total capacty") and from 2.2 on, for CUDA and HIP alike; of cuBLAS,
cuDNN, NCCL, numpy, Slurm, Ray and torch's data loader.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["device_oom", "library_oom", "host_oom"]
Detail = Literal[
    "",
    "fragmentation",  # enough was reserved and unallocated, but not in one piece
    "single_allocation",  # one tensor is larger than the device
    "limit",  # a cap on this process, the device has more
    "driver",  # outside torch's allocator: other processes, pinned host memory, the CUDA context
    "library_handle",  # cuBLAS or cuDNN
    "nccl",
    "malloc",
    "killed",
    "ray",
    "shared_memory",
]

FRAGMENTED = 0.2  # of what is allocated: from this much unallocated on, fragmentation is the likely cause

# Texts that speak of memory and mean something else: tested first.
_OTHERS = (
    "more than 1EB memory",  # a corrupt size: after a collective has failed, or of a damaged file
    "out of resource: shared memory",  # of one kernel's block: no batch size changes it
    "illegal memory access",
)
# What is certain; the first match wins.
_CERTAIN: tuple[tuple[str, Kind, Detail], ...] = (
    (r"(?:CUDA|HIP|XPU) error: out of memory", "device_oom", "driver"),
    (r"CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)|CUDNN_STATUS_ALLOC_FAILED", "library_oom", "library_handle"),
    (r"Cuda failure (?:\d+ )?'out of memory'|Failed to CUDA (?:calloc|malloc)", "library_oom", "nccl"),
    (r"DefaultCPUAllocator: (?:can't allocate|not enough) memory", "host_oom", "malloc"),
    (r"_ArrayMemoryError|Unable to allocate [\d.]+ [KMGTPE]?i?B for an array", "host_oom", "malloc"),
    (r"node running low on memory|due to memory pressure \(OOM\)", "host_oom", "ray"),
    (r"out of shared memory. Please try to raise your shared memory limit", "host_oom", "shared_memory"),
    (r"Detected \d+ oom[-_]kill event", "host_oom", "killed"),
    (r"^OutOfMemoryError: ", "device_oom", ""),  # torch's own, whatever its text
)
_DEVICE = re.compile(r"(?:CUDA|HIP|XPU) out of memory")
_SIZE = r"([\d.]+) ?(bytes|[KMGTPE]?i?B)"
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6}
_UNITS |= {"GB": 10**9, "TB": 10**12, "PiB": 2**50, "EiB": 2**60}


@dataclass(frozen=True)
class OutOfMemory:
    """An error text, read. Sizes in bytes; None where the text does not say."""

    kind: Kind
    detail: Detail
    requested: int | None = None
    capacity: int | None = None
    free: int | None = None
    allocated: int | None = None
    unallocated: int | None = None  # reserved by the allocator, and of no tensor

    @property
    def hint(self) -> str:
        """What to look at, where it is not the phase that tells; empty otherwise."""
        return _HINTS.get(self.detail, "")


_HINTS: dict[str, str] = {
    "fragmentation": "much is reserved and unallocated: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "single_allocation": "one tensor is larger than the device: logits, or a dense attention mask",
    "limit": "a limit on this process, not the device's end",
    "driver": "outside torch's allocator: another process on the device, or pinned host memory",
    "library_handle": "a library's workspace: leave 1 to 2 GiB of the device free",
    "nccl": "NCCL's buffers are outside torch's allocator: leave 1 to 2 GiB of the device free",
    "shared_memory": "/dev/shm is full: fewer data loader workers, or a larger one",
}


def read(text: str) -> OutOfMemory | None:
    """Return what an error's text says of memory that ran out; None where it is another kind of error."""
    if any(other in text for other in _OTHERS):
        return None
    if _DEVICE.search(text):
        return _of_device(text)
    for pattern, kind, detail in _CERTAIN:
        if re.search(pattern, text):
            return OutOfMemory(
                kind, detail, requested=_first(text, rf"(?:tried to allocate|Unable to allocate) {_SIZE}")
            )
    return None


def _of_device(text: str) -> OutOfMemory:
    sizes = {
        "requested": _first(text, rf"Tried to allocate {_SIZE}"),
        "capacity": _first(text, rf"total capac?i?ty of {_SIZE}", rf"{_SIZE} total capac"),
        "free": _first(text, rf"of which {_SIZE} is free", rf"{_SIZE} free"),
        "allocated": _first(text, rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated"),
        "unallocated": _first(text, rf"{_SIZE} is reserved by PyTorch but unallocated"),
    }
    reserved = _first(text, rf"{_SIZE} reserved in total by PyTorch")
    if sizes["unallocated"] is None and reserved is not None and sizes["allocated"] is not None:
        sizes["unallocated"] = reserved - sizes["allocated"]
    return OutOfMemory("device_oom", _why(text, sizes), **sizes)


def _why(text: str, sizes: dict[str, int | None]) -> Detail:
    if re.search(r"[\d.]+ [KMGT]iB allowed|per_process_memory_fraction", text):
        return "limit"
    requested, capacity = sizes["requested"], sizes["capacity"]
    if requested is not None and capacity is not None and requested > capacity:
        return "single_allocation"
    held, allocated = sizes["unallocated"] or 0, sizes["allocated"] or 0
    if requested is not None and held >= requested and held > FRAGMENTED * allocated:
        return "fragmentation"
    return ""


def _first(text: str, *patterns: str) -> int | None:
    for pattern in patterns:
        if match := re.search(pattern, text):
            number, unit = match.groups()
            return round(float(number) * _UNITS[unit])
    return None
