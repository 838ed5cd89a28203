"""A model's published weights, read from safetensors in the pieces that a rank needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainers.adapter import base_name, initial_weight, is_adapter
from trainers.embedded import model as embedded
from trainers.embedded.model import EMBEDDED
from trainers.errors import UserError
from trainers.gradients import local
from trainers.model import reached
from trainers.quantization import packed_layers

INDEX = "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Weights:
    """Tensors by name, in one or more safetensors files; nothing is read before it is asked for."""

    def __init__(self, files: Mapping[str, Path], described: str) -> None:
        self._files, self._described = files, described
        self._open: dict[Path, Any] = {}

    @staticmethod
    def of(model: str, revision: str | None = None) -> Weights | None:
        """Return the weights of the embedded model, a folder or a hub id; None where they are not in safetensors."""
        if model == EMBEDDED:
            return Weights._in_files([embedded.WEIGHTS], model)
        folder = Path(model) if Path(model).is_dir() else _downloaded(model, revision)
        index = folder / INDEX
        if index.is_file():
            names = json.loads(index.read_text())["weight_map"]
            return Weights({name: folder / file for name, file in names.items()}, f"model={model}")
        files = sorted(folder.glob("*.safetensors"))
        return Weights._in_files(files, f"model={model}") if files else None

    @staticmethod
    def _in_files(files: Sequence[Path], described: str) -> Weights:
        from safetensors import safe_open

        found: dict[str, Path] = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                found |= dict.fromkeys(opened.keys(), file)
        return Weights(found, described)

    def begin(self) -> None:
        """Is called before a rank's parameters are given memory."""

    def piece(self, name: str, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """Return `size` elements from `offset` of each dimension, on the CPU. UserError: it is not there."""
        from safetensors import safe_open

        # An output head that is tied to the embedding is published once.
        stored = EMBEDDING if name == HEAD and name not in self._files else name
        if stored not in self._files:
            raise UserError(f"{self._described}: its weights have no tensor {name}")
        file = self._files[stored]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        view = self._open[file].get_slice(stored)
        index = slices(offset, size)
        whole = view.get_shape()
        if len(whole) != len(index) or any(s.stop > n for s, n in zip(index, whole, strict=True)):
            raise UserError(f"{self._described}: {name} has shape {whole} in its files, and another in the config")
        piece: torch.Tensor = view[index]
        return piece


@torch.no_grad()
def fill(module: nn.Module, weights: Weights | None, seed: int) -> None:
    """Copy an adapter's first weights, and published ones if given, into what this rank holds of the parameters."""
    packed = packed_layers(module)
    for name, parameter in module.named_parameters():
        offset, size = held(parameter)
        if is_adapter(name):
            whole = initial_weight(name, tuple(parameter.shape), seed)
            piece = whole[slices(offset, size)]
        elif weights is None:
            continue
        elif name in packed:  # scales are of the whole
            layer = packed[name]
            whole = weights.piece(base_name(name), (0, 0), (layer.out_features, layer.in_features))
            piece = layer.pack(whole.to(parameter.device))[slices(offset, size)]
        else:
            piece = weights.piece(base_name(name), offset, size)
        local(parameter).copy_(piece)


def slices(offset: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of `size` elements from `offset` of each dimension."""
    return tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))


def held(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offset and size of what this rank holds of a parameter, in the whole one."""
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.ndim, tuple(parameter.shape)
    size, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(offset), tuple(size)


def _downloaded(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    wanted = ["*.safetensors", INDEX]
    return Path(reached(model, lambda: snapshot_download(model, revision=revision, allow_patterns=wanted)))
