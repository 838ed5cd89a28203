"""Finding and describing models."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainers import model
from trainers.errors import UserError
from trainers.weights import Weights


def test_a_kind_of_model_without_a_known_shape_can_still_be_trained(tmp_path: Path) -> None:
    """GPT-2's layers are not those of the known shapes: no shape, and no refusal."""
    from transformers import GPT2Config

    GPT2Config(n_layer=2, n_embd=16, n_head=2).save_pretrained(tmp_path)
    assert model.shape(str(tmp_path)) is None


def test_the_embedded_model_has_a_shape() -> None:
    shape = model.shape("embedded")
    assert shape is not None
    assert (shape.num_hidden_layers, shape.hidden_size, shape.max_position_embeddings) == (4, 128, 4096)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no config"):
        model.locate(str(tmp_path))


def test_weights_that_cannot_be_had_are_one_sentence() -> None:
    with pytest.raises(UserError, match=r"model=nobody/nothing: it cannot be loaded"):
        Weights.of("nobody/nothing")
