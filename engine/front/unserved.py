"""Options of the field's APIs that would change the answer and are not served.

A client that sends one gets an error that names it: an answer that silently ignores what was asked for is a
wrong answer. A field that is in no table of ours is ignored, as OpenAI does.
Sources: OpenAI API reference; vLLM ``entrypoints/openai/protocol.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from engine.front.refusal import RequestRefusedError

# Name → values that leave the answer as it is. Null always does.
_HARMLESS: Final[dict[str, tuple[Any, ...]]] = {
    # OpenAI, completions.
    "echo": (False,),
    "suffix": ("",),
    # OpenAI, chat.
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM, sampling.
    "allowed_token_ids": (),
    "bad_words": ([],),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1.0,),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    # vLLM, guided decoding.
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "structured_outputs": (),
    # vLLM, prompts.
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "prompt_embeds": (),
}


def refuse_unserved(body: Mapping[str, Any]) -> None:
    """Refuse a body that asks for something not served.

    Raises:
        RequestRefusedError: 400, with the option's name.
    """
    for name in sorted(body.keys() & _HARMLESS.keys()):
        value, harmless = body[name], _HARMLESS[name]
        if value is not None and value not in harmless:
            raise RequestRefusedError(f"{name} is not served by this engine", param=name, code="unsupported_parameter")
