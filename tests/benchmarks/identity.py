"""Whether greedy texts that crossed a same-weights swap equal those that crossed none. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.spans import Span
from tests.benchmarks.streams import Ask, Response


@dataclass(frozen=True, slots=True)
class Identity:
    """How many texts crossed a swap, how many of these equal an unswapped one.

    Attributes:
        ambiguous: asks whose unswapped texts already differ among themselves.
        complete: every text that crossed a swap has an unswapped one to be compared with.
    """

    compared: int
    equal: int
    ambiguous: int
    complete: bool


def compare(responses: Sequence[Response], same: Sequence[Span], changed: Sequence[Span]) -> Identity:
    """Compare finished responses.

    Args:
        responses: of one run.
        same: when another build with the same weights may have made tokens.
        changed: when one with other weights may have; what it touched is left out.
    """
    reference: dict[Ask, set[str]] = {}
    crossed: list[Response] = []
    for response in responses:
        if not response.finish or any(response.span.meets(span) for span in changed):
            continue
        if any(response.span.meets(span) for span in same):
            crossed.append(response)
        else:
            reference.setdefault(response.ask, set()).add(response.text)
    equal = sum(response.text in reference.get(response.ask, ()) for response in crossed)
    return Identity(
        compared=len(crossed),
        equal=equal,
        ambiguous=sum(len(texts) > 1 for texts in reference.values()),
        complete=all(response.ask in reference for response in crossed),
    )
