"""A stand-in for the ``tensorrt_llm`` package, built from the signature table and nothing else.

What the table does not list does not exist, and a parameter it does not list is refused, so code that works against
the stand-in uses only what the table says. It behaves where it matters for an adapter: tokens depend on the weights,
a KV block kept for reuse under other weights gives wrong tokens, memory is counted, and every call can be made to fail.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Container, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine.adapters.tensorrt_llm.memory import GIB, DeviceMemory
from engine.adapters.tensorrt_llm.signatures import (
    ASYNC_LLM,
    CUDA_GRAPH_CONFIG,
    DEVICE_UUID,
    KV_CACHE_CONFIG,
    LLM,
    POINTS,
    SAMPLING_PARAMS,
    SLEEP_CONFIG,
    TRT_LLM,
    VERSION,
    WORKER_EXTENSION,
    Point,
    point,
)
from engine.adapters.tensorrt_llm.testing_modules import strict_modules

VOCABULARY = 997
_BLOCK_TOKENS = 32
_BLOCKS = 1024


class FakePackage:
    """The package, its GPUs and its workers.

    Args:
        without: names of points this version does not have; for a parameter of its own, the name of its feature.
        version: what ``__version__`` says.
        device_bytes: memory of each of eight GPUs.
        missing: the package is not installed at all.
        import_error: what importing it raises.

    Attributes:
        touched: names of the points that were used.
        fail: by point name, what its next calls raise, in order; None lets one pass.
        at: by point name, what to do when it is next called; may run in another thread.
        live: the engines in memory.
        arguments: constructor arguments of every engine, in order of loading.
    """

    def __init__(
        self,
        *,
        without: Container[str] = (),
        version: str = "1.2.0",
        devices: int = 8,
        device_bytes: int = 80 * GIB,
        missing: bool = False,
        import_error: Exception | None = None,
    ) -> None:
        self.touched: set[str] = set()
        self.fail: defaultdict[str, list[Exception | None]] = defaultdict(list)
        self.at: dict[str, Callable[[], object]] = {}
        self.live: list[FakeEngine] = []
        self.arguments: list[dict[str, Any]] = []
        self.version = version
        self.missing = missing
        self.import_error = import_error
        self._total = device_bytes
        self._devices = devices
        self._held = False
        self._turn = asyncio.Event()
        self._without = without
        self._modules = strict_modules(
            [
                replace(entry, extra=None) if entry.extra and entry.extra[1] in without else entry
                for entry in POINTS
                if entry.name not in without
            ],
            self,
        )

    def importer(self, name: str) -> Any:
        """In place of :func:`importlib.import_module`."""
        if name == "torch":
            return SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: self._devices, mem_get_info=self._free))
        if self.import_error is not None:
            raise self.import_error
        if self.missing or name not in self._modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return self._modules[name]

    def devices(self) -> tuple[DeviceMemory, ...]:
        """Memory of the GPUs."""
        used = sum(engine.bytes for engine in self.live)
        return (DeviceMemory(used, self._total),) * self._devices

    def hold(self) -> None:
        """Let no engine make a token until :meth:`proceed`."""
        self._held = True

    def proceed(self) -> None:
        """Let them."""
        self._held = False
        self.poke()

    def poke(self) -> None:
        """Something changed: whoever waits in :meth:`turn` looks again."""
        turn, self._turn = self._turn, asyncio.Event()
        turn.set()

    async def turn(self, aborted: Callable[[], bool]) -> None:
        """Wait for the next token's turn, or for the end."""
        await asyncio.sleep(0)
        while self._held and not aborted():
            await self._turn.wait()

    def read(self, entry: Point, owner: Any) -> Any:
        """See :class:`.testing_modules.Behaviour`."""
        if entry.name == VERSION:
            return self.version
        self.touched.add(entry.name)
        return _READS[entry.name.partition(":")[2]](self, owner.state)

    def call(self, entry: Point, owner: Any, arguments: Mapping[str, Any]) -> Any:
        """See :class:`.testing_modules.Behaviour`.

        Raises:
            TypeError: an argument is not in the table.
            Exception: what the test asked for.
        """
        self.enter(entry, arguments)
        if act := _CALLS.get(entry.name):
            return act(self, owner, arguments)
        return getattr(owner.state, entry.name.rpartition(".")[2])(**arguments)

    def enter(self, entry: Point, arguments: Mapping[str, Any]) -> None:
        """Account for a call that is about to happen; raises as :meth:`call`."""
        self.touched.add(entry.name)
        fields = {f"{entry.fields_of}.{name}": name for name in arguments}
        optional = {fields[other.name] for other in POINTS if other.name in fields}
        self.touched |= {f"{entry.fields_of}.{name}" for name in optional}
        if entry.extra and entry.extra[1] not in self._without:
            optional.add(entry.extra[0])
        if unknown := arguments.keys() - {*entry.parameters, *entry.fields, *optional}:
            raise TypeError(f"{entry.name} got an unexpected argument {min(unknown)!r}")
        if do := self.at.pop(entry.name, None):
            do()
        if self.fail[entry.name] and (error := self.fail[entry.name].pop(0)) is not None:
            raise error

    def _free(self, device: int) -> tuple[int, int]:
        memory = self.devices()[device]
        return memory.total - memory.used, memory.total


class FakeWeights:
    """A weight source whose handles are the files themselves."""

    def buckets(self, folder: Path, files: Sequence[str]) -> Generator[dict[str, str]]:
        """See :class:`engine.adapters.tensorrt_llm.weights.WeightSource`."""
        for name in files:
            yield {"GPU-0": base64.b64encode(name.encode() + b"\n" + (folder / name).read_bytes()).decode()}


class FakeEngine:
    """What every LLM class of the stand-in does."""

    def __init__(self, package: FakePackage, arguments: Mapping[str, Any]) -> None:
        package.arguments.append(dict(arguments))
        folder = Path(arguments["model"])
        files = sorted([*folder.glob("*.safetensors"), *folder.glob("rank*.engine")])
        self.package = package
        self.digest = _digest(b"".join(path.read_bytes() for path in files))
        # Only the sizes in build.json count, so that a test may claim a large model.
        manifest = json.loads((folder / "build.json").read_bytes())
        self.bytes = sum(e["size_bytes"] for e in manifest["files"] if e["path"] in {path.name for path in files})
        self.reuse: dict[tuple[str, tuple[int, ...]], str] = {}
        self.received: dict[bytes, bytes] = {}
        self.paused = self.parked = False
        self.running = self.steps = 0
        if any(memory.used + self.bytes > memory.total for memory in package.devices()):
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        package.live.append(self)

    def setup_async(self) -> None:
        """Workers start with the constructor here."""

    def generate_async(self, inputs: list[int], sampling_params: Any, streaming: bool, cache_salt: str = "") -> Any:
        """Start a request."""
        assert streaming
        if self.paused or self.parked or self not in self.package.live:
            raise RuntimeError("not serving")
        return self.package.importer("tensorrt_llm.llmapi").RequestOutput(
            _Request(self, inputs, sampling_params, cache_salt)
        )

    async def get_stats_async(self, timeout: float) -> AsyncIterator[dict[str, Any]]:  # noqa: ASYNC109 - their name
        """The newest iteration; the real one waits ``timeout`` seconds for another."""
        assert timeout < 1
        if self.steps:
            kv = {"maxNumBlocks": _BLOCKS, "usedNumBlocks": self.running, "tokensPerBlock": _BLOCK_TOKENS}
            kv |= {"reusedBlocks": len(self.reuse), "missedBlocks": 1}
            yield {"iter": self.steps, "numActiveRequests": self.running, "numQueuedRequests": 0, "kvCacheStats": kv}

    def update_weights(self, weights: dict[str, str] | None) -> None:
        """Take a bucket, or finish; waits until nothing runs, which is why a caller must see to that."""
        self.package.enter(point(f"{WORKER_EXTENSION}.update_weights"), {"ipc_handles": weights})
        assert self.running == 0
        if weights is None:
            self.digest = _digest(b"".join(self.received[name] for name in sorted(self.received)))
            self.received.clear()
            self.reuse.clear()
        else:
            # From the first bucket on, it is neither the old model nor the new one.
            self.digest = "mixture"
            name, _, content = base64.b64decode(weights["GPU-0"]).partition(b"\n")
            self.received[name] = content

    def collective_rpc(self, method: str) -> list[None]:
        """Run a method of the worker extension."""
        self.package.enter(point(f"{WORKER_EXTENSION}.{method}"), {})
        assert method == "reset_prefix_cache"
        self.reuse.clear()
        return [None]

    def pause_generation(self) -> None:
        """End what runs, take nothing new."""
        self.paused = True

    def resume_generation(self) -> None:
        """Take requests again."""
        self.paused = False

    def release(self, tags: list[str]) -> None:
        """Blocks that are still found afterwards have lost their content."""
        assert tags == ["kv_cache"]
        self.parked = True
        self.reuse = dict.fromkeys(self.reuse, "lost")

    def resume(self, tags: list[str]) -> None:
        """Memory is back."""
        assert tags == ["kv_cache"]
        self.parked = False

    def shutdown(self) -> None:
        """Harmless when repeated, as the real one."""
        if self in self.package.live:
            self.package.live.remove(self)


class _Request:
    """State behind a ``RequestOutput``."""

    def __init__(self, engine: FakeEngine, prompt: Sequence[int], sampling: Any, salt: str) -> None:
        self.engine = engine
        self.sampling: dict[str, Any] = sampling.arguments
        self.prompt = tuple(prompt)
        self.salt = salt
        self.tokens: list[int] = []
        self.finish: str | None = None
        self.aborted = False

    async def run(self, output: Any) -> AsyncIterator[Any]:
        engine = self.engine
        # A block found under this prompt carries the weights it was computed with.
        digest = engine.reuse.setdefault((self.salt, self.prompt), engine.digest)
        engine.running += 1
        try:
            while self.finish is None:
                await engine.package.turn(lambda: self.aborted)
                engine.steps += 1
                self._step(digest)
                yield output
        finally:
            engine.running -= 1

    def _step(self, digest: str) -> None:
        if self.aborted:
            self.finish = "cancelled"
            return
        token = fake_token(digest, self.prompt, len(self.tokens), self.sampling.get("seed", 0))
        self.tokens.append(token)
        if token in self.sampling.get("stop_token_ids", ()):
            self.finish = "stop"
        elif len(self.tokens) == self.sampling["max_tokens"]:
            self.finish = "length"


def fake_token(digest: str, prompt: Sequence[int], at: int, seed: int = 0) -> int:
    """The token that weights of ``digest`` give at position ``at``."""
    return int(_digest(f"{digest} {list(prompt)} {at} {seed}".encode())[:8], 16) % VOCABULARY


def weights_digest(*contents: bytes) -> str:
    """Digest of a model with weight files of these contents, in order of their names."""
    return _digest(b"".join(contents))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _new_engine(package: FakePackage, self: Any, arguments: Mapping[str, Any]) -> None:
    self.state = FakeEngine(package, arguments)


def _new_options(_package: FakePackage, self: Any, arguments: Mapping[str, Any]) -> None:
    self.arguments = dict(arguments)


def _abort(package: FakePackage, self: Any, _arguments: Mapping[str, Any]) -> None:
    self.state.aborted = True
    package.poke()


def _logprobs(package: FakePackage, request: _Request) -> list[dict[int, Any]] | None:
    if "logprobs" not in request.sampling:
        return None
    entry = package.importer("tensorrt_llm.executor.result").Logprob
    return [{token: entry(-0.5), (token + 1) % VOCABULARY: entry(-1.5)} for token in request.tokens]


_CALLS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys((LLM, TRT_LLM, ASYNC_LLM), _new_engine),
    **dict.fromkeys((SAMPLING_PARAMS, KV_CACHE_CONFIG, CUDA_GRAPH_CONFIG, SLEEP_CONFIG), _new_options),
    "tensorrt_llm.llmapi:RequestOutput.abort": _abort,
    "tensorrt_llm.llmapi:RequestOutput.__aiter__": lambda _package, self, _arguments: self.state.run(self),
    DEVICE_UUID: lambda _package, _owner, arguments: f"GPU-{arguments['device_idx']}",
}
_READS: dict[str, Callable[[FakePackage, Any], Any]] = {
    "RequestOutput.outputs": lambda package, request: [
        package.importer("tensorrt_llm.llmapi").CompletionOutput(request)
    ],
    "RequestOutput.finished": lambda _package, request: request.finish is not None,
    "CompletionOutput.token_ids": lambda _package, request: request.tokens,
    "CompletionOutput.logprobs": _logprobs,
    "CompletionOutput.finish_reason": lambda _package, request: request.finish,
    "Logprob.logprob": lambda _package, value: value,
}
