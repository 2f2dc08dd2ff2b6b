"""What a run prints: rows with a value, its unit and, where there is one, the target it was to meet."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ``met`` is None without a target."""

    name: str
    value: float | int | str
    unit: str = ""
    target: str = ""
    met: bool | None = None


@dataclass(slots=True)
class Section:
    """One check: its rows, how long it took, and what ended it if it did not finish."""

    name: str
    rows: list[Row] = field(default_factory=list)
    took_s: float = 0.0
    error: str = ""

    @property
    def passed(self) -> bool:
        """Finished, and no target missed."""
        return not self.error and all(row.met is not False for row in self.rows)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of all values do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def spread(name: str, values: Sequence[float], unit: str) -> list[Row]:
    """Median, 99th percentile and number of ``values``."""
    return [
        Row(f"{name}, median", round(quantile(values, 0.5), 3), unit),
        Row(f"{name}, p99 of {len(values)}", round(quantile(values, 0.99), 3), unit),
    ]


def machine(device: torch.device) -> dict[str, str]:
    """What the figures were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "python": platform.python_version(),
    }


def markdown(facts: dict[str, str], sections: Sequence[Section]) -> str:
    """All sections as tables."""
    lines = ["# GPU checks", "", ", ".join(f"{key} {value}" for key, value in facts.items() if value), ""]
    for section in sections:
        verdict = "passed" if section.passed else "FAILED"
        lines += [f"## {section.name}: {verdict} ({section.took_s:.1f} s)", ""]
        lines += [section.error, ""] if section.error else []
        lines += ["| figure | value | target | met |", "|---|---|---|---|"]
        for row in section.rows:
            met = "" if row.met is None else ("yes" if row.met else "**no**")
            lines.append(f"| {row.name} | {row.value} {row.unit}".rstrip() + f" | {row.target} | {met} |")
        lines.append("")
    return "\n".join(lines)


def write(folder: Path, facts: dict[str, str], sections: Sequence[Section]) -> None:
    """Leave ``results.md`` and ``results.json`` in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.md").write_text(markdown(facts, sections), encoding="utf-8")
    content = {"machine": facts, "sections": [asdict(section) | {"passed": section.passed} for section in sections]}
    (folder / "results.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
