"""Memory by account and phase in closed form: microseconds, no torch, no GPU.

The peak of a step is the highest of a few instants: the logits of the forward pass and of the backward pass, the
backward pass of the last block and of the first, its end, and the optimizer. At each the accounts are summed from what
is stored (by the strategy's share), what a forward pass keeps for the backward pass, and what is needed for a moment.

Source of the counts per token: what autograd keeps of transformers' blocks, read off the tensors that it saves
(design.md, section 14). T: tokens of a micro batch on a rank, h hidden size, f intermediate size, q and k the widths of
queries and of keys, V the vocabulary, e bytes of a number in computing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from trainers.flops import adapted
from trainers.result import Accounts
from trainers.shape import ModelShape
from trainers.strategies import BYTES, STRATEGIES, Parameters, Setting, Share

FLOAT32 = 4
NF4 = 0.5 + 1 / 64 + FLOAT32 / (64 * 256)  # bytes a weight: 4 bits, a scale of a byte for 64, one of those for 256


@dataclass(frozen=True)
class MicroBatch:
    """What memory follows from: rows, padded to `tokens` each, and at how many of these positions logits are made."""

    rows: int
    tokens: int
    heads: int


def predict(shape: ModelShape, setting: Setting, batch: MicroBatch) -> dict[str, Accounts]:
    """Return the accounts at the peak of each phase, of the rank that holds most, in bytes."""
    if setting.plan.pp == 1:
        return _Ledger(shape, setting, batch).phases()
    # The first stage keeps activations of more micro batches, the last one makes logits.
    stages = [_Ledger(shape, setting, batch, stage).phases() for stage in ("first", "last")]
    return max(stages, key=lambda phases: peak(phases)[1].total)


def kept_of_block(shape: ModelShape, setting: Setting, batch: MicroBatch) -> float:
    """Return the bytes that the forward pass of one block leaves for its backward pass, recomputed or not."""
    return _Ledger(shape, setting, batch)._kept()


def on_host(shape: ModelShape, setting: Setting, batch: MicroBatch) -> float:
    """Return the bytes that a rank keeps in host memory: what is offloaded, and a copy of what is trained."""
    own = parameters(shape, setting)
    strategy = STRATEGIES[setting.system.strategy]
    options = {name: "none" if name == "offload" else value for name, value in setting.options.items()}
    nothing_offloaded = dataclasses.replace(setting, system=dataclasses.replace(setting.system, options=options))
    whole, share = (strategy.share(s, own, s.micro_batches) for s in (nothing_offloaded, setting))
    activations = 0.0
    if setting.system.offload_activations and setting.device == "cuda":
        activations = _Ledger(shape, setting, batch, "first" if setting.plan.pp > 1 else "whole").on_host()
    copied = FLOAT32 * own.trained * whole.weights / max(FLOAT32 * own.trained + own.frozen, 1.0)
    offloaded = (whole.weights - share.weights, whole.gradients - share.gradients)
    return copied + activations + sum(offloaded) + whole.optimizer_state - share.optimizer_state


def parameters(shape: ModelShape, setting: Setting) -> Parameters:
    """Return the parameters of the rank that holds most, before the data-parallel method divides them."""
    learning, plan = setting.learning, setting.plan
    compute, stored = setting.width, BYTES[setting.weight_dtype]
    blocks, block = math.ceil(shape.num_hidden_layers / plan.pp), shape.num_block_parameters
    table = shape.vocab_size * shape.hidden_size
    # Of a pipeline the last stage has the output head, the first the embedding: one of them, or both without.
    root = (table if plan.pp > 1 else shape.num_embedding_parameters) + shape.hidden_size
    if learning.adapter == "full":
        return Parameters(block / plan.tp, 0.0, root / plan.tp, 0.0, blocks, compute, table / plan.tp)
    adapter = shape.num_lora_parameters(learning.lora_rank, adapted(learning)) / shape.num_hidden_layers
    matrices = sum(inputs * outputs for inputs, outputs in shape.linear_layers.values())
    frozen = block * stored if learning.adapter == "lora" else matrices * NF4 + (block - matrices) * stored
    return Parameters(adapter / plan.tp, frozen / plan.tp, 0.0, root * stored / plan.tp, blocks, compute, 0.0)


class _Ledger:
    """The sizes of one configuration, and its instants."""

    def __init__(self, shape: ModelShape, setting: Setting, batch: MicroBatch, stage: str = "whole") -> None:
        self.shape, self.setting, self.batch = shape, setting, batch
        self.plan, self.e = setting.plan, setting.width
        self.full = setting.learning.adapter == "full"
        self.targets = adapted(setting.learning)
        self.accumulation = setting.micro_batches
        self.own = parameters(shape, setting)
        self.share: Share = STRATEGIES[setting.system.strategy].share(setting, self.own, self.accumulation)
        multiple = self.plan.cp * self.plan.tp
        self.tokens = batch.rows * (-(-batch.tokens // multiple) * multiple) / self.plan.cp  # in attention and mlp
        whole = self.plan.tp == self.plan.pp == self.plan.cp == 1
        self.logit_rows = batch.rows * batch.heads if whole else self.tokens
        self.logits = 0.0 if stage == "first" else self.logit_rows * shape.vocab_size / self.plan.tp  # numbers
        self.stage = stage
        self.hidden = self.tokens * shape.hidden_size / self.plan.tp  # numbers of a residual, divided over the tokens
        self.in_flight = self._in_flight()

    def on_host(self) -> float:
        """Return the bytes of activations that are kept in host memory where they are offloaded: all but a block's."""
        return max(self.own.blocks * self.in_flight - 1, 0) * self._kept()

    def phases(self) -> dict[str, Accounts]:
        """Return the highest instant of each phase."""
        stored = Accounts(weights=round(self.share.weights), optimizer_state=round(self.share.optimizer_state))
        phases = {name: max(found, key=lambda a: a.total) for name, found in self._instants(stored).items()}
        if self.plan.pp > 1:  # its passes take turns, in one phase
            phases["forward"] = max(phases["forward"], phases.pop("backward"), key=lambda a: a.total)
        return phases

    def _instants(self, stored: Accounts) -> dict[str, list[Accounts]]:
        share, kept, head, waiting = self.share, self._kept(), self._head(), self._waiting()
        offloaded = self.setting.system.offload_activations and self.setting.device == "cuda"
        blocks = 1 if offloaded else self.own.blocks * self.in_flight
        before, after = share.gradients_before, share.gradients
        passing = self._passing()
        one = self._block()
        # What selective recomputation has kept of a block is not made again.
        recomputed = {"none": 0.0, "full": one, "selective": max(one - kept, 0.0)}[
            self.setting.system.activation_checkpointing
        ]
        # By the time that the last block's backward pass runs, the head's gradient is there; by the first's, all are.
        embedding = after * self.own.embedding / max(self.own.trained, 1)
        last = max(before, embedding) + share.bucketed
        first = max(before, after if self.shape.tie_word_embeddings else after - embedding) + share.bucketed
        updating = [
            self._at(stored, after, 0, share.norm),
            self._at(stored, 0 if share.released else after, 0, share.stepping + self._loop()),
        ]
        # Log-probabilities, and what these are made of; then the gradients of these and of the logits. With tp torch's
        # loss over a divided vocabulary needs one more of each.
        forward, backward = (12, 16) if self.plan.tp > 1 else (8, 12)
        return {
            "load": [self._at(stored, 0, 0, 0, without_state=True)],
            "forward": [
                self._at(stored, before, blocks * kept, share.gathered + share.prefetching),
                self._at(stored, before, blocks * kept + head, share.gathered + self.e * self.logits + waiting),
                self._at(stored, before, blocks * kept + head, share.gathered_after + forward * self.logits + waiting),
            ],
            "backward": [
                self._at(stored, before, blocks * kept + head, share.gathered_after + backward * self.logits + waiting),
                self._at(stored, before, blocks * kept + head, share.gathering + 4 * self.logits + waiting),
                self._at(
                    stored, last, blocks * kept + recomputed,
                    share.gathered + share.reducing + passing,
                ),
                self._at(  # the block before it: the last one's gradients are on their way
                    stored, last, max(blocks - 1, 0) * kept + recomputed,
                    share.gathered + share.reducing_more + passing,
                ),
                self._at(
                    stored, first, kept + recomputed,
                    share.gathered + share.reducing_more + passing,
                ),
                self._at(stored, first, 0, self._embedding()),
                self._at(stored, after + share.bucketed, 0, share.reducing_root),
            ],
            "first_optimizer_step": updating,
            "optimizer": updating,
        }  # fmt: skip

    def _at(
        self, stored: Accounts, gradients: float, activations: float, temporary: float, without_state: bool = False
    ) -> Accounts:
        return Accounts(
            stored.weights, round(gradients), 0 if without_state else stored.optimizer_state, round(activations),
            round(temporary),
        )  # fmt: skip

    def _in_flight(self) -> int:
        """Return for how many micro batches a stage keeps activations: all of a window, or as many as come after it."""
        if self.plan.pp == 1:
            return 1
        if self.setting.options.get("pp_schedule") == "gpipe":
            return self.accumulation
        return min(self.accumulation, self.plan.pp if self.stage == "first" else 1)

    def _kept(self) -> float:
        """Return the bytes that the forward pass of a block keeps for its backward pass."""
        shape, e, t = self.shape, self.e, self.tokens / self.plan.tp
        mode = self.setting.system.activation_checkpointing
        if mode == "none":
            return self._block()
        kept = e * self.hidden  # its input
        if mode == "selective":  # attention, and of the matrix products the first and every second one after it
            kept += t * (e * sum(self._products()[::2]) + e * shape.query_size + 4 * shape.num_attention_heads)
        return kept

    def _products(self) -> list[int]:
        """Return the widths of what the matrix products of a block put out, in order."""
        found = []
        for name, (_, outputs) in self.shape.linear_layers.items():
            found.append(outputs)
            if name in self.targets:
                found += [self.setting.learning.lora_rank, outputs]
        return found

    def _block(self) -> float:
        """Return the bytes that autograd keeps of a block: norms, queries, keys, values, attention, and the mlp."""
        shape, e, t = self.shape, self.e, self.tokens / self.plan.tp
        q, k, f, h = shape.query_size, shape.key_value_size, shape.intermediate_size, self.hidden
        inputs = {"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}
        # Of a norm its input in float32, the inverse root, what is scaled if the scale is trained, and what comes out
        # if a product keeps it.
        kept = 0.0
        for products in inputs:
            kept += 4 * h + 4 * h / shape.hidden_size + (e * h if self.full else 0)
            if self.full or products & set(self.targets):
                kept += e * self.tokens * shape.hidden_size  # gathered over tp
        kept += t * e * (2 * q + 2 * k) + 4 * t * shape.num_attention_heads
        if shape.qk_norm:
            kept += t * ((4 + (e if self.full else 0)) * (q + k))
            kept += 4 * t * (shape.num_attention_heads + shape.num_key_value_heads)
        needed = self.full or "down_proj" in self.targets  # what down multiplies; gate, its silu and up in any case
        kept += t * e * f * (4 if needed else 3)
        kept += e * self.tokens * self.setting.learning.lora_rank * len(self.targets)
        if self.setting.system.attn_implementation == "eager":
            kept += self._scores()
        return kept

    def _scores(self) -> float:
        """Attention's weights [rows, heads, tokens, tokens]: in float32 of the softmax, and as they are multiplied."""
        length = self.tokens / self.batch.rows
        pairs = self.batch.rows * self.shape.num_attention_heads / self.plan.tp * length * length
        return pairs * (4 + (self.e if self.e < FLOAT32 else 0))

    def _head(self) -> float:
        """Return what the final norm and the output head keep, without log-probabilities; and what stages exchange."""
        between = self.accumulation * self.e * self.hidden if self.plan.pp > 1 else 0.0  # a buffer a micro batch
        if self.stage == "first":
            return between
        kept = between + (4 + (self.e if self.full else 0)) * self.hidden
        if self.full:
            kept += self.e * self.logit_rows * self.shape.hidden_size
        return kept

    def _waiting(self) -> float:
        """Return the logits that a pipeline's last stage keeps as its output, and what its earlier losses keep."""
        if self.plan.pp == 1:
            return 0.0
        return self.e * self.logits + (self.in_flight - 1) * (FLOAT32 + self.e) * self.logits

    def _loop(self) -> float:
        """Return what an optimizer that takes one parameter after another makes of it: on CUDA one kernel takes all."""
        if self.setting.device == "cuda":
            return 0.0
        if self.share.flat:
            return 2 * FLOAT32 * self.share.flat
        matrices = [i * o for i, o in self.shape.linear_layers.values()]
        rank = self.setting.learning.lora_rank
        adapters = [rank * max(size) for name, size in self.shape.linear_layers.items() if name in self.targets]
        largest = (
            max(*matrices, self.shape.vocab_size * self.shape.hidden_size) if self.full else max(adapters, default=0)
        )
        return 2 * FLOAT32 * largest * min(1.0, self.share.optimizer_state / (8 * max(self.own.trained, 1)))

    def _embedding(self) -> float:
        """Return what the embedding's backward pass needs where weights are gathered for it.

        The root's weights; the head's gradient, the embedding's, and if they are tied their sum; what a block sends.
        """
        if not self.share.gathered:
            return 0.0
        own, share = self.own, self.share
        gradients = 3 * own.embedding if self.shape.tie_word_embeddings else own.trained_root
        return min(share.gathered, own.root_in_use) + own.compute * gradients + share.reducing_more - share.reducing

    def _passing(self) -> float:
        """Return the gradients of activations in the backward pass of a block: three of the mlp's width and a few."""
        shape, t = self.shape, self.tokens / self.plan.tp
        return self.e * (2 * t * shape.intermediate_size + 2 * self.tokens * shape.hidden_size)


def peak(phases: Mapping[str, Accounts]) -> tuple[str, Accounts]:
    """Return the phase with the highest sum, and its accounts."""
    return max(phases.items(), key=lambda item: item[1].total)
