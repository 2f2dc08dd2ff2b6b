"""The model's own files that the front needs: tokenizer, chat template, stop tokens, context limit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.build import BuildManifest
from engine.front.checked import BuildRefusedError, read_checked
from engine.front.template import ChatTemplateError, compile_chat_template

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelAssets:
    """What the front knows of a model.

    Attributes:
        tokenizer: the model's ``tokenizer.json``; shared by resident generations whose file is the same.
        tokenizer_sha256: of that file.
        render_chat: messages → prompt text; raises ChatTemplateError.
        stop_tokens: end-of-sequence ids of config and generation config.
        context_tokens: prompt and answer together, in tokens.
        vocabulary_size: token ids are below this.
    """

    tokenizer: Tokenizer
    tokenizer_sha256: str
    render_chat: Callable[[Sequence[Mapping[str, str]]], str]
    stop_tokens: tuple[int, ...]
    context_tokens: int
    vocabulary_size: int

    def encode(self, text: str, add_special: bool) -> Sequence[int]:
        """Token ids. ``encode_batch`` and not ``encode``: it lets go of the interpreter lock."""
        (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=add_special)
        ids: list[int] = encoding.ids
        return ids


def load_assets(folder: Path, manifest: BuildManifest, resident: Sequence[ModelAssets] = ()) -> ModelAssets:
    """Load them from a build, every byte checked against its manifest.

    Args:
        folder: where the build lies.
        manifest: what it holds.
        resident: assets in use, whose tokenizer may be the same.

    Raises:
        BuildRefusedError: a file is missing, altered or does not parse.
    """
    tokenizer, tokenizer_sha256 = _load_tokenizer(folder, manifest, resident)
    settings = _read_object(folder, manifest, "tokenizer_config.json")
    generation = _read_object(folder, manifest, "generation_config.json")
    template = settings.get("chat_template")
    if manifest.file("chat_template.jinja") is not None:
        template = read_checked(folder, manifest, "chat_template.jinja").decode(errors="replace")
    if not isinstance(template, str | None):
        raise BuildRefusedError("tokenizer_config.json: chat_template is not text")
    try:
        render_chat = compile_chat_template(template, _special_tokens(settings))
    except ChatTemplateError as error:
        raise BuildRefusedError(str(error)) from error
    context = manifest.runtime.contexts[-1]
    return ModelAssets(
        tokenizer=tokenizer,
        tokenizer_sha256=tokenizer_sha256,
        render_chat=render_chat,
        stop_tokens=tuple(sorted({*_ids(manifest.model), *_ids(generation)})),
        context_tokens=min(context, manifest.model.get("max_position_embeddings", context)),
        vocabulary_size=manifest.model.get("vocab_size", tokenizer.get_vocab_size()),
    )


def _load_tokenizer(folder: Path, manifest: BuildManifest, resident: Sequence[ModelAssets]) -> tuple[Tokenizer, str]:
    """The tokenizer and its sha256.

    ``tokenizers`` parses with the interpreter lock held: 0.17 s in which no stream moves, for 49,152
    entries. A tokenizer never changes, so one that is already here is used again, and most patches keep it.
    """
    entry = manifest.file("tokenizer.json")
    for assets in resident:
        if entry is not None and assets.tokenizer_sha256 == entry.sha256:
            return assets.tokenizer, entry.sha256
    from tokenizers import Tokenizer

    raw = read_checked(folder, manifest, "tokenizer.json")
    try:
        return Tokenizer.from_buffer(raw), hashlib.sha256(raw).hexdigest()
    except Exception as error:  # tokenizers raises bare Exception; refuse, whatever it is
        raise BuildRefusedError(f"tokenizer.json does not load: {error}") from error


def _read_object(folder: Path, manifest: BuildManifest, path: str) -> dict[str, Any]:
    """A JSON object of the build; empty when the build has no such file."""
    if manifest.file(path) is None:
        return {}
    try:
        value = json.loads(read_checked(folder, manifest, path))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise BuildRefusedError(f"{path} does not parse: {error}") from error
    if not isinstance(value, dict):
        raise BuildRefusedError(f"{path} is not a JSON object")
    return value


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; older files spell a token as an object with its text in ``content``."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        found[name] = text if isinstance(text, str) else ""
    return found


def _ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """``eos_token_id``: absent, one id or a list."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise BuildRefusedError(f"eos_token_id is {value!r}")
    return tuple(ids)
