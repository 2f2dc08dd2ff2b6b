"""The tokenizer inside a GGUF file, rebuilt as Hugging Face's ``tokenizer.json``.

Only GPT-2 style byte-level BPE with the ``smollm`` pre-tokenizer: every digit alone, then GPT-2's word
pattern (llama.cpp ``llama-vocab.cpp``, ``LLAMA_VOCAB_PRE_TYPE_SMOLLM``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from engine.models.gguf_llama import GgufUnsupportedError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# gguf.TokenType.CONTROL: special tokens, matched in the text before BPE and never split.
_CONTROL: Final = 3


class Fields(Protocol):
    """Where the metadata comes from."""

    def field(self, key: str) -> Any:
        """Value of a metadata field."""


def build_tokenizer(source: Fields) -> Tokenizer:
    """The tokenizer, ready to save.

    Raises:
        GgufUnsupportedError: another model or pre-tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (source.field("tokenizer.ggml.model"), source.field("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise GgufUnsupportedError(f"tokenizer is {kind[0]}/{kind[1]}, not gpt2/smollm")
    tokens: list[str] = source.field("tokenizer.ggml.tokens")
    types: list[int] = source.field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in source.field("tokenizer.ggml.merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind_ in zip(tokens, types, strict=True) if kind_ == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def tokenizer_config(source: Fields) -> dict[str, Any]:
    """``tokenizer_config.json``: special tokens by name, the context limit and the chat template."""
    tokens: list[str] = source.field("tokenizer.ggml.tokens")
    named = {
        f"{name}_token": tokens[source.field(f"tokenizer.ggml.{field}_token_id")]
        for name, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    return {
        **named,
        "add_bos_token": source.field("tokenizer.ggml.add_bos_token"),
        "add_prefix_space": source.field("tokenizer.ggml.add_space_prefix"),
        "chat_template": source.field("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": source.field("llama.context_length"),
        # Any other class of transformers 5 rebuilds its own pre-tokenizer and drops the digits rule.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
