"""The request path: the part of a build that runs in the front, loaded as checked bytes.

A build's module exports ``create(services: PathServices) -> RequestPath``. It is a part of the
generation: a response ends on the path it began with, and the module is dropped with its generation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol, TypeAlias, runtime_checkable

from engine.build import BuildManifest
from engine.front.checked import BuildRefusedError, read_checked

# As in the manifest, without "sha256:"; 64 bits name a build, and two that collide are still told apart.
_DIGEST_CHARS = 16
Message: TypeAlias = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PathServices:
    """What the front lends to a request path.

    Attributes:
        encode: text and "add the special tokens of the model's template" → token ids.
        render_chat: messages (``role``, ``content``) → prompt text, by the model's chat template.
    """

    encode: Callable[[str, bool], Sequence[int]]
    render_chat: Callable[[Sequence[Message]], str]


class StreamWriter(Protocol):
    """Frames the server-sent events of one response."""

    def event(self, data: bytes) -> bytes | bytearray | memoryview:
        """The wire bytes of one event; valid until the next call on this writer."""

    def close(self) -> None:
        """The response ended, one way or another; called once."""


@runtime_checkable
class RequestPath(Protocol):
    """Turns requests into prompts and answers into bytes."""

    def encode(self, text: str, *, add_special: bool) -> Sequence[int]:
        """Token ids of ``text``. May be called from a worker thread."""

    def chat_prompt(self, messages: Sequence[Message]) -> str:
        """Prompt text for a chat, up to where the assistant begins to speak."""

    def open_stream(self, response_id: str) -> StreamWriter:
        """A writer for one streamed response."""


class LoadedPath:
    """A request path and the module it lives in."""

    __slots__ = ("_module", "_name", "path")

    def __init__(self, name: str, module: ModuleType, path: RequestPath) -> None:
        self._name = name
        self._module = module
        self.path = path

    def close(self) -> None:
        """Forget the module. What it keeps in globals is freed now, not at some later collection."""
        _forget(self._name, self._module)


def module_name(build_digest: str) -> str:
    """Name a build's request path is imported under; never a name of this distribution."""
    return f"patchctl_build_{build_digest.removeprefix('sha256:')[:_DIGEST_CHARS]}_path"


def load_request_path(folder: Path, manifest: BuildManifest, services: PathServices) -> LoadedPath:
    """Run the build's request-path module and try it once.

    The source is compiled from the very bytes whose sha256 was compared; nothing is read twice and no
    bytecode file is read or written.

    Raises:
        BuildRefusedError: altered file, or anything at all raised while it loads.
    """
    source = read_checked(folder, manifest, manifest.request_path)
    name = module_name(manifest.digest)
    module = ModuleType(name)
    module.__file__ = f"<{name}>"
    sys.modules[name] = module  # dataclasses and typing look their module up while the body runs
    try:
        exec(compile(source, module.__file__, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - verified code of the build
        path = module.create(services)
        _try(path)
    except (Exception, SystemExit) as error:  # the build's code is foreign: whatever it does is a refusal
        _forget(name, module)
        raise BuildRefusedError(f"request path {manifest.request_path}: {type(error).__name__}: {error}") from error
    return LoadedPath(name, module, path)


def _forget(name: str, module: ModuleType) -> None:
    if sys.modules.get(name) is module:
        del sys.modules[name]
    module.__dict__.clear()


def _try(path: RequestPath) -> None:
    """Use every method once, so that a broken path is refused while it is staged and not by a request.

    Raises:
        TypeError: the path does not keep the protocol.
    """
    if not isinstance(path, RequestPath):
        raise TypeError("create() did not return a RequestPath")
    if not all(type(token) is int for token in path.encode("a", add_special=False)):
        raise TypeError("encode() did not return token ids")
    writer = path.open_stream("selftest")
    framed = bytes(writer.event(b"{}"))
    writer.close()
    if framed != b"data: {}\n\n":
        raise TypeError("event() did not frame a server-sent event")
