"""Chat templates, rendered as Hugging Face does: sandboxed Jinja with its block trimming and helpers.

Source: transformers ``utils/chat_template_utils.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn


class ChatTemplateError(ValueError):
    """The model has no chat template, or the template does not accept these messages."""


def compile_chat_template(
    source: str | None, tokens: Mapping[str, str]
) -> Callable[[Sequence[Mapping[str, str]]], str]:
    """A function that renders messages into a prompt.

    Args:
        source: Jinja source, or None for a model without one: every call then raises.
        tokens: special tokens by name (``bos_token``, ``eos_token``), visible to the template.

    Raises:
        ChatTemplateError: the source does not compile. Also by the returned function, see there.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _raise
    try:
        template = None if source is None else environment.from_string(source)
    except TemplateError as error:
        raise ChatTemplateError(f"chat template does not compile: {error}") from error

    def render(messages: Sequence[Mapping[str, str]]) -> str:
        if template is None:
            raise ChatTemplateError("this model has no chat template; use /v1/completions")
        try:
            return template.render(messages=messages, add_generation_prompt=True, **tokens)
        except (TemplateError, TypeError) as error:
            raise ChatTemplateError(f"the model's chat template refused the messages: {error}") from error

    return render


def _raise(message: Any) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(str(message))
