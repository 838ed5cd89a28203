"""Where a sweep stands, by hand."""

from __future__ import annotations

from sweeps.objectives import OBJECTIVES
from sweeps.spec import Budget
from sweeps.standing import standing
from tests.sweeps.factories import make_outcome

BOTH = [OBJECTIVES["peak_memory_gib"], OBJECTIVES["target_tokens_per_second"]]


def trial(n: int, gib: float, rate: float) -> object:
    return make_outcome(f"c{n}", f"{n:03d}", metrics={"peak_memory_gib": gib, "target_tokens_per_second": rate})


def test_what_is_spent_and_what_the_last_trial_added() -> None:
    """Each takes a minute on one GPU. 2 GiB at 20/s, then 1 GiB at 10/s; the reference is 2.2 GiB and 9/s.

    Before: 0.2 · 11 = 2.2. After: (2.2 - 1) · 1 beside it, of which 0.2 overlap: 2.2 + 1.2 - 0.2 = 3.2: 45 % more.
    """
    one, two = trial(0, 2.0, 20.0), trial(1, 1.0, 10.0)
    found = standing([one, two], BOTH, 1.0)  # type: ignore[list-item]
    assert found.points == 2
    assert found.gain is not None
    assert abs(found.gain - (3.2 / 2.2 - 1)) < 1e-9
    text = found.text(Budget(trials=5))
    assert text == "2 of 5 trials, 0.0333 GPU-hours; 2 configurations on the frontier, hypervolume +45.5% by this trial"
    assert standing([make_outcome("c")], BOTH, 1.0).text(Budget()) == "1 trials, 0.0167 GPU-hours; no frontier yet"
