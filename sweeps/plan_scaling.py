"""A plan beyond its cluster: the best configuration of each strategy on up to 4,096 GPUs."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sweeps.candidates import may_run
from sweeps.forecast import Forecaster, Prediction
from sweeps.plan import MOST_RANKS

DEGREES = ("strategy", "zero_stage", "tp", "pp", "cp")


@dataclass(frozen=True)
class Scaled:
    """One number of GPUs of a configuration."""

    prediction: Prediction
    num_workers: int
    global_batch_size: int
    efficiency: float
    """tokens per second and GPU, against the smallest number of GPUs"""


def scaled(best: Sequence[Prediction], model: str, forecaster: Forecaster) -> list[list[Scaled]]:
    """Return for every configuration what it would do on the powers of two from its own number of GPUs on."""
    found = [list(_steps(prediction, model, forecaster)) for prediction in best]
    return [steps for steps in found if len(steps) > 1]


def best_of_each(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return the first prediction that fits of every strategy with its degrees; they are sorted by price."""
    found: dict[str, Prediction] = {}
    for p in predictions:
        if p.verdict == "FITS" and int(p.config["num_workers"]) > 1:
            found.setdefault(json.dumps([p.config.get(name) for name in DEGREES]), p)
    return list(found.values())


def _steps(prediction: Prediction, model: str, forecaster: Forecaster) -> Iterator[Scaled]:
    config = prediction.config
    first = None
    least, batch = int(config["num_workers"]), int(config["global_batch_size"])
    parts = int(config.get("tp", 1)) * int(config.get("pp", 1)) * int(config.get("cp", 1))
    split = 1 if config.get("pp_schedule") == "gpipe" else int(config.get("pp", 1))  # micro batches that it needs
    for n in itertools.takewhile(lambda n: n <= MOST_RANKS, (least * 2**i for i in itertools.count())):
        # The same window as long as every rank has its micro batches of it; then a larger one, which learns otherwise.
        rows = n // parts * int(config["micro_batch_size"])
        rows *= max(split, math.ceil(batch / rows))
        larger = {**config, "num_workers": n, "global_batch_size": rows}
        if not may_run(model, larger, forecaster.context):
            continue
        found = forecaster.predict(larger)
        if found is None:
            continue
        rate = found.tokens_per_second / n
        first = first or rate
        yield Scaled(found, n, rows, rate / first)
