"""Log probabilities of generated tokens in the two shapes of the OpenAI API.

Both shapes cover every generated token, those of a stop string that was cut off included.
Source: OpenAI API reference, "The chat completion object" and "The completion object", ``logprobs``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine.wire import Logprobs

# OpenAI's stand-in for "very unlikely"; JSON has no minus infinity.
_LOGPROB_MIN: Final = -9999.0

Spell = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One generated token. ``offset`` is where its text begins in the choice's text, in characters."""

    token: int
    offset: int
    logprobs: Logprobs


def chat_logprobs(tokens: Sequence[TokenLogprobs], spell: Spell) -> dict[str, Any]:
    """The object of a chat choice or delta."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        spelled = spell(token)
        return {"token": _text(spelled), "logprob": max(logprob, _LOGPROB_MIN), "bytes": list(spelled)}

    content = [
        entry(one.token, one.logprobs.chosen) | {"top_logprobs": [entry(*pair) for pair in one.logprobs.top]}
        for one in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[TokenLogprobs], spell: Spell) -> dict[str, Any]:
    """The object of a completion choice; the chosen token is always among its alternatives."""
    top = []
    for one in tokens:
        alternatives: dict[str, float] = {}
        for token, logprob in (*one.logprobs.top, (one.token, one.logprobs.chosen)):
            # Halves of a character look alike: the likelier one stays.
            alternatives.setdefault(_text(spell(token)), max(logprob, _LOGPROB_MIN))
        top.append(alternatives)
    return {
        "tokens": [_text(spell(one.token)) for one in tokens],
        "token_logprobs": [max(one.logprobs.chosen, _LOGPROB_MIN) for one in tokens],
        "top_logprobs": top,
        "text_offset": [one.offset for one in tokens],
    }


def _text(spelled: bytes) -> str:
    return spelled.decode(errors="replace")
