"""What a device can do at most, to compare with what it did."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from functools import cache

import torch

# Dense peak in FLOP/s of tensor cores, bfloat16 and float32 (TF32 is off by default in torch, so these are the plain
# units), by a part of torch's name of the device; the first match wins. From the makers' data sheets, whose figures
# with sparsity are twice as high.
PEAKS: Mapping[str, Mapping[str, float]] = {
    r"B200": {"bfloat16": 2.25e15, "float32": 8.0e13},
    r"H100 PCIe": {"bfloat16": 7.56e14, "float32": 5.1e13},
    r"H100 NVL": {"bfloat16": 8.35e14, "float32": 6.0e13},
    r"H100|H200|GH200|H800": {"bfloat16": 9.894e14, "float32": 6.69e13},
    r"A100|A800": {"bfloat16": 3.12e14, "float32": 1.95e13},
    r"L40S": {"bfloat16": 3.6205e14, "float32": 9.16e13},
    r"\bL4\b": {"bfloat16": 1.21e14, "float32": 3.03e13},
    r"A10G": {"bfloat16": 7.0e13, "float32": 3.152e13},
    r"RTX 4090": {"bfloat16": 1.652e14, "float32": 8.26e13},
    r"MI300X": {"bfloat16": 1.307e15, "float32": 1.634e14},
}
SIDE = 768  # of the matrices that a CPU's peak is measured with
SECONDS = 0.15


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return the most FLOP/s that one device reaches in a dtype; None where it is not known.

    Of a GPU the published figure. A CPU has none: there it is the best rate of a product of two large matrices, with
    the threads that this process has.
    """
    if device.type != "cuda":
        return measured(getattr(torch, dtype))
    return published(torch.cuda.get_device_name(device), dtype)


def published(name: str, dtype: str) -> float | None:
    """Return the data sheet's figure for a device of this name."""
    for pattern, peaks in PEAKS.items():
        if re.search(pattern, name):
            return peaks.get(dtype)
    return None


def model_of(name: str) -> str:
    """Return the part of a device's name that names its model, as H100, A100 or RTX 4090; empty where it is unknown."""
    found = next((match for pattern in PEAKS if (match := re.search(pattern, name))), None)
    return found.group().split(" PCIe")[0].split(" NVL")[0] if found else ""


def measured(dtype: torch.dtype) -> float:
    """Return the best rate of a matrix product on this process's CPU threads, in FLOP/s."""
    return _best(dtype, torch.get_num_threads())


@cache  # the trials of a process are compared with one figure
def _best(dtype: torch.dtype, threads: int) -> float:
    a, b = (torch.ones(SIDE, SIDE, dtype=dtype) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + SECONDS
    torch.mm(a, b)
    while (start := time.perf_counter()) < end:
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2.0 * SIDE**3 / best if best < float("inf") else 0.0
