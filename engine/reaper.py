"""The reaper: when the memory of a retired generation may be freed. Pure.

Every launch gets an epoch. A retired generation is due when its launches are complete, nobody pins it (a
sequence that only it can continue, a reader of its tensors), and no probation may still return to it. Then
nothing on the device can touch its memory, so freeing needs no device-wide synchronize (epoch-based
reclamation: Fraser, "Practical lock-freedom", 2004, ch. 5).

Launches of one generation come from one thread at a time; of two generations, from two. Every method is
one or two operations on built-in containers, so neither has to wait for the other.
"""

from __future__ import annotations

import itertools


class Reaper:
    """Bookkeeping of launches, pins and retirement by generation number."""

    def __init__(self) -> None:
        self._epochs = itertools.count(1)
        self._launched: dict[int, int] = {}
        self._pins: dict[int, int] = {}
        self._protected: int | None = None
        self._retired: dict[int, None] = {}

    def launched(self, number: int) -> int:
        """Work of ``number`` is about to be given to the device; returns its epoch."""
        assert number not in self._retired, f"generation {number} was launched after it retired"
        epoch = next(self._epochs)
        self._launched[epoch] = number
        return epoch

    def completed(self, epoch: int) -> None:
        """The device is done with it; in any order, once."""
        del self._launched[epoch]

    def pin(self, number: int) -> None:
        """Somebody needs ``number`` as it is."""
        assert number not in self._retired, f"generation {number} was pinned after it retired"
        self._pins[number] = self._pins.get(number, 0) + 1

    def unpin(self, number: int) -> None:
        """One of those who pinned it is done."""
        left = self._pins[number] - 1
        if left:
            self._pins[number] = left
        else:
            del self._pins[number]

    def protect(self, number: int | None) -> None:
        """``number`` is what a probation returns to; None when none is under way."""
        self._protected = number

    def retire(self, number: int) -> None:
        """Nothing new is launched; free it when it is due."""
        self._retired[number] = None

    def due(self) -> list[int]:
        """Retired generations that may be freed now, in the order in which they retired."""
        busy = set(self._launched.values())
        return [
            number
            for number in tuple(self._retired)
            if number not in busy and number not in self._pins and number != self._protected
        ]

    def freed(self, number: int) -> None:
        """Its memory is gone; the number may come back as another build.

        It must be due: what frees a generation in use is a defect.
        """
        assert number in self.due(), f"generation {number} is not due"
        del self._retired[number]
