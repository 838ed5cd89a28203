"""Pipeline parallelism: the ranks of a pp group hold different layers, and micro batches flow through them.

What is cut and how it runs is in trainers/stages.py; here is which settings are legal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainers.strategies import DIMENSIONS, Dimension, Option, Setting, Traffic

if TYPE_CHECKING:
    from torch import nn

    from trainers.layout import Layout
    from trainers.shape import ModelShape

STAGES_OF_A_RANK = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zero_bubble": 2}
"""By schedule. Two stages of a rank halve what it waits for the others, and double what is sent."""


class Pipeline(Dimension):
    """Stages of whole blocks, in a loop over the ranks: stage i is on rank i % pp."""

    options = (
        Option(
            "pp_schedule",
            str,
            "1f1b",
            "order of forward and backward passes: gpipe keeps the activations of all micro batches, 1f1b of as many "
            "as there are stages; interleaved_1f1b gives each rank two stages; zero_bubble splits backward passes too",
            tuple(STAGES_OF_A_RANK),
        ),
    )

    def validate(self, setting: Setting) -> list[str]:
        rules = [*_too_few_layers(setting), *_wrong_number_of_micro_batches(setting)]
        if setting.system.strategy == "zero":
            rules.append(f"pp={setting.plan.pp} with strategy=zero: DeepSpeed cannot wrap a stage; use ddp or fsdp2")
        return rules + (_wrong_beside_split_backward(setting) if schedule(setting) == "zero_bubble" else [])

    def traffic(self, setting: Setting, shape: ModelShape, tokens: float) -> Traffic:
        # Hidden states to the next stage, and their gradients back.
        plan, passes = setting.plan, 2 * STAGES_OF_A_RANK[schedule(setting)]
        sent = passes * tokens * shape.hidden_size / plan.tp * setting.width
        sends = passes * setting.micro_batches
        return Traffic(sent, plan.pp, overlapped=True, stride=plan.world // plan.pp, sends=sends)

    def apply(self, model: nn.Module, setting: Setting, layout: Layout) -> None:
        """Do nothing: the model is cut last, when all else has been done to it; see trainers.build.split."""


def schedule(setting: Setting) -> str:
    """Return the name of a setting's schedule."""
    return str(setting.options.get("pp_schedule", "1f1b"))


def number_of_stages(setting: Setting) -> int:
    """Return the number of stages over all ranks of a pipeline."""
    return setting.plan.pp * STAGES_OF_A_RANK[schedule(setting)]


def _too_few_layers(setting: Setting) -> list[str]:
    stages = number_of_stages(setting)
    if setting.shape is None or setting.shape.num_hidden_layers >= stages:
        return []
    layers = setting.shape.num_hidden_layers
    given = f"pp={setting.plan.pp} with pp_schedule={schedule(setting)}"
    return [f"{given} makes {stages} stages; the model has {layers} layers, and a stage at least one"]


def _wrong_number_of_micro_batches(setting: Setting) -> list[str]:
    """Return rules on the micro batches of a window; none where the batch does not divide, which is another fault."""
    batch, micro, plan = setting.learning.global_batch_size, setting.system.micro_batch_size, setting.plan
    count, rest = divmod(batch, micro * plan.dp)
    if rest or schedule(setting) == "gpipe":
        return []
    given = f"global_batch_size={batch} / (micro_batch_size={micro} × dp={plan.dp}) = {count} micro batches"
    if count < plan.pp:
        return [f"{given}: pp_schedule={schedule(setting)} needs at least pp={plan.pp} of them, and gpipe any number"]
    rounds = count // plan.pp
    if STAGES_OF_A_RANK[schedule(setting)] > 1 and count % rounds:
        in_rounds = f"pp_schedule={schedule(setting)} runs them in {count} // pp={plan.pp} = {rounds} equal rounds"
        return [f"{given}: {in_rounds}, so their number must be a multiple of {rounds}"]
    return []


def _wrong_beside_split_backward(setting: Setting) -> list[str]:
    """Return rules on what breaks where the gradients of inputs and of weights are computed apart."""
    rules, given = [], "pp_schedule=zero_bubble"
    if setting.system.strategy == "fsdp2" and setting.options.get("reshard_after_forward", True):
        rules.append(
            f"{given} with reshard_after_forward=true is wrong, as weights are freed between the halves of a backward "
            "pass; reshard_after_forward must be false"
        )
    if setting.system.activation_checkpointing != "none":
        rules.append(
            f"{given} with activation_checkpointing={setting.system.activation_checkpointing} recomputes each block "
            "many times; activation_checkpointing must be none"
        )
    if setting.plan.tp > 1:
        rules.append(f"{given} with tp={setting.plan.tp}: torch cannot split that backward pass; use 1f1b")
    return rules


DIMENSIONS.register("pp")(Pipeline())
