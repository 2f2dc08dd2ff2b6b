"""Text out of tokens: equal to decoding everything at once, cut at the first stop string, whatever the cutting."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.front.detokenize import REPLACEMENT, ByteLevelDetokenizer, WindowDetokenizer, make_detokenizer
from engine.front.stops import StopMatcher
from engine.front.testing import byte_token, tiny_tokenizer_files

BYTE_LEVEL = Tokenizer.from_buffer(tiny_tokenizer_files()["tokenizer.json"])
WORDS = ["▁hello", "▁", "world", "é", "🌍", "<0xF0>", "<0x9F>", "<0x8C>", "<0x8D>", "<0xC3>", "<0xA9>", "<s>"]


def sentencepiece_like() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(WORDS)}, merges=[], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


SENTENCEPIECE = sentencepiece_like()


def decode_stepwise(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    detokenizer = make_detokenizer(tokenizer)
    return [*(detokenizer.add(token) for token in tokens), detokenizer.finish()]


@given(st.lists(st.integers(0, 258)))
def test_byte_level_pieces_join_to_the_whole_decoding(tokens: list[int]) -> None:
    assert "".join(decode_stepwise(BYTE_LEVEL, tokens)) == BYTE_LEVEL.decode(tokens, skip_special_tokens=True)


@given(st.text())
def test_valid_text_never_shows_a_replacement_character_it_does_not_contain(text: str) -> None:
    pieces = decode_stepwise(BYTE_LEVEL, [byte_token(byte) for byte in text.encode()])
    assert "".join(pieces) == text
    assert all(REPLACEMENT not in piece for piece in pieces) or REPLACEMENT in text


def test_the_two_strategies_are_chosen_by_the_decoder() -> None:
    assert isinstance(make_detokenizer(BYTE_LEVEL), ByteLevelDetokenizer)
    assert isinstance(make_detokenizer(SENTENCEPIECE), WindowDetokenizer)


VALID_UNITS = st.sampled_from([[0], [1], [2], [3], [4], [5, 6, 7, 8], [9, 10], [11]])


@given(st.lists(VALID_UNITS).map(lambda units: [token for unit in units for token in unit]))
def test_window_pieces_join_to_the_whole_decoding(tokens: list[int]) -> None:
    pieces = decode_stepwise(SENTENCEPIECE, tokens)
    assert "".join(pieces) == SENTENCEPIECE.decode(tokens, skip_special_tokens=True)
    assert all(REPLACEMENT not in piece for piece in pieces)


def test_endless_invalid_bytes_do_not_grow_the_window() -> None:
    detokenizer = WindowDetokenizer(SENTENCEPIECE)
    text = "".join(detokenizer.add(5) for _ in range(100))
    assert len(detokenizer._pending) < 10
    assert text.count(REPLACEMENT) > 80


def up_to_first_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The specification, written over the whole text: the first stop string to be complete, the longer of two."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


SMALL = st.text("ab", max_size=40)


@given(SMALL, st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), st.lists(st.integers(0, 40)))
def test_any_cutting_gives_the_text_up_to_the_first_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(tuple(stops))
    borders = [0, *sorted(cuts), len(text)]
    out, stopped = "", False
    for start, end in pairwise(borders):
        piece, stopped = matcher.add(text[start:end])
        out += piece
        if stopped:
            break
    if not stopped:
        out += matcher.finish()
    assert (out, stopped) == up_to_first_stop(text, stops)


@given(SMALL, st.text("ab", min_size=1, max_size=5))
def test_only_a_possible_beginning_is_held_back(text: str, stop: str) -> None:
    matcher = StopMatcher((stop,))
    out, stopped = matcher.add(text)
    held = matcher._held
    assert stopped or out + held == text
    assert stop.startswith(held)
    assert len(held) < len(stop)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (("abcdef", "cd"), "xabcdy", "xab"),
        (("cd", "bcd"), "abcd", "a"),
        (("🌍",), "a🌍b", "a"),
    ],
)
def test_overlapping_stops(stops: tuple[str, ...], text: str, expected: str) -> None:
    matcher = StopMatcher(stops)
    out = ""
    for character in text:
        piece, stopped = matcher.add(character)
        out += piece
        if stopped:
            break
    assert out == expected
