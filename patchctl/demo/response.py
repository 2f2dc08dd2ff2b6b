"""What a client wrote down about one streamed response. Pure."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field


@dataclass(slots=True)
class Response:
    """One streamed response.

    Attributes:
        arrivals_ns: wall-clock time (``time.time_ns``) of each token.
        generations: generation it began and ended on, as the server reports.
    """

    stream: int
    arrivals_ns: list[int] = field(default_factory=list)
    generations: tuple[int, int] | None = None
    failure: str = ""

    @property
    def gaps(self) -> list[tuple[int, float]]:
        """(time of the later token in ns, gap before it in ms)."""
        return [(later, (later - earlier) / 1e6) for earlier, later in itertools.pairwise(self.arrivals_ns)]
