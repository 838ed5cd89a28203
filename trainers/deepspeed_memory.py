"""What a rank holds under DeepSpeed, stage by stage: of weights, gradients and optimizer state, and for a moment.

Weights are in the dtype of compute; a rank's part of float32 masters is beside its moments. Source: DeepSpeed's
optimizers (bf16_optimizer.py, stage_1_and_2.py, stage3.py of 0.19), and what a trace of the real step shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from trainers.strategies import Parameters, Recipe, Setting, Share

BUCKET, LIVE, PREFETCHED = 500_000_000, 1_000_000_000, 50_000_000
"""DeepSpeed's own sizes: of a bucket, of the weights that stage 3 keeps gathered, of those that it fetches ahead."""
FLOAT32, FLOAT64 = 4, 8


def share(setting: Setting, whole: Parameters, accumulation: int) -> Share:
    """Return a rank's share of its device's memory."""
    stage, offload = int(setting.options["zero_stage"]), str(setting.options["offload"])
    found = _STAGES[stage](setting, whole, accumulation)
    if offload == "none" or setting.device != "cuda":
        return found
    if stage > 1:
        # A part of the sums is kept where the optimizer is; stage 3 keeps its bucket on the device.
        kept = max(0.0, found.gradients - FLOAT32 * whole.trained / setting.plan.dp)
        found = replace(found, gradients=kept, gradients_before=min(kept, found.gradients_before), stepping=0.0)
    return found.without("optimizer_state", *(("weights",) if offload == "parameters" else ()))


def _whole_gradients(setting: Setting, whole: Parameters, accumulation: int) -> Share:
    """Stage 1: every rank has all weights and gradients, and sums these at the end of a window."""
    recipe, ranks, many = _recipe(whole), setting.plan.dp, accumulation > 1
    weights, state = recipe.weight * whole.trained + whole.frozen, recipe.state * whole.trained / ranks
    computed, summed = whole.compute * whole.trained, recipe.gradient * whole.trained
    bucket = whole.compute * _bucket(whole)
    if setting.half:  # by an optimizer of its own, whose float32 sums are always there
        before = summed + (computed if many else 0.0)
        return Share(weights, state, summed + computed, before, reducing_root=bucket, flat=whole.trained / ranks)
    # Gradients are copied to a bucket, and its content to a part; then the optimizer makes one tensor of that.
    gradients = summed + (computed if many else 0.0)
    return Share(
        weights,
        state,
        gradients,
        gradients if many else 0.0,
        reducing_root=0.0 if many else bucket,
        stepping=summed / ranks,
        flat=whole.trained / ranks,
        released=True,
    )


def _parts_of_gradients(setting: Setting, whole: Parameters, accumulation: int) -> Share:
    """Stage 2: a rank keeps its part of the sums; gradients wait in buckets, of which one is filled as one is sent."""
    recipe, ranks, many = _recipe(whole), setting.plan.dp, accumulation > 1
    part = recipe.gradient * whole.trained / ranks
    bucket = whole.compute * _bucket(whole)
    # As it is sent, a copy of a bucket is there, too.
    sending = bucket if whole.blocks * whole.trained_block > BUCKET else 0.0
    # In bfloat16 the sums are there when the first bucket is sent; else their memory is got after the last one is.
    later = 0.0 if setting.half or many else min(part, bucket)
    return Share(
        recipe.weight * whole.trained + whole.frozen,
        recipe.state * whole.trained / ranks,
        part,
        part if many else 0.0,
        reducing_more=sending,
        reducing_root=bucket - later + (whole.compute * whole.embedding if setting.half else 0.0),
        bucketed=bucket * (2 if setting.device == "cuda" else 1),
        stepping=0.0 if setting.half else part,
        norm=FLOAT64 * min(whole.embedding, whole.trained / ranks),
        flat=whole.trained / ranks,
        released=not setting.half,
    )


def _parts_of_all(setting: Setting, whole: Parameters, accumulation: int) -> Share:
    """Stage 3: a rank keeps its part of all three, and a bucket that it never lets go of."""
    recipe, ranks = _recipe(whole), setting.plan.dp
    part = recipe.gradient * whole.trained / ranks
    bucket = whole.compute * _bucket(whole)
    # Weights stay gathered as long as there are fewer than LIVE of them; a rank alone gathers nothing.
    gathered = min(whole.in_use, LIVE * whole.compute) if ranks > 1 else 0.0
    sending = bucket + (FLOAT32 * _bucket(whole) / ranks if setting.half else 0.0)  # a copy, and the sum in float32
    blocks = whole.blocks * whole.block_in_use if ranks > 1 else 0.0
    return Share(
        (recipe.weight * whole.trained + whole.frozen) / ranks,
        recipe.state * whole.trained / ranks,
        part + bucket,
        part + bucket,
        gathered=gathered,
        gathered_after=gathered,
        reducing_more=sending if whole.blocks * whole.trained_block > BUCKET else 0.0,
        reducing_root=max(sending, gathered),
        stepping=part,
        prefetching=min(blocks, PREFETCHED * whole.compute),
        flat=whole.trained / ranks,
    )


def _recipe(whole: Parameters) -> Recipe:
    return Recipe(whole.compute, gradient=FLOAT32, master=FLOAT32, moments=2 * FLOAT32)


def _bucket(whole: Parameters) -> float:
    """Return the numbers of a bucket, which the engine makes no larger than what is trained."""
    return min(BUCKET, whole.trained)


_STAGES: Mapping[int, Callable[[Setting, Parameters, int], Share]] = {
    1: _whole_gradients, 2: _parts_of_gradients, 3: _parts_of_all,
}  # fmt: skip
