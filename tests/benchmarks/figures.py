"""What every section reports: a value beside a limit taken in the same run, and the ratio the issue asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from patchctl.render.output import print_table

_HEAD = ("FIGURE", "VALUE", "AGAINST", "LIMIT", "RATIO", "TARGET", "MET")


@dataclass(frozen=True, slots=True)
class Figure:
    """One line. Targets bound the ratio ``value / limit``; without one the line only informs.

    Attributes:
        against: what ``limit`` is, in words.
        at_most: the ratio may not exceed it.
        at_least: the ratio may not fall below it.
    """

    name: str
    value: float
    unit: str
    against: str
    limit: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def ratio(self) -> float:
        """``value / limit``; nan when nothing was measured."""
        return self.value / self.limit if self.limit else math.nan

    @property
    def met(self) -> bool | None:
        """Whether the target was met; None without a target. What was not measured met nothing."""
        if self.at_most is not None:
            return self.ratio <= self.at_most
        return None if self.at_least is None else self.ratio >= self.at_least

    @property
    def target(self) -> str:
        """The target in words."""
        if self.at_most is not None:
            return f"<= {self.at_most:g}"
        return "" if self.at_least is None else f">= {self.at_least:g}"

    def as_dict(self) -> dict[str, Any]:
        """For ``bench.json``; JSON has no nan, so what was not measured is null."""
        numbers = {"value": self.value, "limit": self.limit, "ratio": self.ratio}
        known = {name: number if math.isfinite(number) else None for name, number in numbers.items()}
        return {**asdict(self), **known, "met": self.met}


@dataclass(frozen=True, slots=True)
class Report:
    """What a section hands back. ``skipped`` says why nothing was measured."""

    figures: Sequence[Figure] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    skipped: str = ""


def print_figures(figures: Sequence[Figure]) -> None:
    """The table of one section."""
    words = {True: "yes", False: "NO", None: ""}
    print_table(
        _HEAD,
        [
            (
                figure.name,
                f"{figure.value:.4g} {figure.unit}".rstrip(),
                figure.against,
                f"{figure.limit:.4g}",
                f"{figure.ratio:.3f}",
                figure.target,
                words[figure.met],
            )
            for figure in figures
        ],
    )
