"""The embedded model and data: exact round trips, one end per answer, the promised sizes, reproducible weights."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from trainers.embedded import model, task

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]

CHAT = [
    {"role": "system", "content": "Be terse."},
    {"role": "user", "content": "Grüß dich!\n"},
    {"role": "assistant", "content": "Hi 🙂"},
    {"role": "user", "content": " and now?"},
    {"role": "assistant", "content": ""},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return model.tokenizer()


@pytest.mark.parametrize(
    "text",
    [
        "",
        " a  b ,c .",
        "line\nline\r\n\ttab\x00",
        "naïve Søren",
        "漢字 عربى",
        "👩‍👩‍👧 🇳🇱 e\u0301",
        bytes(range(128)).decode(),
    ],
)
def test_a_text_is_its_bytes_and_comes_back(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_distinct_and_follow_the_bytes(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == 260
    assert tokenizer.convert_tokens_to_ids(list(model.SPECIAL_TOKENS)) == [256, 257, 258, 259]
    shape = model.config()
    ids = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert ids == (shape.pad_token_id, shape.bos_token_id, shape.eos_token_id) == (256, 257, 258)
    assert tokenizer.model_max_length == shape.max_position_embeddings == 4096


def test_the_tokenizer_survives_a_directory(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.apply_chat_template(CHAT, return_dict=False) == tokenizer.apply_chat_template(CHAT, return_dict=False)
    assert again.decode(again("é 🙂\n").input_ids) == "é 🙂\n"


def test_a_chat_begins_once_and_each_answer_ends_once(tokenizer: PreTrainedTokenizerFast) -> None:
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert text == (
        "<|bos|><|turn|>system\nBe terse.<|turn|>user\nGrüß dich!\n<|turn|>assistant\nHi 🙂<|eos|>"
        "<|turn|>user\n and now?<|turn|>assistant\n<|eos|>"
    )
    ids = tokenizer.apply_chat_template(CHAT, return_dict=False)
    assert ids == tokenizer(text).input_ids, "the tokenizer adds special tokens of its own"
    assert (ids.count(257), ids.count(258), ids[-1]) == (1, 2, 258)


@pytest.mark.parametrize("answer", [2, 4])
def test_the_generation_prompt_is_a_prefix_of_the_chat(tokenizer: PreTrainedTokenizerFast, answer: int) -> None:
    full = tokenizer.apply_chat_template(CHAT[: answer + 1], return_dict=False)
    prompt = tokenizer.apply_chat_template(CHAT[:answer], add_generation_prompt=True, return_dict=False)
    assert full[: len(prompt)] == prompt
    assert full[len(prompt) :] == [*CHAT[answer]["content"].encode(), 258]


def test_the_answer_mask_marks_answers_and_their_ends(tokenizer: PreTrainedTokenizerFast) -> None:
    encoded = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    marked = [token for token, is_answer in pairs if is_answer]
    assert marked == [*"Hi 🙂".encode(), 258, 258]


def test_an_unknown_role_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(Exception, match="unknown role tool; allowed: system, user, assistant"):
        tokenizer.apply_chat_template([{"role": "tool", "content": ""}], tokenize=False)


def test_the_weights_are_small_and_load_with_tied_embeddings() -> None:
    assert model.WEIGHTS.stat().st_size < 2_000_000
    base = model.load(torch.bfloat16, "eager")
    attention = 128 * 128 + 2 * 128 * 64 + 128 * 128
    feed_forward = 3 * 128 * 344
    by_hand = 260 * 128 + 4 * (attention + feed_forward + 2 * 128) + 128
    assert sum(weight.numel() for weight in base.parameters()) == by_hand == 759_424
    assert base.lm_head.weight is base.model.embed_tokens.weight
    assert {weight.dtype for weight in base.parameters()} == {torch.bfloat16}
    assert base.config._attn_implementation == "eager"


def test_the_base_knows_its_prose_but_not_the_records(tokenizer: PreTrainedTokenizerFast) -> None:
    base = model.load(torch.float32, "sdpa")
    prose = _mean_loss(base, tokenizer, task.pretraining_rows()[:8])
    records = _mean_loss(base, tokenizer, task.rows()[:8])
    assert prose < 0.5
    assert records > 2.0


def _mean_loss(base: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]) -> float:
    """Return the mean over rows of the loss in nats per completion token."""
    losses = []
    for row in rows:
        ids = tokenizer.apply_chat_template(_chat(row), return_dict=False)
        completion = len(row["completion"].encode()) + 1
        labels = torch.tensor([[-100] * (len(ids) - completion) + ids[-completion:]])
        with torch.no_grad():
            losses.append(base(torch.tensor([ids]), labels=labels).loss.item())
    return statistics.mean(losses)


def _chat(row: dict[str, str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]


def test_rows_are_always_the_same_and_distinct() -> None:
    for generate, count in ((task.rows, 640), (task.pretraining_rows, 4096)):
        rows = generate()
        assert rows == generate()
        assert len(rows) == len({row["prompt"] for row in rows}) == count
        assert {tuple(row) for row in rows} == {("prompt", "completion")}
    assert task.rows()[2] == {
        "prompt": "Hi team, my router drops calls. We cannot work. Ines",
        "completion": "[high] Ines\nnet/router: update firmware",
    }


def test_the_formats_do_not_overlap() -> None:
    assert all(row["completion"].startswith("[") for row in task.rows())
    assert all(row["completion"].startswith("Dear ") for row in task.pretraining_rows())
    assert not any("[" in row["completion"] or "/" in row["completion"] for row in task.pretraining_rows())


def test_row_lengths_have_a_long_tail(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = task.rows()
    lengths = [len((row["prompt"] + row["completion"]).encode()) for row in rows]
    percentiles = statistics.quantiles(lengths, n=100)
    assert 95 <= percentiles[49] <= 140
    assert 350 <= percentiles[98] <= 500
    assert 550 <= max(lengths) <= 750
    in_chat = [len(ids) for ids in tokenizer.apply_chat_template([_chat(row) for row in rows], return_dict=False)]
    assert max(in_chat) < 1000
    assert {chat - plain for chat, plain in zip(in_chat, lengths, strict=True)} == {19}


def test_importing_the_model_and_the_task_does_not_import_torch() -> None:
    code = (
        "import sys, trainers.embedded.model, trainers.embedded.task; "
        "print(sorted({'torch', 'transformers', 'tokenizers', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def restored_torch_settings() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.usefixtures("restored_torch_settings")
@pytest.mark.slow
def test_pretraining_gives_the_same_bytes_again(tmp_path: Path) -> None:
    from trainers.embedded import pretrain

    here, there = tmp_path / "here.safetensors", tmp_path / "there.safetensors"
    arguments = ["--updates", "2", "--out"]
    pretrain.main([*arguments, str(here)])
    subprocess.run([sys.executable, "-m", "trainers.embedded.pretrain", *arguments, str(there)], cwd=ROOT, check=True)
    assert here.read_bytes() == there.read_bytes()
    assert here.stat().st_size == model.WEIGHTS.stat().st_size
