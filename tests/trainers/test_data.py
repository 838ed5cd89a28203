"""Rows into tokens. The tokenizers here have one token a byte (id = its place in the byte alphabet) plus specials."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainers.config import TrialConfig
from trainers.data import TokenizedDataset, choose_template, collate, overlap, split_eval, tokenize
from trainers.errors import UserError
from trainers.prepare import prepare
from trainers.rows import Message, Row, Rows, read
from trainers.templates import Encoder

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: empty thinking tags in the turns after the last question, and in the generation prompt without thinking.
QWEN3 = (
    "{% set last = namespace(at=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role != 'assistant' %}{{ m.content }}{% else %}"
    "{% set thought = '' %}{% set answer = m.content %}{% if '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set answer = m.content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > last.at %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ answer }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
BOS_RENDERED = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
NO_END = (
    "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)
OPENERS = CHATML.replace("<|im_end|>\n", "")
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)
# As Mistral's: the system message stands in the last question.
SYSTEM_LAST = (
    "{{ bos_token }}{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {% if m == users[-1] and messages[0].role == 'system' %}"
    "{{ messages[0].content }} {% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
THINKER = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")


def byte_tokenizer(
    chat_template: str | None = None,
    *,
    add_bos: bool = False,
    pad: str = "<pad>",
    merges: tuple[tuple[str, str], ...] = (),
) -> Any:
    """One token a byte, `merges` on top; "<s>" and "</s>" are BOS and EOS; `add_bos` as Llama's tokenizer does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    byte_level = processors.ByteLevel(trim_offsets=False)
    if add_bos:
        bos = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
        byte_level = processors.Sequence([byte_level, bos])
    tokenizer.post_processor = byte_level
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token=pad)
    fast.chat_template = chat_template
    return fast


def pairs(*texts: tuple[str, str]) -> Rows:
    rows = [
        Row(line, (Message("user", prompt), Message("assistant", answer)), prompt)
        for line, (prompt, answer) in enumerate(texts, start=1)
    ]
    return Rows(tuple(rows), "data.jsonl", "prompt/completion")


def chats(*conversations: tuple[tuple[str, str], ...]) -> Rows:
    rows = [Row(i, tuple(Message(*turn) for turn in turns), None) for i, turns in enumerate(conversations, start=1)]
    return Rows(tuple(rows), "data.jsonl", "messages")


def learned(rows: Rows, tokenizer: Any, **options: Any) -> list[list[str]]:
    """Return for each row its runs of adjacent targets, decoded."""
    dataset, _ = tokenize(rows, tokenizer, **{"seq_len": 1000, **options})
    found = []
    for i in range(len(dataset)):
        tokens, targets = dataset.sample(i)
        cuts = np.flatnonzero(np.diff(targets, prepend=False, append=False))
        found.append([tokenizer.decode(tokens[a:b].tolist()) for a, b in cuts.reshape(-1, 2)])
    return found


def text_of(rows: Rows, tokenizer: Any, **options: Any) -> str:
    dataset, _ = tokenize(rows, tokenizer, **{"seq_len": 1000, **options})
    return str(tokenizer.decode(dataset.tokens.tolist()))


# Plain


def test_plain_is_prompt_completion_and_one_end_token() -> None:
    tokenizer = byte_tokenizer()
    dataset, report = tokenize(pairs(("ab", "cd"), ("a", "é")), tokenizer, seq_len=10)
    a, b, c, d = tokenizer.convert_tokens_to_ids(["a", "b", "c", "d"])
    two_bytes = tokenizer("é", add_special_tokens=False)["input_ids"]
    assert len(two_bytes) == 2
    eos = tokenizer.eos_token_id
    assert dataset.tokens.tolist() == [a, b, c, d, eos, a, *two_bytes, eos]
    assert dataset.is_target.tolist() == [False, False, True, True, True, False, True, True, True]
    assert dataset.offsets.tolist() == [0, 5, 9]
    assert (dataset.tokens.dtype, dataset.is_target.dtype, dataset.offsets.dtype) == (np.int32, bool, np.int64)
    assert dataset.samples().lengths == [5, 4]
    assert dataset.samples().targets == [3, 3]
    assert report.target_share == 6 / 9


def test_the_first_token_of_a_sample_is_never_a_target() -> None:
    assert learned(pairs(("", "abc")), byte_tokenizer()) == [["bc</s>"]]
    assert learned(pairs(("", "abc")), byte_tokenizer(add_bos=True)) == [["abc</s>"]]


def test_prompt_tokens_are_those_of_the_prompt_alone() -> None:
    # Tokenised jointly, the line end and a space of the answer are one token, which inference never sees.
    tokenizer = byte_tokenizer(merges=(("Ċ", "Ġ"),))
    assert tokenizer.convert_ids_to_tokens(tokenizer("f:\n  x")["input_ids"]) == ["f", ":", "ĊĠ", "Ġ", "x"]
    dataset, _ = tokenize(pairs(("f:\n", "  x\n  y")), tokenizer, seq_len=100)
    tokens = tokenizer.convert_ids_to_tokens(dataset.tokens.tolist())
    assert tokens == ["f", ":", "Ċ", "Ġ", "Ġ", "x", "ĊĠ", "Ġ", "y", "</s>"]
    assert dataset.is_target.tolist() == [False] * 3 + [True] * 7


def test_an_answer_that_merges_with_the_turns_opening_is_cut_there_in_every_turn() -> None:
    tokenizer = byte_tokenizer(CHATML, merges=(("Ċ", "Ċ"),))
    rows = chats((("user", "q"), ("assistant", "\n\na"), ("user", "r"), ("assistant", "b")))
    assert learned(rows, tokenizer) == [["\n\na<|im_end|>", "b<|im_end|>"]]


def test_an_end_token_in_the_completion_is_not_doubled_and_refused_in_its_middle() -> None:
    tokenizer = byte_tokenizer()
    assert learned(pairs(("a", "b</s>")), tokenizer) == [["b</s>"]]
    with pytest.raises(UserError, match="line 1: the text of an answer holds the end token"):
        tokenize(pairs(("a", "b</s>c")), tokenizer, seq_len=10)


# Chat


def test_chat_targets_are_each_answer_and_its_end_token() -> None:
    rows = chats((("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")))
    tokenizer = byte_tokenizer(CHATML)
    assert learned(rows, tokenizer) == [["a<|im_end|>", "b<|im_end|>"]]
    assert text_of(rows, tokenizer).count("</s>") == 0


def test_pairs_use_the_chat_template_where_there_is_one() -> None:
    tokenizer = byte_tokenizer(CHATML)
    assert learned(pairs(("q", "a")), tokenizer) == [["a<|im_end|>"]]
    assert text_of(pairs(("q", "a")), tokenizer, template="plain") == "qa</s>"


def test_f11_conversations_without_a_chat_template_are_refused_with_two_remedies() -> None:
    rows = chats((("user", "q"), ("assistant", "a")))
    for template in ("auto", "chat"):
        with pytest.raises(UserError, match=r"no chat template: use a model .* or give the data as prompt and compl"):
            tokenize(rows, byte_tokenizer(), seq_len=0, template=template)
    with pytest.raises(UserError, match="no chat template"):
        choose_template(pairs(("q", "a")), byte_tokenizer(), "chat")
    with pytest.raises(UserError, match="plain template needs"):
        choose_template(rows, byte_tokenizer(CHATML), "plain")


@pytest.mark.parametrize("template", [CHATML, None])
def test_f14_one_end_token_is_learned_also_where_it_is_the_pad_token(template: str | None) -> None:
    end = "<|im_end|>" if template else "</s>"
    tokenizer = byte_tokenizer(template, pad=end)
    dataset, _ = tokenize(pairs(("q", "a"), ("q", "long answer")), tokenizer, seq_len=1000)
    labels = collate(dataset, [0, 1], tokenizer.pad_token_id)["labels"]
    assert (labels == tokenizer.pad_token_id).sum(dim=1).tolist() == [1, 1]


@pytest.mark.parametrize(("template", "prompt"), [(BOS_RENDERED, "q"), (CHATML, "q"), (None, "q"), (None, "<s>q")])
def test_f16_exactly_one_bos(template: str | None, prompt: str) -> None:
    tokenizer = byte_tokenizer(template, add_bos=True)
    dataset, report = tokenize(pairs((prompt, "a")), tokenizer, seq_len=1000)
    assert (dataset.tokens == tokenizer.bos_token_id).nonzero()[0].tolist() == [0]
    assert not dataset.is_target[0]
    assert bool(report.notes) == (template == CHATML)


def test_f16_inference_renders_the_same_prefix() -> None:
    tokenizer = byte_tokenizer(BOS_RENDERED, add_bos=True)
    dataset, _ = tokenize(pairs(("q", " a ")), tokenizer, seq_len=1000)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "q"}], add_generation_prompt=True)["input_ids"]
    assert dataset.tokens[: len(prompt)].tolist() == prompt
    assert dataset.is_target.tolist() == [False] * len(prompt) + [True, True]
    assert learned(pairs(("q", " a ")), tokenizer) == [["a</s>"]]


def test_f18_what_the_generation_prompt_supplies_is_not_learned() -> None:
    tokenizer = byte_tokenizer(QWEN3)
    assert learned(pairs(("q", "a")), tokenizer) == [["a<|im_end|>"]]
    assert text_of(pairs(("q", "a")), tokenizer) == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\na<|im_end|>\n"
    )


def test_f18_reasoning_of_the_answer_itself_is_learned_with_its_tags() -> None:
    rows = pairs(("q", "<think>\nhm\n</think>\n\na"))
    assert learned(rows, byte_tokenizer(QWEN3)) == [["<think>\nhm\n</think>\n\na<|im_end|>"]]


def test_f18_reasoning_in_one_turn_does_not_change_the_others() -> None:
    thought = "<think>\nhm\n</think>\n\na"
    earlier = (("user", "q"), ("assistant", thought), ("user", "r"), ("assistant", "b"))
    assert learned(chats(earlier), byte_tokenizer(QWEN3)) == [["a<|im_end|>", "b<|im_end|>"]]
    later = (("user", "q"), ("assistant", "b"), ("user", "r"), ("assistant", thought))
    assert learned(chats(later), byte_tokenizer(QWEN3)) == [["b<|im_end|>", f"{thought}<|im_end|>"]]


def test_a_template_that_moves_the_system_message_makes_no_target_of_the_users_text() -> None:
    turns = (("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b"))
    tokenizer = byte_tokenizer(SYSTEM_LAST)
    assert text_of(chats(turns), tokenizer) == "<s>[INST] q[/INST] a</s>[INST] s r[/INST] b</s>"
    assert learned(chats(turns), tokenizer) == [["a</s>", " b</s>"]]


def test_f18_an_earlier_answer_that_begins_like_the_thinking_tag_is_learned_whole() -> None:
    turns = (("user", "q"), ("assistant", "<table>"), ("user", "r"), ("assistant", "<thing>"))
    assert learned(chats(turns), byte_tokenizer(QWEN3)) == [["<table><|im_end|>", "<thing><|im_end|>"]]
    assert learned(pairs(("q", "<thing>")), byte_tokenizer(THINKER)) == [["<thing><|im_end|>"]]


def test_a_template_without_end_token_gets_one_after_the_last_answer() -> None:
    rows = chats((("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")))
    assert learned(rows, byte_tokenizer(NO_END)) == [["a", "b</s>"]]
    assert text_of(rows, byte_tokenizer(NO_END)).endswith("### assistant:\nb</s>")
    assert learned(rows, byte_tokenizer(OPENERS)) == [["a", "b</s>"]]


def test_rows_that_the_template_refuses_are_named_or_dropped() -> None:
    rows = chats(
        (("user", "q"), ("assistant", "a")),
        (("system", "s"), ("user", "q"), ("assistant", "a")),
        (("user", "q"), ("assistant", "a<|im_end|>b")),
    )
    tokenizer = byte_tokenizer(NO_SYSTEM)
    with pytest.raises(UserError) as caught:
        tokenize(rows, tokenizer, seq_len=1000)
    summary, refused, ended = caught.value.faults
    assert refused == "data.jsonl, line 2: the chat template refuses it: System role not supported"
    assert ended == "data.jsonl, line 3: the text of an answer holds the end token"
    assert "2 of 3 rows are refused" in summary
    dataset, report = tokenize(rows, tokenizer, seq_len=1000, on_error="drop")
    assert dataset.lines.tolist() == [1]
    assert report.notes == (
        "dropped: chat template in 1 row (line 2)",
        "dropped: end token in the answer in 1 row (line 3)",
    )


# Truncation and the preflight table


def test_f10_rows_that_truncation_leaves_without_target_are_refused_or_dropped() -> None:
    rows = pairs(("p" * 600, "answer"), ("p" * 510, "answer"), ("p", "a"))
    with pytest.raises(UserError) as caught:
        tokenize(rows, byte_tokenizer(), seq_len=512)
    assert caught.value.faults == (
        (
            "data.jsonl: 1 row of 3 without a target (line 1): the prompt alone fills learning.seq_len=512; "
            "learning.seq_len=601 keeps every row, or data_on_error=drop leaves them out"
        ),
    )
    kept, report = tokenize(rows, byte_tokenizer(), seq_len=512, on_error="drop")
    assert kept.lines.tolist() == [2, 3]
    assert kept.samples().lengths == [512, 3]
    assert (report.rows_read, report.rows_kept, report.rows_without_targets, report.rows_truncated) == (3, 2, 1, 1)
    assert report.tokens_lost == 607 + (517 - 512)
    assert (report.length_p50, report.length_p99, report.length_max, report.longest_line) == (517, 607, 607, 1)
    whole, _ = tokenize(rows, byte_tokenizer(), seq_len=601)
    assert whole.samples().targets == [1, 7, 2]


def test_f10_many_rows_without_targets_are_counted_and_five_named() -> None:
    rows = pairs(*[("p" * (10 + i), "a") for i in range(8)])
    for on_error in ("refuse", "drop"):
        with pytest.raises(UserError, match=r"8 rows of 8 .*\(lines 1, 2, 3, 4, 5 and 3 more\).*seq_len=18 keeps"):
            tokenize(rows, byte_tokenizer(), seq_len=10, on_error=on_error)


def test_the_preflight_table() -> None:
    rows = pairs(("p", "a"), ("p", "abc"), ("p", "a"), ("p" * 20, "a"))
    _, report = tokenize(rows, byte_tokenizer(), seq_len=4, on_error="drop")
    assert report.lines() == [
        "data.jsonl",
        "  rows kept               3 of 4",
        "  rows without targets    1 (dropped)",
        "  rows truncated          1 at seq_len 4",
        "  tokens lost             23 of 33",
        "  length p50 / p99 / max  3 / 22 / 22 (row at 4)",
        "  targets                 70.0% of the tokens",
        "  duplicate rows          1",
        (
            "data.jsonl: 1 row of 4 without a target (line 4): the prompt alone fills learning.seq_len=4; dropped; "
            "learning.seq_len=21 keeps every row"
        ),
    ]


@pytest.mark.parametrize("seq_len", [1, 0, -3])
def test_a_seq_len_that_predicts_nothing_is_refused(seq_len: int) -> None:
    with pytest.raises(UserError, match=f"learning.seq_len={seq_len}: at least 2"):
        tokenize(pairs(("p", "a")), byte_tokenizer(), seq_len=seq_len)


# The data set


@pytest.fixture
def dataset() -> TokenizedDataset:
    return tokenize(pairs(("ab", "cd"), ("p", "a"), ("long prompt", "x")), byte_tokenizer(), seq_len=100)[0]


def test_the_fingerprint_follows_tokens_and_targets(dataset: TokenizedDataset) -> None:
    again = tokenize(pairs(("ab", "cd"), ("p", "a"), ("long prompt", "x")), byte_tokenizer(), seq_len=90)[0]
    shifted = tokenize(pairs(("abc", "d"), ("p", "a"), ("long prompt", "x")), byte_tokenizer(), seq_len=100)[0]
    assert shifted.tokens.tolist() == dataset.tokens.tolist()
    assert again.fingerprint == dataset.fingerprint != shifted.fingerprint


def test_collate_pads_on_the_right_with_unshifted_labels(dataset: TokenizedDataset) -> None:
    batch = collate(dataset, [1, 0], pad_id=99)
    (p, a, eos), (first, *rest) = dataset.sample(1)[0].tolist(), dataset.sample(0)[0].tolist()
    assert batch["input_ids"].tolist() == [[p, a, eos, 99, 99], [first, *rest]]
    assert batch["labels"].tolist() == [[-100, a, eos, -100, -100], [-100, -100, *rest[1:]]]
    assert {str(tensor.dtype) for tensor in batch.values()} == {"torch.int64"}


def test_collate_of_nothing_is_one_pad_token_without_a_label(dataset: TokenizedDataset) -> None:
    batch = collate(dataset, [], pad_id=7)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {"input_ids": [[7]], "labels": [[-100]]}


# Train and eval


def test_split_eval_keeps_duplicates_together_and_depends_on_content_and_seed_only() -> None:
    rows = pairs(*[(f"p{i % 40}", "a") for i in range(60)])
    train, held_out = split_eval(rows, 0.2, seed=1)
    assert len(train) + len(held_out) == 60
    assert len(held_out) == 12
    assert overlap(train, held_out) == []
    moved = Rows(tuple(reversed(rows.rows)), "/elsewhere/x.jsonl", rows.format)
    assert {row.digest for row in split_eval(moved, 0.2, seed=1)[1]} == {row.digest for row in held_out}
    assert {row.digest for row in split_eval(rows, 0.2, seed=2)[1]} != {row.digest for row in held_out}


def test_split_eval_leaves_a_row_on_each_side_or_refuses() -> None:
    two = pairs(("p", "a"), ("q", "a"))
    for fraction in (0.001, 0.999):
        assert [len(side) for side in split_eval(two, fraction, seed=0)] == [1, 1]
    assert [len(side) for side in split_eval(pairs(*[("p", "a")] * 9, *[("q", "a")] * 2), 0.1, seed=0)] == [9, 2]
    with pytest.raises(UserError, match="1 distinct row"):
        split_eval(pairs(("p", "a"), ("p", "a")), 0.5, seed=0)
    with pytest.raises(UserError, match="between 0 and 1"):
        split_eval(two, 1.0, seed=0)


def test_f20_overlap_of_train_and_eval_is_reported_whatever_the_format() -> None:
    train = pairs(("p", "a"), ("q", "b"), ("p", "a "))
    held_out = chats((("user", "new"), ("assistant", "a")), (("user", "p"), ("assistant", "a")))
    assert overlap(train, held_out) == [(1, 2), (3, 2)]


# Several seq_len


def job(folder: Path, train: Sequence[tuple[str, str]], held: Sequence[tuple[str, str]] = (), **given: Any) -> Any:
    """Return a config whose data are these prompts and completions, in files."""
    for name, rows in (("train", train), ("eval", held)):
        lines = [json.dumps({"prompt": prompt, "completion": answer}) for prompt, answer in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    eval_data = str(folder / "eval.jsonl") if held else None
    return TrialConfig(data=str(folder / "train.jsonl"), eval_data=eval_data, **given)


def test_rows_are_encoded_once_and_truncated_to_each_seq_len(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda self, rows: encoded.append(len(rows)) or encode(self, rows))
    config = job(tmp_path, [("p" * i, "answer") for i in range(1, 31)])
    data = prepare(config, byte_tokenizer(), [40, 33, 40])
    assert encoded == [30]
    assert list(data) == [40, 33]
    for seq_len, prepared in data.items():
        alone = prepare(config, byte_tokenizer(), [seq_len])[seq_len]
        assert alone.train.fingerprint == prepared.train.fingerprint
        assert alone.eval.fingerprint == prepared.eval.fingerprint
        assert max(prepared.train.samples().lengths) <= seq_len
    assert data[40].train.fingerprint != data[33].train.fingerprint


def test_the_configs_own_seq_len_where_none_is_given(tmp_path: Path) -> None:
    config = job(tmp_path, [("p", "a"), ("q", "b")])
    assert list(prepare(config, byte_tokenizer())) == [config.learning.seq_len]


def test_the_preflight_table_counts_the_rows_held_out_and_stands_once(tmp_path: Path) -> None:
    config = job(tmp_path, [("p" * i, "a") for i in range(1, 21)], data_on_error="drop")
    data = prepare(config, byte_tokenizer(), [100, 20])
    assert data[100].notes[:2] == (config.data, "  rows kept               18 of 18 (2 more held out for evaluation)")
    assert data[100].notes[-1] == "evaluation: 2 rows"
    assert len(data[100].train) == 18
    assert data[20].notes == (
        ("seq_len 20: 1 row truncated, 23 of 231 tokens lost, 1 row without targets (dropped); evaluation: 2 rows"),
    )


def test_what_is_dropped_of_the_evaluation_data_is_told(tmp_path: Path) -> None:
    config = job(tmp_path, [("p", "a")], [("q", "b"), ("r", ""), ("s" * 50, "c")], data_on_error="drop")
    notes = prepare(config, byte_tokenizer(), [20])[20].notes
    assert "  rows kept               1 of 1" in notes
    assert notes[-3:-1] == ("evaluation: 1 row", "evaluation: dropped: no answer in 1 row (line 2)")
    assert notes[-1].startswith(f"evaluation: {config.eval_data}: 1 row of 2 without a target (line 3)")


def test_faults_of_both_sources_and_of_every_seq_len_are_one_error(tmp_path: Path) -> None:
    train, held = [("p" * 30, "a"), ("x", "a</s>b"), ("q", "b")], [("s" * 50, "c"), ("q", "b")]
    config = job(tmp_path, train, held)
    with pytest.raises(UserError) as caught:
        prepare(config, byte_tokenizer(), [20, 40, 60])
    shared, summary, ended, *cut = caught.value.faults
    assert f"eval_data={config.eval_data}: 1 of its rows are also in data" in shared
    assert summary.startswith(f"{config.data}: 1 of 3 rows are refused: end token in the answer")
    assert ended == f"{config.data}, line 2: the text of an answer holds the end token"
    told = "{}: 1 row of {} without a target (line 1): the prompt alone fills learning.seq_len={}"
    assert [fault.split("; ")[0] for fault in cut] == [
        told.format(config.data, 3, 20),
        told.format(config.eval_data, 2, 20),
        told.format(config.eval_data, 2, 40),
    ]


def test_a_side_of_the_split_without_any_target_is_refused_even_with_drop(tmp_path: Path) -> None:
    config = job(tmp_path, [("p", "a"), ("p" * 30, "a")], data_on_error="drop")
    with pytest.raises(UserError, match=r"1 row of 1 without a target \(line 2\): .*; no row is left; "):
        prepare(config, byte_tokenizer(), [20])


@pytest.mark.skipif(not os.environ.get("SWEEPS_REAL_DATA"), reason="SWEEPS_REAL_DATA names no folder")
@pytest.mark.parametrize(("name", "count"), [("gsm8k_test", 1319), ("selfinstruct_seed", 175), ("humaneval", 164)])
@pytest.mark.parametrize("template", [QWEN3, None])
def test_real_files_tokenise(name: str, count: int, template: str | None) -> None:
    path = Path(os.environ["SWEEPS_REAL_DATA"], f"{name}.jsonl")
    rows = read(str(path))
    tokenizer = byte_tokenizer(template)
    dataset, report = tokenize(rows, tokenizer, seq_len=100_000)
    assert (len(dataset), report.rows_kept, report.tokens_lost) == (count, count, 0)
    end = "<|im_end|>" if template else "</s>"
    expected = [json.loads(line)["completion"] + end for line in path.read_text().split("\n") if line]
    assert [tokenizer.decode(dataset.sample(i)[0][dataset.sample(i)[1]].tolist()) for i in range(count)] == expected
