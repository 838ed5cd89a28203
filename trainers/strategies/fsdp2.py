"""Fully sharded data parallel (`fully_shard`): weights, gradients and optimizer state are sharded.

torch's second interface; never the first (FullyShardedDataParallel).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from trainers.plan import Plan
from trainers.strategies import NATIVE, STRATEGIES, Option, Parameters, Setting, Share, Strategy, Traffic

if TYPE_CHECKING:
    from torch import nn

    from trainers.config import SystemConfig
    from trainers.layout import Layout


GROUP = 300
"""Operations that the host starts for a group's hooks in a micro batch: to cast, copy, gather, view, free and reduce.

Of the size that measured steps of small models ask for (benchmarks/prediction.py)."""


class FSDP2(Strategy):
    """`fully_shard` on every block and on the rest."""

    options = (
        Option(
            "reshard_after_forward",
            bool,
            True,
            "free a block's gathered weights after its forward pass, and gather them again for the backward pass",
        ),
        Option(
            "sync_each_batch",
            bool,
            True,
            "sum gradients over ranks after every micro batch, so that each keeps its shards of them; false: once an "
            "update, which sends less, and until then every rank holds whole ones (a pipeline does so in any case)",
        ),
        Option("dp_replicate", int, 1, "copies of the shards: hybrid sharding, dp_replicate × dp_shard"),
        Option("reduce_dtype", str, "float32", "dtype in which gradients are summed", ("float32", "bfloat16")),
        Option("offload", str, "none", "what is kept in host memory", ("none", "parameters")),
    )

    def plan(self, system: SystemConfig) -> Plan:
        copies = int(system.options.get("dp_replicate", 1))
        return Plan.of(system.num_workers, tp=system.tp, pp=system.pp, cp=system.cp, dp_replicate=copies)

    def validate(self, setting: Setting) -> list[str]:
        rules = []
        if setting.options.get("offload") not in (None, "none", "parameters"):
            rules.append(f"offload={setting.options['offload']}: fsdp2 offloads none or parameters (with all state)")
        if setting.options.get("reduce_dtype") == "bfloat16" and setting.compute_dtype != "bfloat16":
            rules.append(
                f"reduce_dtype=bfloat16: gradients are {setting.compute_dtype} here, summing them in less loses"
            )
        if setting.plan.dp_replicate > 1 and setting.plan.dp_shard == 1:
            rules.append(
                f"dp_replicate={setting.plan.dp_replicate} leaves dp_shard=1: nothing is sharded, that is strategy=ddp"
            )
        if setting.plan.dp_replicate > 1 and setting.plan.cp > 1:
            rules.append(f"dp_replicate={setting.plan.dp_replicate} beside cp={setting.plan.cp} is not supported")
        return rules

    def apply(self, module: nn.Module, setting: Setting, layout: Layout) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        options: dict[str, Any] = {
            "mesh": layout.shard,
            "reshard_after_forward": bool(setting.options.get("reshard_after_forward", True)),
            **policies(setting),
        }
        return wrapped_by_block(module, lambda part: fully_shard(part, **options))

    @contextmanager
    def accumulating(self, wrapped: nn.Module, setting: Setting, last: bool) -> Iterator[None]:
        cast(Any, wrapped).set_requires_gradient_sync(last or bool(setting.options.get("sync_each_batch", True)))
        yield

    def share(self, setting: Setting, whole: Parameters, accumulation: int) -> Share:
        reshard, sync = (bool(setting.options.get(name, True)) for name in ("reshard_after_forward", "sync_each_batch"))
        sync = sync and setting.plan.pp == 1
        ranks = setting.plan.dp_shard * setting.plan.cp
        share = mixed_share(setting, whole, accumulation, ranks, reshard, sync)
        if setting.options.get("offload") == "parameters" and setting.device == "cuda":
            return share.without("weights", "optimizer_state", "gradients", "gradients_before")
        return share

    def traffic(self, setting: Setting, whole: Parameters, micro_batches: int) -> list[Traffic]:
        # Weights are gathered for the forward pass, and for the backward pass where they were let go of.
        gathers = 2 if setting.options.get("reshard_after_forward", True) else 1
        sums = micro_batches if setting.options.get("sync_each_batch", True) and setting.plan.pp == 1 else 1
        summed = reduced_width(setting, whole) * whole.trained
        sent = micro_batches * gathers * whole.in_use + sums * summed
        plan, groups = setting.plan, whole.blocks + 1  # each of which gathers, and scatters, by itself
        ranks = plan.dp_shard * plan.cp
        rings = groups * (micro_batches * gathers + sums)
        found = [Traffic((ranks - 1) / ranks * sent, ranks, True, plan.tp, rings)]
        if plan.dp_replicate > 1:  # the sums of shards, over the copies of them
            part = (plan.dp_replicate - 1) / plan.dp_replicate
            size = 2 * part * sums * summed / ranks
            found.append(Traffic(size, plan.dp_replicate, True, ranks * plan.tp, 2 * sums * groups))
        return found

    def starts(self, setting: Setting, whole: Parameters) -> float:
        return GROUP * (whole.blocks + 1)

    def part(self, setting: Setting) -> float:
        return 1 / (setting.plan.dp_shard * setting.plan.cp)

    def to_host(self, setting: Setting, whole: Parameters, micro_batches: int) -> float:
        if setting.options.get("offload") != "parameters":
            return 0.0
        gathers = 2 if setting.options.get("reshard_after_forward", True) else 1
        weights = NATIVE.weight * whole.trained + whole.frozen
        ranks = setting.plan.dp_shard * setting.plan.cp
        return micro_batches * (gathers * weights + NATIVE.gradient * whole.trained) / ranks

    def gradient_divisor(self, setting: Setting) -> int:
        return 1  # sums are forced, see wrapped_by_block


def mixed_share(setting: Setting, whole: Parameters, accumulation: int, ranks: int, reshard: bool, sync: bool) -> Share:
    """Return what a rank holds under FSDP2's mechanism, sharded over `ranks`.

    Weights are gathered in the dtype of compute: the root's for the whole pass, a block's and the next one's, or all
    that were not let go of. Whole gradients are as wide as compute, what is sent float32.
    """
    weights = (NATIVE.weight * whole.trained + whole.frozen) / ranks
    if ranks == 1:  # frozen ones are used as they lie
        whole = replace(whole, frozen_block=0.0, frozen_root=0.0)
    gradients = NATIVE.gradient * whole.trained / ranks
    unreduced = NATIVE.gradient * whole.trained  # accumulated where they are not summed over ranks in between
    before = (gradients if sync else unreduced) if accumulation > 1 else 0.0
    some = whole.root_in_use + (2 * whole.block_in_use if reshard else whole.blocks * whole.block_in_use)
    reduced = reduced_width(setting, whole)
    # Of a gradient there are what was computed and what is sent; then that and the sum, beside an earlier one if there
    # is one, and once more where nothing is divided.
    summed = reduced / ranks * ((sync and accumulation > 1) + (ranks == 1))
    return Share(
        weights,
        NATIVE.state * whole.trained / ranks,
        gradients,
        before,
        gathered=some,
        # The root's weights are let go of when the model has run.
        gathered_after=0.0 if reshard else whole.in_use,
        gathering=2 * whole.root_in_use if reshard else 0.0,
        reducing=whole.compute * whole.trained_block,
        reducing_more=(whole.compute + reduced) * whole.trained_block,
        reducing_root=(reduced + max(whole.compute, summed)) * whole.trained_root,
    )


def reduced_width(setting: Setting, whole: Parameters) -> int:
    """Return in how many bytes a number of a gradient is sent."""
    return NATIVE.gradient if setting.options.get("reduce_dtype", "float32") == "float32" else whole.compute


def policies(setting: Setting) -> dict[str, Any]:
    """Return the mixed-precision and offload policies of a setting."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    half = setting.compute_dtype == "bfloat16"
    reduce_dtype = torch.bfloat16 if setting.options.get("reduce_dtype") == "bfloat16" else torch.float32
    precision = (
        # Between the stages of a pipeline activations travel as they are.
        MixedPrecisionPolicy(torch.bfloat16, reduce_dtype, cast_forward_inputs=setting.plan.pp == 1)
        if half
        else MixedPrecisionPolicy()
    )
    offloaded = setting.options.get("offload") == "parameters"
    pin = setting.device == "cuda"  # pinning needs an accelerator
    return {
        "mp_policy": precision,
        "offload_policy": CPUOffloadPolicy(pin_memory=pin) if offloaded else OffloadPolicy(),
    }


def replicated(module: nn.Module, setting: Setting, layout: Layout) -> nn.Module:
    """Wrap a module in the composable form of data parallelism, which shares FSDP2's mechanism.

    Frozen weights are left as they are, in the dtype of compute: it would use copies of them.
    """
    from torch.distributed._composable.replicate_with_fsdp import replicate

    options: dict[str, Any] = {"mesh": layout.data, **policies(setting)}
    frozen = {p for p in module.parameters() if not p.requires_grad}
    return wrapped_by_block(module, lambda part: replicate(part, ignored_params=frozen, **options))


def wrapped_by_block(module: nn.Module, wrap: Callable[[nn.Module], Any]) -> nn.Module:
    """Wrap every block, then what is left. Tied embeddings share the last group, since a parameter is in one only."""
    from torch.distributed.fsdp import FSDPModule

    from trainers.model import blocks

    for block in blocks(module):
        wrap(block)
    wrap(module)
    for part in module.modules():  # these two are not recursive
        if isinstance(part, FSDPModule):
            # Plain sums: the default factor needs an operation that gloo lacks and that loses bf16 gradients on NCCL.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    return module


STRATEGIES.register("fsdp2")(FSDP2())
