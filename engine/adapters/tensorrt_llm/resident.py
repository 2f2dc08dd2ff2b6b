"""One loaded engine: TensorRT-LLM's ``LLM`` object, the build it came from, and the requests that run on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from engine.adapters.errors import GenerationFailedError, RequestRefusedError
from engine.adapters.tensorrt_llm.artifact import Artifact
from engine.adapters.tensorrt_llm.engine_set import EngineSet
from engine.adapters.tensorrt_llm.sampling import sampling_arguments
from engine.adapters.tensorrt_llm.stream import TokenStream
from engine.wire import Submit, Tokens

# How long one look at the statistics queue waits for an iteration that may not come.
STATS_WAIT_S = 0.05
# How long requests may go on after they were told to end; they only have to be taken out of a batch.
ABORT_S_MAX = 10.0


class Resident:
    """A generation in device memory.

    Args:
        generation: its number; an in-place update gives it a new one.
        artifact: the build.
        llm: the loaded object.
        asynchronous: whether ``llm`` is an ``AsyncLLM``, which alone can be updated.
        sampling_params: the ``SamplingParams`` class.
        logprobs: whether ``llm`` was loaded so that it can report them.
        salted: whether requests can be kept apart in the reuse cache; then each generation has its own part of it.
    """

    def __init__(
        self,
        generation: int,
        artifact: Artifact,
        llm: Any,
        *,
        asynchronous: bool,
        sampling_params: Callable[..., Any],
        logprobs: bool,
        salted: bool,
    ) -> None:
        self.generation = generation
        self.artifact = artifact
        self.llm = llm
        self.asynchronous = asynchronous
        self._sampling_params = sampling_params
        self._logprobs = logprobs
        self._salted = salted
        self._running = 0
        self._results: set[Any] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._iteration: dict[str, Any] | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def running(self) -> int:
        """Requests between :meth:`enter` and :meth:`leave`."""
        return self._running

    @property
    def ending(self) -> bool:
        """True from the first :meth:`end` on."""
        return self._ending is not None

    def enter(self) -> None:
        """A request is going to run here; keeps the generation from being drained."""
        self._running += 1
        self._idle.clear()

    def leave(self) -> None:
        """It does not any more."""
        self._running -= 1
        if not self._running:
            self._idle.set()

    async def idle(self, wait_s_max: float) -> bool:
        """Wait until nothing runs; False when something still does after ``wait_s_max``."""
        try:
            async with asyncio.timeout(wait_s_max):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def stream(self, request: Submit, new_seed: Callable[[], int]) -> AsyncGenerator[Tokens]:
        """Generate; see :meth:`engine.adapters.port.ExternalEngine.generate`."""
        self._refuse_impossible(request)
        arguments = sampling_arguments(request, new_seed)
        generation, tokens = self.generation, TokenStream(request)
        salt = {"cache_salt": str(generation)} if self._salted else {}
        result = None
        try:
            result = self.llm.generate_async(
                inputs=list(request.prompt), sampling_params=self._sampling_params(**arguments), streaming=True, **salt
            )
            self._results.add(result)
            async for output in result:
                if new := tokens.advance(output.outputs[0], ended=output.finished):
                    yield Tokens(generation, new)
                if tokens.finished:
                    return
            if new := tokens.advance(result.outputs[0], ended=True):
                yield Tokens(generation, new)
        except Exception as error:
            # Vendor code: it may fail in any way, and the front needs one answer.
            raise GenerationFailedError(f"{type(error).__name__}: {error}") from error
        finally:
            self._results.discard(result)
            if result is not None and not result.finished:
                result.abort()

    def abort(self) -> None:
        """Ask the engine to end what runs; each stream ends with finish ``cancelled``."""
        for result in tuple(self._results):
            result.abort()

    async def iteration(self) -> dict[str, Any] | None:
        """The newest iteration's statistics, or None before the first."""
        async for entry in self.llm.get_stats_async(timeout=STATS_WAIT_S):
            self._iteration = entry
        return self._iteration

    async def end(self) -> str:
        """Cancel what runs and free everything; what went wrong, or "". Harmless when repeated."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        try:
            await asyncio.shield(self._ending)
        except Exception as error:
            # Vendor code: it may fail in any way, and the one who replaced this generation goes on regardless.
            return f"generation {self.generation} did not shut down cleanly: {type(error).__name__}: {error}"
        return ""

    async def _end(self) -> None:
        self.abort()
        await self.idle(ABORT_S_MAX)
        # In a thread, because it waits for worker processes.
        await asyncio.to_thread(self.llm.shutdown)

    def _refuse_impossible(self, request: Submit) -> None:
        files = self.artifact.files
        if not request.prompt:
            raise RequestRefusedError("the prompt is empty")
        if not isinstance(files, EngineSet):
            return
        if len(request.prompt) + request.tokens_max > files.max_seq_len:
            raise RequestRefusedError(
                f"{len(request.prompt)} prompt tokens + {request.tokens_max} new ones > {files.max_seq_len}"
            )
        if request.sampling.logprobs is not None and not self._logprobs:
            raise RequestRefusedError("this engine was loaded without logprobs")
