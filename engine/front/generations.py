"""The front's half of the generations: which request path serves, and which still ends its responses.

Pure bookkeeping. A response enters the active generation and keeps it to its end; an exchange changes
what the next response enters; a released generation goes when its last response leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from engine.front.assets import ModelAssets
from engine.front.path import LoadedPath, RequestPath

# Swap rule 4: two resident generations at once, ever; one that drains counts.
_GENERATIONS_MAX: Final = 2


class GenerationRefusedError(Exception):
    """A control message that does not fit the state. ``code`` is stable, the text explains."""

    def __init__(self, code: str, what: str) -> None:
        super().__init__(what)
        self.code = code


@dataclass(eq=False, slots=True, weakref_slot=True)
class Generation:
    """A loaded build as the front sees it.

    Attributes:
        number: the generation id, shared with the engine.
        build: build digest.
        model_name: the name clients use for the model.
        responses_open: responses that began here and have not ended.
        releasing: the agent released it; it goes with its last response.
    """

    number: int
    build: str
    model_name: str
    assets: ModelAssets
    loaded: LoadedPath
    responses_open: int = 0
    releasing: bool = False

    @property
    def path(self) -> RequestPath:
        """The build's request path."""
        return self.loaded.path


class Generations:
    """Resident generations by number; ``on_freed`` runs after one was dropped.

    The active one is what the engine serves, if it is held here; else nothing is served.
    """

    def __init__(self, on_freed: Callable[[], None]) -> None:
        self._held: dict[int, Generation] = {}
        self._active: Generation | None = None
        self._engine: int | None = None
        self._on_freed = on_freed

    def __iter__(self) -> Iterator[Generation]:
        return iter(tuple(self._held.values()))

    @property
    def active(self) -> Generation | None:
        """What the next response enters; None while the engine serves nothing that is held here."""
        return self._active

    @property
    def engine_generation(self) -> int | None:
        """What the engine serves; None when it has not said."""
        return self._engine

    def check_room(self, number: int, build: str) -> bool:
        """Before staging. False: exactly this one is already held, nothing to do.

        Raises:
            GenerationRefusedError: the number is taken by another build, or two are resident.
        """
        held = self._held.get(number)
        if held is not None and not held.releasing and held.build == build:
            return False
        if held is not None:
            raise GenerationRefusedError("generation_exists", f"generation {number} is {held.build}")
        if len(self._held) >= _GENERATIONS_MAX:
            resident = ", ".join(f"{one.number} ({one.responses_open} responses open)" for one in self)
            raise GenerationRefusedError("generation_limit", f"two generations are resident: {resident}")
        return True

    def add(self, generation: Generation) -> None:
        """Hold a staged generation; the one the engine already serves becomes active."""
        assert generation.number not in self._held
        self._held[generation.number] = generation
        if generation.number == self._engine:
            self._activate(generation)

    def exchange(self, number: int) -> bool:
        """The engine serves ``number`` from now on. False: it is not held here, so nothing is served."""
        self._engine, self._active = number, None
        generation = self._held.get(number)
        if generation is None:
            return False
        self._activate(generation)
        return True

    def engine_lost(self) -> None:
        """Nothing is served until the next engine has said what it serves, and that is held here."""
        self._engine = self._active = None

    def release(self, number: int) -> int:
        """Free ``number`` as soon as its responses have ended; returns how many are still open.

        Raises:
            GenerationRefusedError: not held, or it serves.
        """
        generation = self._held.get(number)
        if generation is None:
            raise GenerationRefusedError("generation_unknown", f"generation {number} is not resident")
        if generation is self._active:
            raise GenerationRefusedError("generation_active", f"generation {number} serves; exchange first")
        generation.releasing = True
        self._free_if_idle(generation)
        return generation.responses_open

    def enter(self) -> Generation | None:
        """A response begins on the active generation; the caller must :meth:`leave` it. None: nothing serves."""
        if self._active is not None:
            self._active.responses_open += 1
        return self._active

    def leave(self, generation: Generation) -> None:
        """A response that entered ``generation`` has ended."""
        assert generation.responses_open > 0
        generation.responses_open -= 1
        self._free_if_idle(generation)

    def _activate(self, generation: Generation) -> None:
        # Rolled back to after its release was asked for: it serves, so it stays.
        generation.releasing = False
        self._active = generation

    def _free_if_idle(self, generation: Generation) -> None:
        if generation.releasing and generation.responses_open == 0:
            del self._held[generation.number]
            generation.loaded.close()
            self._on_freed()
