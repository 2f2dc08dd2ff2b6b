"""For tests: a build that a front can serve, a front in a child process, and engine peers to script."""

from __future__ import annotations

import json
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx
import msgspec

from engine.attach import attach_pair, send_data_socket
from engine.build import BuildManifest, RuntimeOptions, seal_build
from engine.framing import Connection, FramingError
from engine.wire import (
    Admitted,
    Cancel,
    Control,
    Exchanged,
    FinishReason,
    Logprobs,
    Release,
    Reply,
    Stage,
    Stats,
    Submit,
    ToEngine,
    Token,
    Tokens,
)

# 3 special tokens and one per byte, rounded up.
TINY_VOCABULARY: Final = 288
_SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_TOKEN: Final = 2
_CONTEXT_TOKENS: Final = 512
_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WAIT_S: Final = 20.0
_CHILD: Final = """
import sys
from engine.front.process import run
sys.exit(run(*map(int, sys.argv[1:4]), arm=lambda: {"armed": True}))
"""


# A request path without peculiarities.
REQUEST_PATH: Final = b"""
class Writer:
    def event(self, data):
        return b"data: " + data + b"\\n\\n"

    def close(self):
        pass

class Path:
    def __init__(self, services):
        self.services = services

    def encode(self, text, *, add_special):
        return self.services.encode(text, add_special)

    def chat_prompt(self, messages):
        return self.services.render_chat(messages)

    def open_stream(self, response_id):
        return Writer()

def create(services):
    return Path(services)
"""


def events(response: httpx.Response) -> list[Any]:
    """The server-sent events of a response, decoded; the last one may be the text ``[DONE]``."""
    assert response.text.endswith("\n\n")
    lines = response.text[:-2].split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for a condition that another process brings about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not reached"
        time.sleep(0.01)


def tiny_tokenizer_files() -> dict[str, bytes]:
    """``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json`` of a byte-level vocabulary.

    Token ids: 0 to 2 are special, byte ``b`` is :func:`byte_token`; fits a model of 288 entries.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from engine.front.detokenize import byte_alphabet

    characters = sorted(byte_alphabet().items(), key=lambda item: item[1])
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *(character for character, _ in characters)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _SPECIAL])
    settings = {"bos_token": _SPECIAL[1], "eos_token": _SPECIAL[2], "chat_template": _CHAT_TEMPLATE}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
        "generation_config.json": json.dumps({"eos_token_id": END_TOKEN}).encode(),
    }


def byte_token(byte: int) -> int:
    """Token id of one byte in :func:`tiny_tokenizer_files`."""
    return len(_SPECIAL) + byte


def front_build(
    folder: Path, request_path: bytes, *, version: str = "1.0.0", extra_files: Mapping[str, bytes] | None = None
) -> BuildManifest:
    """Write a sealed build without weights, all that a front reads; needs no torch."""
    folder.mkdir(parents=True)
    for name, content in {**tiny_tokenizer_files(), "request_path.py": request_path, **(extra_files or {})}.items():
        (folder / name).write_bytes(content)
    model = {"vocab_size": TINY_VOCABULARY, "max_position_embeddings": _CONTEXT_TOKENS}
    return seal_build(
        folder,
        name="tiny",
        version=version,
        model=model,
        request_path="request_path.py",
        runtime=RuntimeOptions(contexts=(_CONTEXT_TOKENS,)),
    )


class EnginePeer:
    """The engine's end of the data socket; ``on_submit`` runs on its thread for every request."""

    def __init__(self, sock: socket.socket, on_submit: Callable[[EnginePeer, Submit], None] | None = None) -> None:
        self.connection = Connection(sock)
        self.generation = 1
        self.on_submit = on_submit
        self.submits: queue.Queue[Submit] = queue.Queue()
        self.cancels: queue.Queue[Cancel] = queue.Queue()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._thread = threading.Thread(target=self._read, name="engine-peer", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while (frame := self.connection.recv()) is not None:
                message = self._decoder.decode(frame)
                if isinstance(message, Cancel):
                    self.cancels.put(message)
                elif self.on_submit is not None:
                    self.on_submit(self, message)
                else:
                    self.submits.put(message)
        except (OSError, FramingError):
            return

    def next_submit(self) -> Submit:
        """Wait for a request."""
        return self.submits.get(timeout=_WAIT_S)

    def next_cancel(self) -> Cancel:
        """Wait for a cancellation."""
        return self.cancels.get(timeout=_WAIT_S)

    def say(self, request: int, data: bytes, finish: FinishReason | None = None) -> None:
        """Generate ``data``, a token per byte and a step per token; then finish, if that is given."""
        for byte in data:
            self.emit(request, byte_token(byte))
        if finish is not None:
            self.emit(request, -1, finish)

    def emit(
        self, request: int, token: int, finish: FinishReason | None = None, logprobs: Logprobs | None = None
    ) -> None:
        """Generate one token of one request."""
        self.connection.send(Tokens(self.generation, (Token(request, token, finish, logprobs),)))

    def admit(self, request: int, cached_tokens: int = 0) -> None:
        """Begin a request."""
        self.connection.send(Admitted(request, cached_tokens))

    def exchange(self, generation: int) -> None:
        """Serve ``generation`` from the next token on."""
        self.generation = generation
        self.connection.send(Exchanged(generation))

    def close(self) -> None:
        """Go away, as a crashed engine does."""
        self.connection.shutdown()
        self._thread.join(_WAIT_S)
        self.connection.close()


class FrontProcess:
    """A front in a child process, with the agent's ends of its sockets and an :class:`EnginePeer`.

    Args:
        on_submit: of the first peer.
        serves: what it says it serves; None: no engine is attached yet.
        before: Python statements that the child runs before the front.
    """

    def __init__(
        self,
        on_submit: Callable[[EnginePeer, Submit], None] | None = None,
        *,
        serves: int | None = 1,
        before: str = "",
    ) -> None:
        self.attach_socket, attach_child = attach_pair()
        control, control_child = socket.socketpair()
        listen = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{listen.getsockname()[1]}"
        with attach_child, control_child, listen:
            fds = [child.fileno() for child in (attach_child, control_child, listen)]
            command = [sys.executable, "-P", "-c", f"{before}\n{_CHILD}", *map(str, fds)]
            self.process = subprocess.Popen(command, pass_fds=fds)
        self._peers: list[EnginePeer] = []
        if serves is not None:
            self.attach(on_submit).exchange(serves)
        self.control = Connection(control)
        self.client = httpx.Client(base_url=self.url, timeout=_WAIT_S, trust_env=False)

    @property
    def peer(self) -> EnginePeer:
        """The engine attached last."""
        return self._peers[-1]

    def attach(self, on_submit: Callable[[EnginePeer, Submit], None] | None = None) -> EnginePeer:
        """Attach a new engine, in place of any other; it has not yet said what it serves."""
        here, there = socket.socketpair()
        with there:
            send_data_socket(self.attach_socket, there)
        self._peers.append(EnginePeer(here, on_submit))
        return self.peer

    def call(self, message: Control) -> Reply:
        """Send a control message and wait for the reply."""
        self.control.send(message)
        frame = self.control.recv()
        assert frame is not None
        return msgspec.msgpack.decode(frame, type=Reply)

    def stage(self, number: int, folder: Path, manifest: BuildManifest) -> Reply:
        """Stage a build."""
        return self.call(Stage(number, str(folder), manifest.digest))

    def release(self, number: int) -> Reply:
        """Release a generation."""
        return self.call(Release(number))

    def serve(self, folder: Path, source: bytes = REQUEST_PATH) -> Self:
        """Write a build to ``folder``, stage it as generation 1 and wait until it serves."""
        assert self.stage(1, folder, front_build(folder, source)).ok
        until(lambda: self.stats()["active_generation"] == 1)
        return self

    def stats(self) -> dict[str, Any]:
        """The front's counters."""
        return self.call(Stats()).data

    def post(self, path: str, **body: Any) -> httpx.Response:
        """POST a JSON body."""
        return self.client.post(path, json=body)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        for peer in self._peers:
            peer.close()
        self.attach_socket.close()
        self.control.shutdown()
        self.control.close()
        try:
            self.process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
