"""Make the embedded base's weights again: `python -m trainers.embedded.pretrain [--out FILE] [--updates N]`.

One process, one thread, fixed seeds: 2 to 3 minutes. The same machine and libraries give the same bytes.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from trainers.data import IGNORED
from trainers.embedded import model, task

SEED = 0
UPDATES = 300
BATCH_SIZE = 16
LEARNING_RATE = 3e-3
WARMUP_UPDATES = 20


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the base from random weights and write it."""
    parser = argparse.ArgumentParser(prog="python -m trainers.embedded.pretrain", description=__doc__)
    parser.add_argument("--out", type=Path, default=model.WEIGHTS, help="the file to write (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=UPDATES, help="optimizer updates (default: %(default)s)")
    options = parser.parse_args(arguments)
    write(train(options.updates), options.out)


def train(updates: int) -> LlamaForCausalLM:
    """Return a model trained for `updates` updates on all tokens of the pretraining rows; prints the loss."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    base = LlamaForCausalLM(model.config())
    optimizer = torch.optim.AdamW(base.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: _learning_rate_factor(update, updates))
    batches = _batches(_encode(task.pretraining_rows()))
    for update in range(updates):
        loss = _loss(base, next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(base.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (update + 1) % 50 == 0:
            print(f"update {update + 1}/{updates}: loss {loss.item():.3f} nats/token", flush=True)
    return base


def write(base: LlamaForCausalLM, path: Path) -> None:
    """Write the weights in bfloat16, without the output embedding: it is the input embedding."""
    weights = {name: weight.to(torch.bfloat16) for name, weight in base.named_parameters()}
    save_file(weights, path, metadata={"format": "pt"})


def _learning_rate_factor(update: int, updates: int) -> float:
    """Return a linear warm-up followed by half a cosine that ends at a tenth."""
    cosine = 0.55 + 0.45 * math.cos(math.pi * update / updates)
    return min((update + 1) / WARMUP_UPDATES, cosine)


def _encode(rows: Sequence[dict[str, str]]) -> list[list[int]]:
    """Return the token ids of each row as a chat of two turns."""
    tokenizer = model.tokenizer()
    chats = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        for row in rows
    ]
    ids: list[list[int]] = tokenizer(tokenizer.apply_chat_template(chats, tokenize=False)).input_ids
    return ids


def _batches(samples: Sequence[list[int]]) -> Iterator[torch.Tensor]:
    """Yield ids [BATCH_SIZE, longest of the batch] without end, padded with IGNORED on the right.

    A batch holds samples of like length, since padding would double the time; each epoch shuffles the batches.
    """
    by_length = sorted(samples, key=len)
    starts = list(range(0, len(samples) - BATCH_SIZE + 1, BATCH_SIZE))
    rng = random.Random(SEED)
    while True:
        for start in rng.sample(starts, len(starts)):
            rows = [torch.tensor(sample) for sample in by_length[start : start + BATCH_SIZE]]
            yield torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORED)


def _loss(base: LlamaForCausalLM, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss, in nats per token, over all tokens of `labels` [batch, length] that are not IGNORED."""
    # Padding is on the right and attention causal, so no real token sees it and no mask is needed.
    logits = base(labels.clamp(min=0), use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
    )


if __name__ == "__main__":
    main()
