"""The model that needs no download: a byte-level tokenizer built in code and a 0.76 M parameter Llama.

`base.safetensors` beside this file holds its weights; `python -m trainers.embedded.pretrain` makes them again.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EMBEDDED = "embedded"
"""The model's name in configs, where others give a path or a hub id."""

WEIGHTS = Path(__file__).with_name("base.safetensors")
"""The pretrained weights in bfloat16, under Hugging Face's names; the tied output embedding is stored once."""

MAX_LENGTH = 4096
"""Longest sequence, in tokens (bytes and special tokens)."""

PAD, BOS, EOS, TURN = SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|turn|>")
"""Ids 256 to 259, in this order; ids 0 to 255 are the bytes."""

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ("system", "user", "assistant") %}
        {{- raise_exception("unknown role " ~ message.role ~ "; allowed: system, user, assistant") }}
    {%- endif %}
    {{- "<|turn|>" ~ message.role ~ "\\n" }}
    {%- if message.role == "assistant" %}
        {%- generation %}{{- message.content ~ eos_token }}{% endgeneration %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|turn|>assistant\\n" }}{% endif %}"""


def tokenizer() -> PreTrainedTokenizerFast:
    """Return the byte-level tokenizer: 260 ids, no merges; it adds no special token that the text does not hold."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        extra_special_tokens=[TURN],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def _byte_symbols() -> list[str]:
    """Return the 256 characters by which byte-level tokenizers write the bytes 0 to 255: printable ones as they are."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


def config() -> LlamaConfig:
    """Return the shape: 759,424 weights, with grouped-query attention and tied embeddings as large models have."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=256 + len(SPECIAL_TOKENS),
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        pad_token_id=256,
        bos_token_id=257,
        eos_token_id=258,
    )


def load(dtype: torch.dtype, attn_implementation: str) -> LlamaForCausalLM:
    """Return the pretrained base on the CPU, in training mode as built, with its weights in `dtype`."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model: LlamaForCausalLM = AutoModelForCausalLM.from_config(
        config(), dtype=dtype, attn_implementation=attn_implementation
    )
    weights = load_file(WEIGHTS)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model
