"""Data on stdout: a table for people, JSON for programs."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any


class Output(enum.StrEnum):
    """Value of ``-o``."""

    TABLE = "table"
    JSON = "json"


def print_json(data: Any) -> None:
    """One JSON document, stable key order."""
    json.dump(data, sys.stdout, indent=2, sort_keys=True)
    sys.stdout.write("\n")


def print_pairs(pairs: Iterable[tuple[str, object]]) -> None:
    """Aligned ``name  value`` lines."""
    rows = [(name, str(value)) for name, value in pairs]
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def flat_pairs(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested data as ``name  value`` lines for people: ``a.b`` for inner names, times in UTC, lists in one line."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from flat_pairs(value, f"{prefix}{name}.")
        elif isinstance(value, (list, tuple)):
            yield prefix + name, ", ".join(_one_line(item) for item in value) or "none"
        elif name.endswith("_unix"):
            yield (
                prefix + name.removesuffix("_unix"),
                datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            )
        elif name.endswith("_bytes"):
            yield prefix + name.removesuffix("_bytes"), human_bytes(value)
        else:
            yield prefix + name, "-" if value in (None, "") else str(value)


def _one_line(item: Any) -> str:
    return " ".join(value for _, value in flat_pairs(item)) if isinstance(item, Mapping) else str(item)


def print_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A plain aligned table; numbers are right-aligned by their caller's formatting."""
    table = [list(head), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def short_digest(digest: str) -> str:
    """``sha256:`` and the first 12 hex digits: enough to tell builds apart on a screen."""
    return digest[:19] if digest.startswith("sha256:") else digest


def human_bytes(count: float) -> str:
    """Binary units with one decimal, e.g. ``513.1 MiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":  # noqa: PLR2004 - the base of binary units
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
