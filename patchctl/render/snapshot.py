"""Snapshots as compact tables: the largest first, the rest counted."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import typer

from patchctl.render.output import human_bytes, print_pairs, print_table, short_digest

_ROWS_MAX = 15


def print_taken(data: dict[str, Any]) -> None:
    """A new snapshot, and its largest regions."""
    print_description(data)
    for identifier in data["evicted"]:
        typer.echo(f"removed {identifier}: over the store's limits", err=True)


def print_list(entries: Sequence[dict[str, Any]]) -> None:
    """One line each."""
    print_table(
        ["SNAPSHOT", "TAKEN (UTC)", "LABEL", "OF", "ANONYMOUS", "TENSORS", "TRANSACTION"],
        [_entry(entry) for entry in entries],
    )


def _entry(entry: dict[str, Any]) -> tuple[str, ...]:
    if entry["damaged"]:
        return (entry["id"], "-", f"damaged: {entry['damaged']}", "-", "-", "-", "-")
    taken = datetime.fromtimestamp(entry["taken_unix_ns"] / 1e9, UTC)
    return (
        entry["id"],
        f"{taken:%Y-%m-%d %H:%M:%S}",
        entry["label"] or "-",
        _of(entry),
        human_bytes(sum(entry["anonymous_bytes"].values())),
        human_bytes(entry["content_bytes"]),
        entry["transaction"] or "-",
    )


def _of(entry: dict[str, Any]) -> str:
    if entry["build_digest"]:
        return f"generation {entry['generation']}, {short_digest(entry['build_digest'])}"
    return ", ".join(f"{role} {pid}" for role, pid in entry["pids"].items())


def print_description(data: dict[str, Any]) -> None:
    """What was captured, and the regions with the most memory of their own."""
    pairs: list[tuple[str, object]] = [("snapshot", data["id"]), ("of", _of(data))]
    for role, process in data["processes"].items():
        size = f"{human_bytes(process['anonymous_bytes'])} anonymous, {human_bytes(process['rss_bytes'])} resident"
        pairs.append((role, f"pid {process['pid']}, {size}"))
    for state in data["generations"]:
        if state["tensors"]:
            kept = sum(tensor["restorable"] for tensor in state["tensors"].values())
            pairs.append((f"generation {state['generation']}", f"{len(state['tensors'])} tensors, {kept} restorable"))
    if "new_bytes" in data:
        pairs.append(("stored", f"{human_bytes(data['new_bytes'])} new"))
    print_pairs(pairs)
    gaps = [(role, gap) for role, process in data["processes"].items() for gap in process["gaps"]]
    for role, gap in gaps:
        print(f"{'blind' if gap['blind'] else 'note'}: {role} {gap['subject']}: {gap['reason']}")
    print()
    regions = [(role, region) for role, process in data["processes"].items() for region in process["regions"]]
    regions.sort(key=lambda entry: -entry[1]["anonymous_bytes"])
    print_table(
        ["PROCESS", "ANONYMOUS", "RSS", "METHOD", "CONFIDENCE", "REGION"],
        [
            (
                role,
                human_bytes(region["anonymous_bytes"]),
                human_bytes(region["rss_bytes"]),
                region["method"],
                region["confidence"],
                region["label"],
            )
            for role, region in regions[:_ROWS_MAX]
        ],
    )
    _left_out(len(regions), "smaller regions")


def print_difference(data: dict[str, Any]) -> None:
    """The worst findings, then the regions, largest growth first."""
    print_pairs(
        [
            ("before", data["before"]),
            ("after", data["after"]),
            ("effect", data["effect"]),
            *((role, _growth(process)) for role, process in data["processes"].items()),
        ]
    )
    print()
    findings = [finding for finding in data["findings"] if finding["effect"] != "unchanged"] or data["findings"]
    print_table(
        ["EFFECT", "SUBJECT", "WHAT"],
        [(finding["effect"], finding["subject"], finding["what"]) for finding in findings[:_ROWS_MAX]],
    )
    _left_out(len(findings), "findings")
    if data["regions"]:
        print()
        print_table(
            ["GROWTH", "CHANGED", "CONFIDENCE", "PROCESS", "REGION"],
            [
                (
                    _signed(row["growth_bytes"]),
                    human_bytes(row["changed_bytes"]),
                    row["confidence"],
                    row["process"],
                    row["region"],
                )
                for row in data["regions"][:_ROWS_MAX]
            ],
        )
        _left_out(len(data["regions"]), "regions with less growth")


def print_restored(data: dict[str, Any]) -> None:
    """What was written."""
    print_pairs(
        [
            ("generation", data["generation"]),
            ("restored", ", ".join(data["restored"]) or "nothing: all named tensors hold the stored bytes"),
            ("unchanged", data["unchanged"]),
            ("KV recomputed", ", ".join(f"generation {number}" for number in data["kv_dropped"]) or "none"),
        ]
    )


def _growth(process: dict[str, Any]) -> str:
    if process["replaced"]:
        return "another process now"
    return (
        f"{_signed(process['anonymous_growth_bytes'])} anonymous, {_signed(process['rss_growth_bytes'])} resident "
        f"(pid {process['pid']})"
    )


def _signed(size_bytes: int) -> str:
    return ("+" if size_bytes > 0 else "") + human_bytes(size_bytes)


def _left_out(count: int, what: str) -> None:
    if count > _ROWS_MAX:
        typer.echo(f"{count - _ROWS_MAX} {what} left out; -o json shows all", err=True)
