"""Token ids → text, one token at a time, never half a character.

The pieces of a response, joined, equal the tokenizer's decoding of all its tokens. Byte-level BPE
(GPT-2, Llama 3, SmolLM2) is decoded exactly, in constant time and memory per token. For every other
decoder the text is compared over a short window, as vLLM and text-generation-inference do.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT: Final = "\ufffd"
# A character has at most 4 bytes, so at most 4 tokens. Twice that without a whole character is invalid
# UTF-8 from the model; it is let through, or the window would grow with the answer.
_PENDING_TOKENS_MAX: Final = 8


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted (openai/gpt-2 ``encoder.py``, bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF: Final = byte_alphabet()
_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-F]{2})>\Z")


class Detokenizer(Protocol):
    """Turns one response's tokens into text."""

    def add(self, token: int) -> str:
        """Text that became certain with ``token``; "" while a character is incomplete."""

    def finish(self) -> str:
        """What is still held back: an incomplete character, as U+FFFD."""


class ByteLevelDetokenizer:
    """Exact: tokens are bytes, and UTF-8 is decoded incrementally."""

    __slots__ = ("_special", "_tokenizer", "_utf8")

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        """See :class:`Detokenizer`."""
        text = None if token in self._special else self._tokenizer.id_to_token(token)
        if text is None:
            return ""
        return self._utf8.decode(_token_bytes(text))

    def finish(self) -> str:
        """See :class:`Detokenizer`."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """General: decode from a token border with context before it, and emit what is new at its end."""

    __slots__ = ("_context", "_pending", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The last token(s) already emitted: some decoders treat the first token of a text differently.
        self._context: list[int] = []
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """See :class:`Detokenizer`."""
        self._pending.append(token)
        text = self._new_text()
        incomplete = not text or text.endswith(REPLACEMENT)
        if incomplete and len(self._pending) < _PENDING_TOKENS_MAX:
            return ""
        self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """See :class:`Detokenizer`."""
        text = self._new_text() if self._pending else ""
        self._context, self._pending = [], []
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=True)
        return self._tokenizer.decode(self._context + self._pending, skip_special_tokens=True)[len(before) :]


def make_detokenizer(tokenizer: Tokenizer) -> Detokenizer:
    """The right one for ``tokenizer``'s decoder."""
    if _is_byte_level(tokenizer):
        added = tokenizer.get_added_tokens_decoder()
        return ByteLevelDetokenizer(tokenizer, frozenset(number for number, token in added.items() if token.special))
    return WindowDetokenizer(tokenizer)


def make_speller(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """A function that gives the bytes one token stands for; b"" for an id without a token.

    Byte-level vocabularies spell every byte; others mark a space as U+2581 and single bytes as ``<0xNN>``
    (SentencePiece's ``byte_fallback``).
    """
    spell = _token_bytes if _is_byte_level(tokenizer) else _piece_bytes

    def token_bytes(token: int) -> bytes:
        text = tokenizer.id_to_token(token)
        return b"" if text is None else spell(text)

    return token_bytes


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    from tokenizers import decoders

    return isinstance(tokenizer.decoder, decoders.ByteLevel)


def _piece_bytes(text: str) -> bytes:
    byte = _BYTE_PIECE.match(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace("\u2581", " ").encode()


def _token_bytes(text: str) -> bytes:
    """Bytes of a token's text; an added token outside the alphabet is plain text, as in ``tokenizers``."""
    try:
        return bytes([_BYTE_OF[character] for character in text])
    except KeyError:
        return text.encode()
