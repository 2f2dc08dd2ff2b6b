"""TensorRT-LLM as an external engine. Not run on a GPU.

New requests take whatever generation is active when they begin and end on it. An in-place update and a reclaim hold
new requests back, wait until nothing runs, and let them go on; an update beside the old engine holds nobody back.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from engine.adapters.errors import BoundaryMissedError, EngineFailedError, UpdateFailedError, UpdateRefusedError
from engine.adapters.port import ReclaimReport, UpdateOptions, UpdateReport
from engine.adapters.tensorrt_llm.artifact import Artifact, not_interchangeable, read_artifact
from engine.adapters.tensorrt_llm.features import Importer
from engine.adapters.tensorrt_llm.gate import Gate
from engine.adapters.tensorrt_llm.inplace import update_in_place
from engine.adapters.tensorrt_llm.loading import LoadOptions, load_error, load_resident
from engine.adapters.tensorrt_llm.memory import DeviceMemory, does_not_fit, read_devices
from engine.adapters.tensorrt_llm.package import Package, open_package
from engine.adapters.tensorrt_llm.resident import ABORT_S_MAX, Resident
from engine.adapters.tensorrt_llm.route import choose_route
from engine.adapters.tensorrt_llm.signatures import DEVICE_UUID, Feature
from engine.adapters.tensorrt_llm.stats import load_from
from engine.adapters.tensorrt_llm.vendor import or_failed
from engine.adapters.tensorrt_llm.weights import IpcWeights, WeightSource
from engine.errors import EngineError, LoadError
from engine.wire import Load, Sampling, Submit, Tokens

_Result = TypeVar("_Result")
# What the runtime takes as a seed: an unsigned 64-bit number; one bit less is safe for a signed one too.
_SEED_BITS = 63


class TensorRtLlm:
    """See :class:`engine.adapters.port.ExternalEngine`.

    A change (load, update, exchange, release, reclaim, resume) runs to its end even when its caller is cancelled:
    half a change would leave device memory behind, or a mixture of weights.

    Args:
        options: how engines are loaded.
        importer: imports the vendor's modules.
        weights: where an in-place update gets its handles; None copies the checkpoint to every device.
        devices: reads device memory; None asks torch.
    """

    def __init__(
        self,
        options: LoadOptions | None = None,
        *,
        importer: Importer = importlib.import_module,
        weights: WeightSource | None = None,
        devices: Callable[[], tuple[DeviceMemory, ...]] | None = None,
    ) -> None:
        self._options = options or LoadOptions()
        self._importer = importer
        self._weights = weights
        self._devices = devices or (lambda: read_devices(importer("torch")))
        self._package: Package | None = None
        self._active: Resident | None = None
        self._other: Resident | None = None
        self._gate = Gate(self._enterable)
        self._busy = False
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._swaps = 0
        self._failed = ""
        self._parked = False

    @property
    def generation(self) -> int | None:
        """The generation that new requests get."""
        return self._active.generation if self._active else None

    async def generate(self, request: Submit) -> AsyncGenerator[Tokens]:
        """See the port."""
        resident = await self._gate.admit()
        try:
            async with contextlib.aclosing(resident.stream(request, _new_seed)) as stream:
                async for tokens in stream:
                    yield tokens
        finally:
            resident.leave()

    async def stats(self) -> Load:
        """See the port."""
        active, iteration = self._active, None
        if active is not None:
            with contextlib.suppress(Exception):
                # Vendor code, and figures are worth no failure; the adapter's own counts remain.
                iteration = await active.iteration()
        running = active.running if active else 0
        return load_from(iteration, running=running, waiting=self._gate.waiting, swaps=self._swaps)

    async def load(self, folder: Path, generation: int) -> None:
        """See the port."""
        await self._change(self._load(folder, generation))

    async def update(self, folder: Path, generation: int, options: UpdateOptions | None = None) -> UpdateReport:
        """See the port."""
        return await self._change(self._update(folder, generation, options or UpdateOptions()))

    async def exchange(self, generation: int) -> None:
        """See the port."""
        await self._change(self._exchange(generation))

    async def release(self, generation: int) -> None:
        """See the port."""
        await self._change(self._release(generation))

    async def reclaim(self, *, park: bool = False, drain_s_max: float = 30.0) -> ReclaimReport:
        """See the port."""
        return await self._change(self._reclaim(drain_s_max, park=park))

    async def resume(self) -> None:
        """See the port."""
        await self._change(self._resume())

    async def close(self) -> None:
        """See the port."""
        async with self._changing:
            self._failed = self._failed or "the engine is closed"
            self._gate.open()
            residents = [resident for resident in (self._active, self._other) if resident is not None]
            self._active = self._other = None
            for resident in residents:
                await resident.end()

    async def _load(self, folder: Path, generation: int) -> None:
        if self._active is not None:
            raise UpdateRefusedError(f"generation {self._active.generation} is loaded; this is an update")
        artifact = await asyncio.to_thread(read_artifact, folder)
        if self._package is None:
            self._package = await asyncio.to_thread(open_package, self._importer)
        self._active = await self._load_probed(self._package, artifact, generation)
        self._gate.open()

    async def _update(self, folder: Path, generation: int, options: UpdateOptions) -> UpdateReport:
        package, active = self._serving()
        if generation in {resident.generation for resident in (active, self._other) if resident}:
            raise UpdateRefusedError(f"generation {generation} is resident")
        try:
            target = await asyncio.to_thread(read_artifact, folder)
            not_in_place = await asyncio.to_thread(self._not_in_place, package, active, target)
        except LoadError as error:
            raise UpdateRefusedError(str(error)) from error
        not_beside = await asyncio.to_thread(self._not_beside, target)
        route, why = choose_route(options.route, not_in_place=not_in_place, not_beside=not_beside)
        if route == "in_place":
            return await self._in_place(package, active, target, generation, options, why)
        return await self._beside(package, active, target, generation, options, why)

    async def _in_place(
        self, package: Package, active: Resident, target: Artifact, generation: int, options: UpdateOptions, why: str
    ) -> UpdateReport:
        previous = active.generation
        async with self._quiet(active, options):
            await update_in_place(
                active,
                target,
                generation,
                source=self._weights or self._ipc_weights(package),
                features=package.features,
                probe=self._probe,
            )
        self._swaps += 1
        return UpdateReport("in_place", generation, previous, drained=True, rollback="update", why=why)

    async def _beside(
        self, package: Package, active: Resident, target: Artifact, generation: int, options: UpdateOptions, why: str
    ) -> UpdateReport:
        try:
            new = await self._load_probed(package, target, generation)
        except LoadError as error:
            raise UpdateFailedError(f"generation {active.generation} serves; {error}") from error
        self._active, self._other = new, active
        self._swaps += 1
        if options.keep_old:
            # Waiting here would hold up a rollback.
            drained = active.running == 0
            if options.hard_stop and not drained:
                self._in_background(_drain(active, options))
        elif drained := await _drain(active, options):
            why = "; ".join(filter(None, (why, await self._free_other())))
        else:
            self._in_background(self._retire(active))
        return UpdateReport(
            "side_by_side",
            generation,
            active.generation,
            drained=drained,
            rollback="exchange" if options.keep_old else "update",
            why=why,
        )

    async def _exchange(self, generation: int) -> None:
        _, active = self._serving()
        if generation == active.generation:
            return
        if self._other is None or self._other.generation != generation or self._other.ending:
            raise UpdateRefusedError(f"generation {generation} is not resident")
        self._active, self._other = self._other, active
        self._swaps += 1

    async def _release(self, generation: int) -> None:
        if generation == self.generation:
            raise UpdateRefusedError(f"generation {generation} serves")
        if self._other is None or self._other.generation != generation:
            raise UpdateRefusedError(f"generation {generation} is not resident")
        if problem := await self._free_other():
            raise UpdateFailedError(f"generation {self.generation} serves; {problem}")

    async def _reclaim(self, drain_s_max: float, *, park: bool) -> ReclaimReport:
        if self._parked:
            return ReclaimReport(done=True, parked=True)
        package, active = self._serving()
        feature: Feature = "park" if park else "reuse_reset"
        if not active.asynchronous:
            return ReclaimReport(done=False, why="only an AsyncLLM can be told to drop its KV blocks")
        if park and not self._options.parkable:
            return ReclaimReport(done=False, why="the engine was not loaded to be parked")
        if feature not in package.features:
            return ReclaimReport(done=False, why=package.features.why_not(feature))
        async with self._quiet(active, UpdateOptions(drain_s_max=drain_s_max)):
            # First, whatever follows: released blocks come back without their content, so none may be found again.
            await or_failed(active.llm.collective_rpc(method="reset_prefix_cache"), "reset_prefix_cache")
            if park:
                await or_failed(active.llm.release(tags=["kv_cache"]), "release")
                self._parked = True
        return ReclaimReport(done=True, parked=park)

    async def _resume(self) -> None:
        if not self._parked or self._active is None:
            return
        with self._failing():
            await or_failed(self._active.llm.resume(tags=["kv_cache"]), "resume")
            self._parked = False

    async def _change(self, change: Coroutine[Any, Any, _Result]) -> _Result:
        """Run one change to its end; a second one meanwhile is refused, not queued."""
        if self._busy:
            change.close()
            raise UpdateRefusedError("another change is under way")
        self._busy = True

        async def locked() -> _Result:
            try:
                async with self._changing:
                    if self._failed:
                        change.close()
                        raise EngineFailedError(self._failed)
                    return await change
            finally:
                self._busy = False

        return await asyncio.shield(self._in_background(locked()))

    def _in_background(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        task = asyncio.create_task(work)
        self._tasks.add(task)

        def done(task: asyncio.Task[Any]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                # Retrieved here, because the caller may have been cancelled and nobody else would.
                task.exception()

        task.add_done_callback(done)
        return task

    def _enterable(self) -> Resident:
        if self._failed or self._active is None:
            raise EngineFailedError(self._failed or "nothing is loaded")
        return self._active

    def _serving(self) -> tuple[Package, Resident]:
        if self._package is None or self._active is None:
            raise UpdateRefusedError("nothing is loaded")
        if self._parked:
            raise UpdateRefusedError("the KV memory is parked; resume first")
        return self._package, self._active

    @contextlib.asynccontextmanager
    async def _quiet(self, active: Resident, options: UpdateOptions) -> AsyncIterator[None]:
        """Hold new requests back and wait until none runs."""
        self._gate.close()
        with self._failing():
            if not await _drain(active, options):
                raise BoundaryMissedError(f"{active.running} requests still run after {options.drain_s_max:g} s")
            yield

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Let requests in again afterwards, if only to learn that the engine failed."""
        try:
            yield
        except EngineFailedError as error:
            self._failed = str(error)
            raise
        finally:
            if self._failed or not self._parked:
                self._gate.open()

    async def _retire(self, resident: Resident) -> None:
        while not await resident.idle(ABORT_S_MAX):
            pass
        if self._other is resident:
            await self._free_other()

    async def _free_other(self) -> str:
        """End the generation that does not serve; it counts as resident until its memory is free."""
        other = self._other
        problem = await other.end() if other else ""
        if self._other is other:
            self._other = None
        return problem

    async def _load_probed(self, package: Package, artifact: Artifact, generation: int) -> Resident:
        resident = await load_resident(package, artifact, generation, self._options)
        try:
            await self._probe(resident)
        except EngineError as error:
            await resident.end()
            raise load_error(error) from error
        return resident

    async def _probe(self, resident: Resident) -> None:
        """Answer one request: an engine that was never run may still fail at its first.

        Raises:
            EngineError: it did not.
        """
        request = Submit(request=0, prompt=self._options.probe, tokens_max=1, sampling=Sampling())
        async for tokens in resident.stream(request, _new_seed):
            if any(token.finish in {"error", "cancelled"} for token in tokens.tokens):
                raise LoadError("the probe request was not answered")

    def _not_in_place(self, package: Package, active: Resident, target: Artifact) -> str:
        if why := not_interchangeable(active.artifact, target):
            return why
        if "in_place" not in package.features:
            return package.features.why_not("in_place")
        if not active.asynchronous:
            return "the engine was not loaded as an AsyncLLM"
        return f"generation {self._other.generation} is still resident" if self._other else ""

    def _not_beside(self, target: Artifact) -> str:
        if self._other is not None:
            return f"generation {self._other.generation} is still resident, and two are the most"
        options = self._options
        try:
            devices = self._devices()
        except Exception as error:
            # Vendor code: it may fail in any way.
            return f"device memory cannot be read ({type(error).__name__}: {error})"
        return does_not_fit(
            devices,
            target.rank_bytes(options.tensor_parallel_size),
            reserve_bytes=options.reserve_bytes,
            ceiling=options.memory_ceiling,
        )

    def _ipc_weights(self, package: Package) -> IpcWeights:
        uuid_of = package[DEVICE_UUID]
        return IpcWeights(
            tuple(range(self._options.tensor_parallel_size)),
            uuid_of=lambda device: uuid_of(device_idx=device),
            bucket_bytes=self._options.bucket_bytes,
        )


async def _drain(resident: Resident, options: UpdateOptions) -> bool:
    """Wait until nothing runs there; with a hard stop, see to it. True when nothing does."""
    if await resident.idle(options.drain_s_max):
        return True
    if not options.hard_stop:
        return False
    resident.abort()
    return await resident.idle(ABORT_S_MAX)


def _new_seed() -> int:
    return secrets.randbits(_SEED_BITS)
