"""Stop strings across token borders.

The first stop string to be *complete* ends the text (of two that end together, the longer one), just
before it begins. That rule depends on the text alone, never on how it was cut into tokens.
"""

from __future__ import annotations


class StopMatcher:
    """Passes text through, holding back what might be the beginning of a stop string."""

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops)
        self._stops = stops
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Returns the text now certain to belong to the answer, and whether a stop string was found."""
        text = self._held + text
        matches = [(text.find(stop) + len(stop), -len(stop)) for stop in self._stops if stop in text]
        if matches:
            end, length = min(matches)
            self._held = ""
            return text[: end + length], True
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut], False

    def finish(self) -> str:
        """The text held back, when no stop string can follow any more."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with, but is not."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
