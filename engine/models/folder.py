"""A Hugging Face model folder, checked before a build is made from it.

Only the Llama family: the engine implements that architecture and nothing else. Which details of it the
engine supports (activation, biases, rotary scaling) is decided where the model is built.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ARCHITECTURE = "LlamaForCausalLM"
_INDEX = "model.safetensors.index.json"
_REQUIRED = ("config.json", "tokenizer.json", "tokenizer_config.json")
_OPTIONAL = ("generation_config.json", "chat_template.jinja", _INDEX)
# The largest of these files, a tokenizer with 256,000 entries, has 34 MB.
_JSON_BYTES_MAX = 64 << 20


class ModelRefusedError(ValueError):
    """The folder is not a model we can make a build of; the message says why."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A sound model folder.

    Attributes:
        path: the folder.
        config: ``config.json``, parsed.
        files: names of the files that belong in a build, sorted.
    """

    path: Path
    config: dict[str, Any]
    files: tuple[str, ...]


def read_model_folder(path: Path) -> ModelFolder:
    """Check ``path`` and list what of it belongs in a build; weights are not read.

    Raises:
        ModelRefusedError: architecture not Llama, a file missing or unreadable, no safetensors, or the
            index and the weight files differ.
    """
    for name in _REQUIRED:
        if not (path / name).is_file():
            raise ModelRefusedError(f"{path.name} has no {name}")
    config = _read_json(path / "config.json")
    if config.get("architectures") != [_ARCHITECTURE]:
        raise ModelRefusedError(f"architectures is {config.get('architectures')!r}; only [{_ARCHITECTURE!r}] is served")
    if "quantization_config" in config:
        raise ModelRefusedError("config.json has a quantization_config; only plain weights are served")
    weights = sorted(entry.name for entry in path.glob("*.safetensors") if entry.is_file())
    if not weights:
        raise ModelRefusedError(f"{path.name} has no .safetensors file")
    if (path / _INDEX).is_file():
        _check_index(_read_json(path / _INDEX), weights)
    present = [name for name in _OPTIONAL if (path / name).is_file()]
    return ModelFolder(path, config, tuple(sorted([*_REQUIRED, *present, *weights])))


def _check_index(index: dict[str, Any], weights: list[str]) -> None:
    where = index.get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise ModelRefusedError(f"{_INDEX} has no weight_map of file names")
    odd = sorted(set(where.values()) ^ set(weights))
    if odd:
        raise ModelRefusedError(f"{_INDEX} and the folder differ on: {', '.join(odd[:5])}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _JSON_BYTES_MAX:
            raise ModelRefusedError(f"{path.name} has more than {_JSON_BYTES_MAX} bytes")
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ModelRefusedError):
            raise
        raise ModelRefusedError(f"{path.name} does not parse: {error}") from error
    if not isinstance(value, dict):
        raise ModelRefusedError(f"{path.name} is not a JSON object")
    return value
