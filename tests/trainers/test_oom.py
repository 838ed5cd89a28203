"""Texts of errors as they were seen in public, each with what it is."""

from __future__ import annotations

import pytest
import torch

from trainers import oom
from trainers.diagnose import classify
from trainers.oom import OutOfMemory

GIB, MIB = 2**30, 2**20
SINCE_2_2 = (
    "CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacity of 23.65 GiB of which 11.06 MiB is "
    "free. Including non-PyTorch memory, this process has 23.60 GiB memory in use. Of the allocated memory 22.90 GiB "
    "is allocated by PyTorch, and 194.87 MiB is reserved by PyTorch but unallocated. If reserved but unallocated "
    "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)  # pytorch#16417
FRAGMENTED = (
    "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacty of 23.65 GiB of which 1.66 GiB is free. "
    "Including non-PyTorch memory, this process has 20.81 GiB memory in use. Of the allocated memory 12.09 GiB is "
    "allocated by PyTorch, and 4.84 GiB is reserved by PyTorch but unallocated."
)  # kerrj/lerf#73; "capacty" is torch 2.1's
UNTIL_2_0 = (
    "Failed to clone() tensor with name lm_head.weight. [...] Error: CUDA out of memory. Tried to allocate 502.00 MiB "
    "(GPU 1; 39.59 GiB total capacity; 35.54 GiB already allocated; 276.19 MiB free; 37.22 GiB reserved in total by "
    "PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation."
)  # stanford_alpaca#65

READ = {
    SINCE_2_2: ("device_oom", ""),
    FRAGMENTED: ("device_oom", "fragmentation"),
    UNTIL_2_0: ("device_oom", ""),
    # wxian3/NeuroLens#2
    "CUDA out of memory. Tried to allocate 55.57 GiB. GPU 0 has a total capacty of 12.00 GiB of which 9.02 GiB is "
    "free. Of the allocated memory 984.52 MiB is allocated by PyTorch, and 463.48 MiB is reserved by PyTorch but "
    "unallocated.": ("device_oom", "single_allocation"),
    # Tongyi-MAI/Z-Image#103
    "HIP out of memory. Tried to allocate 1.88 GiB. GPU 0 has a total capacity of 23.98 GiB of which 1.70 GiB is free. "
    "Of the allocated memory 21.65 GiB is allocated by PyTorch, and 279.78 MiB is reserved by PyTorch but "
    "unallocated.": ("device_oom", ""),
    # ROCm/TheRock#2118
    "HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 255.98 GiB of which 244.65 GiB is "
    "free. 1.05 GiB allowed; Of the allocated memory 1017.01 MiB is allocated by PyTorch": ("device_oom", "limit"),
    # kijai/ComfyUI-WanVideoWrapper#565
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect.": ("device_oom", "driver"),
    # QwenLM/Qwen3#873; litgpt's resource tables
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": ("library_oom", "library_handle"),
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED": ("library_oom", "library_handle"),
    # Open-Sora-Plan#386; nccl#1235
    "node1:3018451:3018451 [0] enqueue.cc:1085 NCCL WARN Cuda failure 'out of memory'": ("library_oom", "nccl"),
    "Failed to CUDA calloc 6291456 bytes": ("library_oom", "nccl"),
    # austinxu87/handsoff#4
    "[enforce fail at ..\\c10\\core\\CPUAllocator.cpp:73] data. DefaultCPUAllocator: not enough memory: you tried to "
    "allocate 318767104000 bytes. Buy new RAM!": ("host_oom", "malloc"),
    "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 128. TiB for an array with shape (4194304, "
    "4194304) and data type float64": ("host_oom", "malloc"),
    # brain-score/vision#950
    "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=37205392.0. Some of your processes may have been "
    "killed by the cgroup out-of-memory handler.": ("host_oom", "killed"),
    # real-stanford/flingbot#11
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.": ("host_oom", "ray"),
    # pytorch#108861
    "DataLoader worker (pid 11011) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit": ("host_oom", "shared_memory"),
}

OTHERS = {
    # nccl#1284: the size is garbage, not the memory short
    "CUDA out of memory. Tried to allocate more than 1EB memory.": "crash",
    # nccl#1000: the word malloc is boilerplate
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. ": "crash",
    # pytorch#111187
    "NCCL error: ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 'invalid argument'": "crash",
    # triton#8182
    "out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes or `num_stages` "
    "may help.": "crash",
    "CUDA error: an illegal memory access was encountered": "crash",
    "cannot pin 'torch.cuda.LongTensor' only dense CPU tensors can be pinned": "crash",
    "Unsupported memory format. Supported options are Contiguous, ChannelsLast": "crash",
    "unknown key memory_limit": "crash",
    "the data loader was asked to hold all rows in memory, and there are none": "crash",
    # lzhxmu/CPPO#6, TorchSSL#4: killed, and by what is not proved
    "exitcode  : -9 (pid: 14750) traceback : Signal 9 (SIGKILL) received by PID 14750": "killed_unproved",
    "DataLoader worker (pid 12847) is killed by signal: Killed. ": "killed_unproved",
}


@pytest.mark.parametrize("text", READ)
def test_memory_that_ran_out(text: str) -> None:
    found = oom.read(text)
    assert found is not None
    assert (found.kind, found.detail) == READ[text]
    assert classify(RuntimeError(text)) == READ[text][0]


@pytest.mark.parametrize("text", OTHERS)
def test_texts_that_only_mention_memory(text: str) -> None:
    assert oom.read(text) is None
    assert classify(RuntimeError(text)) == OTHERS[text]


def test_sizes_of_every_format() -> None:
    assert oom.read(SINCE_2_2) == OutOfMemory(
        "device_oom", "", 22 * MIB, round(23.65 * GIB), round(11.06 * MIB), round(22.9 * GIB), round(194.87 * MIB)
    )
    assert oom.read(UNTIL_2_0) == OutOfMemory(
        "device_oom", "", 502 * MIB, round(39.59 * GIB), round(276.19 * MIB), round(35.54 * GIB),
        round(37.22 * GIB) - round(35.54 * GIB),
    )  # fmt: skip


def test_the_hint_on_fragmentation_comes_only_where_much_is_unallocated() -> None:
    assert "expandable_segments" in oom.read(FRAGMENTED).hint  # type: ignore[union-attr]
    assert oom.read(SINCE_2_2).hint == ""  # type: ignore[union-attr]


def test_this_torchs_own_error_on_the_host() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert oom.read(str(caught.value)) == OutOfMemory("host_oom", "malloc", requested=2**60)
