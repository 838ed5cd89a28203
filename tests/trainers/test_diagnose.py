"""Failures: their kinds, and the root cause among several ranks."""

from __future__ import annotations

import dataclasses
import json
import pickle
from dataclasses import replace

import pytest
import torch

from trainers.diagnose import Fault, Running, Use, WorkerFault, classify, fault_of, is_consequence, root_cause, size
from trainers.errors import UserError
from trainers.result import Accounts

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
CPU = (
    "[enforce fail at alloc_cpu.cpp:128] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4398046511104 bytes. Error code 12 (Cannot allocate memory)"
)
PEER = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:36487. "
    "This may indicate a remote worker crash."
)
NCCL_PEER = "NCCL communicator was aborted on rank 0. Original reason for failure was: watchdog timeout"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError(CUDA), "device_oom"),
        (torch.OutOfMemoryError("out of memory"), "device_oom"),
        (RuntimeError("CUDA error: out of memory"), "device_oom"),
        (RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB"), "device_oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "library_oom"),
        (RuntimeError("NCCL error: ncclUnhandledCudaError\nCuda failure 'out of memory'"), "library_oom"),
        (RuntimeError("Failed to CUDA calloc 6291456 bytes"), "library_oom"),
        (RuntimeError(CPU), "host_oom"),
        (MemoryError(), "host_oom"),
        (RuntimeError("Task was killed due to the node running low on memory."), "host_oom"),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), "timeout"),
        (UserError("no such file"), "illegal_config"),
        (RuntimeError(PEER), "crash"),
        (ZeroDivisionError("division by zero"), "crash"),
        (KeyError("memory"), "crash"),
    ],
)
def test_kinds(error: BaseException, kind: str) -> None:
    assert classify(error) == kind


def test_a_wrapped_error_keeps_its_kind() -> None:
    def fail() -> None:
        try:
            raise torch.OutOfMemoryError(CUDA)
        except RuntimeError as inner:
            raise RuntimeError("the backward hook failed") from inner

    with pytest.raises(RuntimeError, match="hook") as caught:
        fail()
    assert classify(caught.value) == "device_oom"


def test_a_real_host_allocation_failure() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert classify(caught.value) == "host_oom"


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("device_oom", "OOM"),
        ("host_oom", "OOM"),
        ("library_oom", "OOM"),
        ("illegal_config", "INFEASIBLE"),
        ("killed_unproved", "FAILED"),
        ("crash", "FAILED"),
        ("timeout", "FAILED"),
    ],
)
def test_statuses(kind: str, status: str) -> None:
    assert Fault(kind, "forward", 0, "x").status == status  # type: ignore[arg-type]


def test_an_oom_on_rank_1_is_the_cause_and_rank_0s_lost_peer_its_consequence() -> None:
    lost = Fault("crash", "backward", 0, f"RuntimeError: {PEER}")
    oom = Fault("device_oom", "backward", 1, f"OutOfMemoryError: {CUDA}")
    assert root_cause({0: lost, 1: oom}) == replace(
        oom, consequences=(f"then rank 0 in backward: RuntimeError: {PEER}"[: len("then rank 0 in backward: ") + 120],)
    )
    assert is_consequence(lost.message)
    assert not is_consequence(oom.message)


def test_a_crash_goes_before_the_peers_that_lost_it_and_those_that_timed_out() -> None:
    crash = Fault("crash", "forward", 2, "ValueError: bad label")
    others = {
        0: Fault("timeout", "backward", 0, "RuntimeError: Timed out waiting 30000ms for recv operation to complete"),
        1: Fault("crash", "backward", 1, f"DistBackendError: {NCCL_PEER}"),
        3: Fault("crash", "backward", 3, f"RuntimeError: {PEER}"),
    }
    found = root_cause({**others, 2: crash})
    assert replace(found, consequences=()) == crash
    assert [text.split(":")[0] for text in found.consequences] == [
        f"then rank {rank} in backward" for rank in (0, 1, 3)
    ]


def test_among_equals_the_lowest_rank_is_named() -> None:
    faults = {rank: Fault("device_oom", "forward", rank, CUDA) for rank in (3, 1, 2)}
    assert root_cause(faults).rank == 1
    lost = {rank: Fault("crash", "forward", rank, PEER) for rank in (1, 0)}
    assert root_cause(lost).rank == 0


def test_a_worker_fault_survives_pickling() -> None:
    fault = Fault("device_oom", "backward", 1, CUDA, "Traceback …")
    error = pickle.loads(pickle.dumps(WorkerFault(fault)))
    assert type(error) is WorkerFault
    assert error.fault == fault
    assert str(error) == f"rank 1, backward: {CUDA}"


def test_among_equals_the_earliest_is_the_cause() -> None:
    faults = {rank: Fault("crash", "forward", rank, "ValueError: bad", at=at) for rank, at in ((0, 5.0), (1, 4.0))}
    assert root_cause(faults).rank == 1


TRACE = 'File "trainers/engine.py", line 1, in step\n'
ROW = Running("sft.jsonl:900, 4,096 tokens", logits=4096 * 1000)


def asked(size: int) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size / 2**20} MiB.")


@pytest.mark.parametrize(
    ("error", "phase", "account", "row"),
    [
        (asked(2**20), "load", "weights", ""),
        (asked(2**20), "forward", "activations", ROW.row),
        (asked(2**20), "backward", "activations", ROW.row),
        (asked(2**20), "first_optimizer_step", "optimizer_state", ""),
        (asked(2**20), "optimizer", "temporary", ""),
        (asked(4 * 4096 * 1000), "backward", "temporary (logits and loss)", ROW.row),  # float32 logits, to the byte
        (asked(2 * 4096 * 1000), "forward", "temporary (logits and loss)", ROW.row),  # bfloat16
    ],
)
def test_what_was_growing_and_the_longest_row(error: Exception, phase: str, account: str, row: str) -> None:
    fault = fault_of(error, phase, 1, ROW, TRACE)
    assert (fault.kind, fault.rank, fault.account, fault.row) == ("device_oom", 1, account, row)
    assert fault.requested is not None
    assert any(f"{size(fault.requested)} were asked for" == line for line in fault.lines)


def test_a_crash_says_nothing_of_memory() -> None:
    fault = fault_of(ValueError("bad label"), "forward", 0, ROW, TRACE)
    assert (fault.requested, fault.account, fault.row, fault.lines) == (None, "", "", [])


@pytest.mark.parametrize(
    ("phase", "temporary", "account"),
    [("backward", 2, "activations"), ("backward", 4, "temporary"), ("load", 4, "weights"), ("eval", 0, "temporary")],
)
def test_what_was_growing_is_what_held_most_of_what_a_phase_adds(phase: str, temporary: int, account: str) -> None:
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1048576 bytes.")
    held = Accounts(weights=9, activations=3, temporary=temporary)
    assert fault_of(error, phase, 0, Running(), TRACE, Use(held, 2**29)).account == account


def test_what_was_in_use_and_the_limit_that_was_reached() -> None:
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1048576 bytes.")
    held = Accounts(weights=3 * 2**20, activations=2**20)
    fault = fault_of(error, "backward", 0, Running(), TRACE, Use(held, 2**29))
    assert fault.message == "memory_limit_gib=0.5 is reached: 1.0 MiB were asked for beside the 4.0 MiB in use"
    assert fault.lines[1] == (
        "in use then: 4.0 MiB (weights 3.0 MiB, gradients 0 bytes, optimizer state 0 bytes, activations 1.0 MiB, "
        "temporary 0 bytes)"
    )
    assert Fault.from_json(json.loads(json.dumps(dataclasses.asdict(fault)))) == fault


def test_a_limit_that_was_not_reached_is_not_named() -> None:
    """On a CPU untraced steps know no limit: there the machine itself had no more."""
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1048576 bytes.")
    assert fault_of(error, "backward", 0, Running(), TRACE, Use(None, 2**29)).limit is None


def test_the_request_is_that_of_the_error_that_tells_the_kind() -> None:
    try:
        try:
            raise asked(2**20)
        except RuntimeError as inner:
            raise ValueError("the step failed") from inner
    except ValueError as error:
        fault = fault_of(error, "forward", 0, ROW, TRACE)
    assert (fault.kind, fault.requested) == ("device_oom", 2**20)


def test_sizes_are_written_in_the_unit_that_suits_them() -> None:
    assert [size(n) for n in (12, 2048, 3 * 2**20, 5 * 2**29)] == ["12 bytes", "2.0 KiB", "3.0 MiB", "2.5 GiB"]
