"""What measured step times teach: factors on the parts of predicted ones."""

from __future__ import annotations

import pytest

from sweeps.correction import learned
from trainers.steptime import StepTime


def step(compute: float, communication: float = 0.0, bubble: float = 0.0) -> StepTime:
    return StepTime(compute, communication, bubble, transfer=0.0, optimizer=0.1)


def test_one_trial_scales_all_parts_alike() -> None:
    """Predicted 2.1 s, measured 4.2: whatever part was wrong, a trial alone cannot tell."""
    correction = learned([(step(1.5, 0.5), 4.2)])
    assert correction.factors == pytest.approx(dict.fromkeys(correction.factors, 2.0))
    assert correction.apply(step(3.0)).total == pytest.approx(6.2)
    assert (correction.before, correction.after) == (pytest.approx(0.5), pytest.approx(0.0, abs=1e-9))


def test_many_trials_tell_the_parts_apart() -> None:
    """Computing takes half as long again and what travels three times as long: measured 1.5 · c + 3 · m + 0.1."""
    predicted = [step(c, m) for c in (1.0, 2.0, 4.0, 8.0) for m in (0.0, 1.0, 3.0, 6.0)]
    correction = learned([(p, 1.5 * p.compute + 3 * p.communication + p.optimizer) for p in predicted])
    assert correction.factors["compute"] == pytest.approx(1.5, rel=0.03)
    assert correction.factors["communication"] == pytest.approx(3.0, rel=0.03)
    assert correction.after < 0.02 < correction.before
    assert correction.trials == 16


def test_a_bubble_is_computing_that_waits() -> None:
    correction = learned([(step(1.0), 2.2)])
    assert correction.apply(step(1.0, bubble=0.5)).bubble == pytest.approx(1.0)


def test_nothing_is_learned_from_nothing() -> None:
    with pytest.raises(ValueError, match="no measured step times"):
        learned([])
