"""What a searcher is told beside the candidates: predictions, limits, prices."""

from __future__ import annotations

from collections.abc import Sequence

from sweeps.candidates import Candidate, Context
from sweeps.clusters import load_cluster
from sweeps.forecast import OUTSIDE_GIB
from sweeps.predict import predict
from sweeps.search import Knowledge, Prior
from sweeps.spec import SweepSpec
from trainers.result import GIB


def knowledge_of(
    spec: SweepSpec, legal: Sequence[Candidate], context: Context, price: float, baseline: str | None = None
) -> Knowledge:
    """Return what is known before the first trial."""
    priors = {c.id: prior for c in legal if (prior := _prior(c, context)) is not None}
    defaults = Knowledge()
    return Knowledge(
        priors=priors,
        capacity_gib=capacity(spec, context),
        price=price,
        tokens_per_trial=spec.budget.tokens_per_trial or _epochs(spec, legal, context) or defaults.tokens_per_trial,
        eval_every_tokens=spec.eval_every_tokens,
        measure_seconds=spec.measure_seconds,
        baseline=baseline,
        confirm=spec.confirm,
        least_gain=spec.least_gain,
    )


def capacity(spec: SweepSpec, context: Context) -> float | None:
    """Return the GiB that a device's allocator can have: what a person allows, what there is, or what a preset says."""
    if spec.memory_limit_gib is not None:
        return spec.memory_limit_gib
    if context.cluster.device != "cuda":
        return None
    there = context.cluster.memory_gib
    if there is None and spec.cluster is not None:
        there = load_cluster(spec.cluster).device_memory_gib
    return there - OUTSIDE_GIB if there is not None else None


def _prior(candidate: Candidate, context: Context) -> Prior | None:
    found = predict(candidate.flat, context)
    if found is None or found.time is None:
        return None
    return Prior(found.accounts.total / GIB, found.time.total, found.work.tokens, found.work.targets)


def _epochs(spec: SweepSpec, legal: Sequence[Candidate], context: Context) -> float | None:
    """Return the tokens of the data, times epochs, as the first candidate sees it."""
    if not legal or context.workload is None:
        return None
    tokens = context.workload.tokens(int(legal[0].learning["seq_len"]))
    return tokens * spec.epochs if tokens is not None else None
