"""The parts of a step: a timeline made by hand, and what the profiler sees of a real step."""

from __future__ import annotations

import time

import pytest
import torch

from trainers import split
from trainers.regions import DATA, RECOMPUTE, region
from trainers.split import PARTS, Seen


def test_a_timeline_by_hand() -> None:
    """Ten seconds.

    data 0–1, forward 1–4 with a gather 2–4 that is computed beside until 3, backward 4–8 with recomputation 5–6 and a
    reduction 6–9, beside which 6–7.5 is computed, optimizer 8–9.5; a receive 9.5–10 with nothing beside it.
    """
    seen = Seen(
        step=(0, 10),
        compute=[(1, 3), (4, 7.5), (9, 9.5)],
        collectives=[(2, 4), (6, 9)],
        between_stages=[(9.5, 10)],
        transfers=[],
        phases={
            DATA: [(0, 1)],
            "forward": [(1, 4)],
            "backward": [(4, 8)],
            RECOMPUTE: [(5, 6)],
            "optimizer": [(8, 9.5)],
        },
    )
    assert seen.parts() == {
        "data": 1,
        "forward": 2,  # 1–3
        "collective": 2.5,  # 3–4 and 7.5–9: what nothing is computed beside
        "backward": 2.5,  # 4–5 and 6–7.5
        "recompute": 1,
        "optimizer": 0.5,  # 9–9.5
        "pipeline_idle": 0.5,
        "transfer": 0,
        "other": 0,
    }


def test_what_is_in_no_phase_is_other_and_all_is_the_step() -> None:
    seen = Seen((0, 4), [(0, 3)], [], [], [(2, 3.5)], {"forward": [(0, 2)]})
    parts = seen.parts()
    assert (parts["forward"], parts["transfer"], parts["other"]) == (2, 0.5, 1.5)
    assert sum(parts.values()) == 4


def test_a_real_step() -> None:
    """A sleep in each phase, and a product in one: nothing is lost, and each is where it was."""
    with split.profiled(torch.device("cpu")) as profiler:
        for _ in range(2):
            with split.step():
                with region(DATA):
                    time.sleep(0.02)
                with region("forward"):
                    time.sleep(0.04)
                with region("backward"):
                    with region(RECOMPUTE):
                        time.sleep(0.03)
                    torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    first, second = (s.parts() for s in split.steps_of(profiler))
    for parts in (first, second):
        assert set(parts) == set(PARTS)
        assert parts["data"] >= 0.02
        assert parts["forward"] >= 0.04
        assert parts["recompute"] >= 0.03
        assert parts["backward"] > 0
        assert parts["collective"] == parts["pipeline_idle"] == parts["transfer"] == 0
    assert sum(second.values()) == pytest.approx(
        sum(end - start for start, end in [split.steps_of(profiler)[1].step]), rel=1e-9
    )
