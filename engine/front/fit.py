"""Whether a request fits the model and this process: token ids, context, and how much it may ask to be told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from engine.front.options import Options
from engine.front.refusal import RequestRefusedError

# Log probabilities of a response that is not streamed are all kept until its end, about 100 bytes each.
_LOGPROBS_KEPT_MAX: Final = 1 << 18


def check_token_ids(tokens: Iterable[int], vocabulary_size: int, field: str) -> None:
    """Refuse token ids the model does not have.

    Raises:
        RequestRefusedError: 400, naming ``field``.
    """
    if not all(0 <= token < vocabulary_size for token in tokens):
        raise RequestRefusedError(f"{field} token ids must be from 0 to {vocabulary_size - 1}", param=field)


def fit_tokens(prompt_tokens: int, options: Options, context_tokens: int) -> int:
    """Tokens to generate per choice, so that prompt and answer fit the context.

    Raises:
        RequestRefusedError: they do not, the prompt is empty, or too many log probabilities would be kept.
    """
    if prompt_tokens == 0:
        raise RequestRefusedError("the prompt is empty", param="prompt")
    asked = 1 if options.tokens_max is None else options.tokens_max
    if prompt_tokens + asked > context_tokens:
        message = (
            f"This model's maximum context length is {context_tokens} tokens. However, you requested "
            f"{prompt_tokens + asked} tokens ({prompt_tokens} in the prompt, {asked} for the answer)."
        )
        raise RequestRefusedError(message, code="context_length_exceeded")
    tokens_max = context_tokens - prompt_tokens if options.tokens_max is None else options.tokens_max
    alternatives = options.sampling.logprobs
    if alternatives is not None and not options.stream:
        kept = options.choices * tokens_max * (1 + alternatives)
        if kept > _LOGPROBS_KEPT_MAX:
            message = (
                f"up to {kept} log probabilities in one body, more than {_LOGPROBS_KEPT_MAX}: stream, or ask for less"
            )
            raise RequestRefusedError(message, param="logprobs")
    return tokens_max
