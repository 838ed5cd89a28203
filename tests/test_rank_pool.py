"""The pool of ranks that other tests stand on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.rank_pool import RankPool
from trainers.errors import UserError
from trainers.ranks import current

Ranks = Callable[[int], RankPool]


def add_ranks(offset: int) -> tuple[torch.Tensor, int]:
    world = current("cpu")
    return torch.tensor(world.sum([world.rank + offset])), os.getpid()


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise UserError(["first", "second"])
    dist.barrier()


def hang_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def test_ranks_live_on_and_results_come_in_rank_order(ranks: Ranks) -> None:
    (first, pid), (second, other) = ranks(2).run(add_ranks, 10)
    assert first.tolist() == second.tolist() == [21.0]
    assert pid != other
    assert [pid, other] == [answer[1] for answer in ranks(2).run(add_ranks, 0)]


def test_failures_do_not_hang_the_pool(ranks: Ranks) -> None:
    with pytest.raises(UserError) as caught:
        ranks(2).run(fail_on_one)
    assert caught.value.faults == ("first", "second")
    (note,) = caught.value.__notes__
    assert note.startswith("on rank 1 of 2: Traceback")
    assert "in fail_on_one" in note
    with pytest.raises(RuntimeError, match="the process died"):
        ranks(2).run(die_on_one)
    with pytest.raises(TimeoutError, match="no answer from rank"):
        ranks(2).run(hang_on_one, timeout_s=1)
    assert ranks(2).run(add_ranks, 0)[0][0].tolist() == [1.0]
