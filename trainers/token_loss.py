"""A micro batch as the model runs it, and the summed loss of its targets."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, pad

from trainers.data import IGNORED
from trainers.regions import LOSS, region
from trainers.strategies import Setting

Batch = dict[str, torch.Tensor]
"""input_ids and labels, int64 [rows, tokens]; as the model runs it: input_ids, targets and position_ids."""


def keeps_heads(setting: Setting) -> bool:
    """Tell whether logits are made only where there are targets: by whole models of a known architecture."""
    plan = setting.plan
    return setting.shape is not None and plan.tp == plan.pp == plan.cp == 1


def head_columns(labels: torch.Tensor) -> torch.Tensor:
    """Return the positions at which any row has a target, at least one; int64 [positions] on the labels' device.

    Read off the labels where they are on the host: on a GPU it would wait for the device.
    """
    any_target = (labels[:, 1:] != IGNORED).any(0)
    any_target[:1] |= ~any_target.any()
    return any_target.nonzero().flatten()


def prepared(batch: Batch, multiple: int = 1, heads: bool = False) -> Batch:
    """Return a batch as the model runs it: input_ids, targets, position_ids, int64 [rows, tokens].

    Position t of the targets holds the token to predict there; shifted before any division of the sequence, or targets
    at the edges would be lost. Rows are padded to a multiple of `multiple` tokens. With `heads` also head_columns, the
    positions at which logits are needed, int64 [positions].
    """
    columns: Batch = {}
    if heads:
        known = batch.get("head_columns")
        columns["head_columns"] = known if known is not None else head_columns(batch["labels"])
    rows, tokens = batch["input_ids"].shape
    ids, labels = padded(batch, rows, tokens + -tokens % multiple).values()
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    targets = pad(labels[:, 1:], (0, 1), value=IGNORED)
    return {"input_ids": ids, "targets": targets, "position_ids": positions, **columns}


def padded(batch: Batch, rows: int, tokens: int) -> Batch:
    """Return input_ids and labels with rows and columns added up to [rows, tokens]; what is added is no target."""
    ids, labels = batch["input_ids"], batch["labels"]
    missing = (0, tokens - ids.shape[1], 0, rows - ids.shape[0])
    return {"input_ids": pad(ids, missing), "labels": pad(labels, missing, value=IGNORED)}


def loss_context(setting: Setting) -> AbstractContextManager[None]:
    """Return the context of a loss and of its backward pass."""
    if setting.plan.tp == 1:
        return nullcontext()
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()  # the logits stay sharded over the vocabulary


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """Return the summed cross entropy of a prepared micro batch's targets.

    No attention mask is passed: rows are padded on the right, and under causal attention no token sees what is
    to its right, so padding changes nothing but keeps the kernels' fast paths open.
    """
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
    if "head_columns" not in batch:
        return loss_sum(model(**inputs).logits, batch["targets"])
    columns = batch["head_columns"]
    return loss_sum(model(**inputs, logits_to_keep=columns).logits, batch["targets"][:, columns])


def loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum of the targets' cross entropy, in float32 at least; 0 where there is no target.

    `logits` [rows, tokens, vocabulary], `targets` int64 [rows, tokens], IGNORED where there is none.
    """
    with region(LOSS):
        if logits.dtype.itemsize < 4:  # half precision; float64 stays as it is
            logits = logits.float()
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def whole_value(value: torch.Tensor) -> torch.Tensor:
    """Return a loss or a parameter as a plain tensor, detached."""
    detached = value.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached
