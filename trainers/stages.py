"""The stages of a pipeline: how a model is cut into them, and how windows run through them.

Stage i of n holds the i-th share of the blocks, the first also the embedding, the last the final norm and the output
head; it is on rank i % pp of its pipeline.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor, Shard

from trainers import activation_checkpointing, token_loss
from trainers.adapter import bare
from trainers.build import DTYPES, Built, is_tied
from trainers.engine import Runner
from trainers.gradients import local
from trainers.layout import Layout
from trainers.memory import MemoryMeter
from trainers.strategies import Setting
from trainers.strategies.pipeline import STAGES_OF_A_RANK, number_of_stages, schedule
from trainers.token_loss import Batch, loss_context, padded, whole_value

M = TypeVar("M", bound=nn.Module)

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,  # not ZBV: there one rank has both ends, and tied weights twice
}


class Skipped(nn.Module):
    """Stands where a module is on another stage, and passes on what it would be given."""

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden


class Stage(nn.Module):
    """A stage as it runs: a transformers model whose other blocks are skipped, from plain tensor to plain tensor."""

    def __init__(self, inner: nn.Module, last: bool, tp: DeviceMesh | None) -> None:
        super().__init__()
        self.inner: Any = inner
        self._last, self._tp = last, tp

    def forward(self, inputs: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Run the blocks of this stage on input_ids [rows, tokens] or hidden states [rows, tokens / tp, hidden].

        `position_ids` [rows, tokens]. Returns hidden states; the last stage logits [rows, tokens, vocabulary].
        """
        name = "inputs_embeds" if inputs.is_floating_point() else "input_ids"
        if inputs.is_floating_point() and self._tp is not None:  # between blocks tensor parallelism divides the tokens
            inputs = DTensor.from_local(inputs, self._tp, [Shard(1)], run_check=False)
        # Not inner(…).logits: that slices, and of a view wrappers warn.
        hidden = self.inner.model(**{name: inputs}, position_ids=position_ids, use_cache=False).last_hidden_state
        return self.inner.lm_head(hidden) if self._last else local(hidden)


def stages(adapted: nn.Module, setting: Setting, layout: Layout) -> tuple[nn.Module, tuple[Stage, ...]]:
    """Return this rank's share of a model: as one module under the checkpoint's names, and as the stages that run.

    Both are made of the model's own modules, so what is done to the parameters of one is done to the other.
    """
    inner: Any = bare(adapted)
    count, layers = number_of_stages(setting), len(inner.model.layers)
    # Where they do not divide, the first stages have one more: the last has the output head to compute.
    bounds = [-(-layers * i // count) for i in range(count + 1)]
    mine = indices(setting, layout)
    blocks = {i: range(bounds[i], bounds[i + 1]) for i in mine}
    tp = layout.mesh["tp"] if setting.plan.tp > 1 else None
    parts = tuple(Stage(share(inner, blocks[i], i == 0, i == count - 1), i == count - 1, tp) for i in mine)
    held = share(inner, {block for i in mine for block in blocks[i]}, 0 in mine, count - 1 in mine)
    return around(adapted, held), parts


def indices(setting: Setting, layout: Layout) -> range:
    """Return the indices of this rank's stages."""
    return range(layout.at["pp"], number_of_stages(setting), setting.plan.pp)


def share(model: Any, blocks: Collection[int], first: bool, last: bool) -> nn.Module:
    """Return a transformers model of the same modules without those of other stages.

    Blocks keep their positions, and so their names, and the masks and rotary embeddings that the model gives them.
    """
    inner: Any = clone(model)
    inner.model = clone(model.model)
    inner.model.layers = nn.ModuleList(b if i in blocks else Skipped() for i, b in enumerate(model.model.layers))
    # A trained output head that is tied to the embedding stays so, under the name of the embedding: whoever saves or
    # counts parameters finds one, as without a pipeline.
    if not first and not (last and is_tied(model) and model.model.embed_tokens.weight.requires_grad):
        inner.model.embed_tokens = None
    if not last:
        inner.model.norm, inner.lm_head = Skipped(), Skipped()
    return cast("nn.Module", inner)


def around(adapted: nn.Module, inner: nn.Module) -> nn.Module:
    """Return the adapter's wrappers around another transformers model; without an adapter, that model."""
    if adapted is bare(adapted):
        return inner
    outer: Any = clone(adapted)
    outer.base_model = clone(outer.base_model)
    outer.base_model.model = inner
    return cast("nn.Module", outer)


def clone(module: M) -> M:
    """Return a second module over the same children, parameters and hooks, whose own can be exchanged."""
    copied = copy.copy(module)
    for name, value in vars(copied).items():
        if isinstance(value, (dict, set)):
            vars(copied)[name] = copy.copy(value)
    return copied


class Pipeline(Runner):
    """Runs windows through the stages of this rank with one of torch's schedules.

    Gradients are reduced over data-parallel ranks once, after the last backward pass of a stage. Forward and backward
    passes take turns, so the meter's phase `forward` is the whole schedule, and there is no phase `backward`.
    """

    def __init__(self, built: Built, setting: Setting, layout: Layout) -> None:
        self._parts, self._setting, self._layout = built.parts, setting, layout
        self._count, self._indices = number_of_stages(setting), indices(setting, layout)
        self._group = layout.mesh["pp"].get_group()
        self._embedding = tied_embedding(built.model)
        self._micro_batches = setting.micro_batches
        self._shape: tuple[int, int, int] | None = None
        self._schedule: Any = None
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []
        # All ranks must take part in a group's first operation on CUDA; the schedules' first is between two.
        dist.all_reduce(torch.zeros(1, device=layout.device), group=self._group)

    @property
    def _first(self) -> bool:
        return 0 in self._indices

    @property
    def _last(self) -> bool:
        return self._count - 1 in self._indices

    def window(self, micro_batches: Sequence[Batch]) -> list[Batch]:
        """Return as many micro batches as a full window has, all of one shape: tensors of one size travel.

        What is added has no targets, and changes nothing but time.
        """
        rows, tokens = (max(batch["input_ids"].shape[i] for batch in micro_batches) for i in (0, 1))
        some = micro_batches[0]
        empty = {name: value[:0] for name, value in some.items()}
        missing = self._micro_batches - len(micro_batches)
        return [padded(batch, rows, tokens) for batch in [*micro_batches, *[empty] * missing]]

    def train(self, batches: Iterable[Batch], count: int, scale: float, meter: MemoryMeter) -> torch.Tensor:
        self._wait()
        micro_batches = list(batches)
        rows, tokens = micro_batches[0]["input_ids"].shape
        joined = {name: torch.cat([batch[name] for batch in micro_batches]) for name in micro_batches[0]}
        offload = activation_checkpointing.offloaded(self._setting.system.offload_activations, self._layout.device)
        losses: list[torch.Tensor] = []
        with meter.phase("forward"), offload, loss_context(self._setting):
            self._fitting(len(micro_batches), rows, tokens).step(
                *((joined["input_ids"],) if self._first else ()),
                target=joined["targets"] if self._last else None,
                losses=losses if self._last else None,
                loss_kwargs={"scale": scale},
                return_outputs=False,
                position_ids=joined["position_ids"],
            )
        self._sum_tied_gradients()
        total = torch.zeros((), dtype=torch.float64, device=self._layout.device)
        return torch.stack([total, *(whole_value(loss).double() for loss in losses)]).sum() / scale

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Pass one batch through the stages. A rank goes on to the next batch while later stages have this one."""
        self._wait()
        total = torch.zeros((), dtype=torch.float64, device=self._layout.device)
        with loss_context(self._setting):
            for i, part in zip(self._indices, self._parts, strict=True):
                inputs = self._received(*batch["input_ids"].shape) if i else batch["input_ids"]
                output = part(inputs, position_ids=batch["position_ids"])
                if i == self._count - 1:
                    total += whole_value(token_loss.loss_sum(output, batch["targets"]))
                else:
                    self._send(output)
        return total

    def counted_elsewhere(self) -> Sequence[nn.Parameter]:
        return (self._embedding,) if self._embedding is not None and self._last else ()

    def _fitting(self, micro_batches: int, rows: int, tokens: int) -> Any:
        """Return the schedule for a window of this shape; only the latest is kept, since each has buffers for its own.

        Shapes are declared, or torch would run a micro batch to learn them whenever they change.
        """
        if self._shape == (micro_batches, rows, tokens):
            return self._schedule
        self._schedule = None  # first, so that its buffers are freed
        hidden = self._hidden(rows, tokens, torch.device("meta")).requires_grad_()
        ids = torch.empty(rows, tokens, dtype=torch.int64, device="meta")
        built = [
            # The last stage's output goes nowhere, so that its shape does not matter.
            PipelineStage(
                part,
                i,
                self._count,
                self._layout.device,
                input_args=hidden if i else ids,
                output_args=hidden,
                group=self._group,
            )
            for i, part in zip(self._indices, self._parts, strict=True)
        ]
        name = schedule(self._setting)
        several = STAGES_OF_A_RANK[name] > 1
        # Losses are scaled already; dividing by the number of micro batches would be the mean of means.
        self._schedule = SCHEDULES[name](
            built if several else built[0], micro_batches, loss_fn=scaled_loss, scale_grads=False
        )
        self._shape = (micro_batches, rows, tokens)
        return self._schedule

    def _hidden(self, rows: int, tokens: int, device: torch.device) -> torch.Tensor:
        """Return uninitialised hidden states as they travel: [rows, tokens / tp, hidden], of the compute dtype."""
        config = cast(Any, self._parts[0]).inner.config
        divided = tokens // self._setting.plan.tp
        return torch.empty(rows, divided, config.hidden_size, dtype=DTYPES[self._setting.compute_dtype], device=device)

    def _sum_tied_gradients(self) -> None:
        """Sum the gradients of first and last stage of a weight that both have; a + b = b + a, to the last bit."""
        if self._embedding is None:
            return
        gradient = local(cast(torch.Tensor, self._embedding.grad))
        mine = gradient.to(self._layout.device)  # it may be kept on the host
        other = torch.empty_like(mine)
        peer = self._setting.plan.pp - 1 if self._first else 0
        operations = [
            dist.P2POp(dist.isend, mine, group=self._group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=self._group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        gradient.add_(other.to(gradient.device))

    def _received(self, rows: int, tokens: int) -> torch.Tensor:
        buffer = self._hidden(rows, tokens, self._layout.device)
        before = (self._layout.at["pp"] - 1) % self._setting.plan.pp
        dist.recv(buffer, group=self._group, group_src=before)
        return buffer

    def _send(self, output: torch.Tensor) -> None:
        after = (self._layout.at["pp"] + 1) % self._setting.plan.pp
        sent = output.contiguous()
        work = dist.isend(sent, group=self._group, group_dst=after)
        self._sent.append((cast(dist.Work, work), sent))  # kept until it has arrived

    def _wait(self) -> None:
        """Wait until what was sent in an evaluation has arrived."""
        while self._sent:
            self._sent.pop()[0].wait()


def scaled_loss(logits: torch.Tensor, targets: torch.Tensor, scale: float) -> torch.Tensor:
    """Return what a micro batch backpropagates, a scalar."""
    return token_loss.loss_sum(logits, targets) * scale


def tied_embedding(model: nn.Module) -> nn.Parameter | None:
    """Return the trained weight that first and last stage share, on these two."""
    inner: Any = bare(model)
    embedding = inner.model.embed_tokens
    shared = embedding is not None and inner.config.tie_word_embeddings and embedding.weight.requires_grad
    return embedding.weight if shared else None
