"""The real SmolLM2 tokenizer against transformers' own reading of the same GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine.models.gguf_llama import GgufLlama
from engine.models.gguf_tokenizer import build_tokenizer, tokenizer_config
from engine.models.smollm2 import ModelUnavailableError, locate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

pytestmark = pytest.mark.model

TEXTS = [
    "Hello world",
    "The year 2024 has 365 days, 1234567890!",
    "naïve café — “quotes” … 你好世界 🌍👩‍👩‍👧‍👦",
    "def f(x):\n    return x*2  # ok\n\n\n\ttab",
    "<|im_start|>user\nhi<|im_end|>\n<file_sep>x<|im_end",
    "  leading and   multiple  spaces   ",
    "it's I'll we've they'd DON'T",
    "\x00\x01\x7f",
    "",
    "ﷺ\u202e\ufeff é é",
    "a" * 300,
    " \n \r\n\t ",
]


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return locate()[0]
    except ModelUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def gguf(path: Path) -> GgufLlama:
    return GgufLlama(path)


@pytest.fixture(scope="module")
def ours(gguf: GgufLlama) -> Tokenizer:
    return build_tokenizer(gguf)


def test_ids_equal_transformers_and_decode_back(path: Path, ours: Tokenizer) -> None:
    from transformers import AutoTokenizer

    reference: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == reference(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_every_number_is_split_off_as_llama_cpp_does(ours: Tokenizer) -> None:
    # transformers drops the model's digits rule here and merges the space with the first byte of such a number.
    tokens = ours.encode("x ½Ⅻ 12").tokens
    assert tokens[:2] == ["x", "Ġ"]
    assert tokens[-3:] == ["Ġ", "1", "2"]


def test_the_chat_template_is_the_models(gguf: GgufLlama) -> None:
    settings = tokenizer_config(gguf)
    assert "<|im_start|>" in settings["chat_template"]
    assert (settings["eos_token"], settings["bos_token"]) == ("<|im_end|>", "<|im_start|>")
