"""Golden output of the snapshot tables."""

from __future__ import annotations

from typing import Any

import pytest

from patchctl.render import snapshot

_ENTRY: dict[str, Any] = {
    "id": "20260301T101502.123Z-5f3a",
    "taken_unix_ns": 1772360102_123000000,
    "label": "before",
    "transaction": "t-7",
    "generation": 3,
    "build_digest": "sha256:0123456789abcdef",
    "pids": {"front": 70, "engine": 71},
    "anonymous_bytes": {"front": 10 << 20, "engine": 300 << 20},
    "content_bytes": 514 << 20,
    "damaged": "",
}
_DAMAGED = {"id": "20260302T000000.000Z-0000", "damaged": "its manifest does not parse"}


def region(label: str, anonymous_bytes: int, confidence: str = "exact") -> dict[str, Any]:
    return {
        "label": label,
        "rss_bytes": anonymous_bytes,
        "anonymous_bytes": anonymous_bytes,
        "method": "page_hash",
        "confidence": confidence,
        "reason": "",
    }


_SHOWN: dict[str, Any] = {
    **_ENTRY,
    "processes": {
        "front": {
            "pid": 70,
            "anonymous_bytes": 10 << 20,
            "rss_bytes": 30 << 20,
            "gaps": [{"subject": "io_uring:12", "reason": "writes are not seen", "blind": True}],
            "regions": [region("[heap] 1000-2000 rw-p", 4 << 20)],
        },
        "engine": {
            "pid": 71,
            "anonymous_bytes": 300 << 20,
            "rss_bytes": 900 << 20,
            "gaps": [],
            "regions": [region("[anon] 9000-a000 rw-p", 64 << 20), region("/dev/x b000-c000 rw-s", 0, "blind")],
        },
    },
    "generations": [{"generation": 3, "tensors": {"a": {"restorable": True}, "b": {"restorable": False}}}],
    "new_bytes": 2048,
    "evicted": [],
}
_DIFFERENCE: dict[str, Any] = {
    "before": "20260301T101502.123Z-5f3a",
    "after": "now",
    "effect": "corruption",
    "processes": {
        "engine": {"pid": 71, "replaced": False, "anonymous_growth_bytes": 4096, "rss_growth_bytes": -8192},
        "front": {"pid": 80, "replaced": True, "anonymous_growth_bytes": 0, "rss_growth_bytes": 0},
    },
    "findings": [
        {"effect": "corruption", "subject": "tensor w of generation 3", "what": "changed while resident"},
        {"effect": "unchanged", "subject": "generation 4", "what": "all 2 tensors are as they were"},
    ],
    "regions": [
        {
            "region": "[heap]",
            "growth_bytes": 8192,
            "changed_bytes": 4096,
            "unseen_bytes": 0,
            "confidence": "exact",
            "process": "engine",
        },
        {
            "region": "[anon]",
            "growth_bytes": -4096,
            "changed_bytes": 0,
            "unseen_bytes": 0,
            "confidence": "conservative",
            "process": "engine",
        },
    ],
}

_LIST_TEXT = """\
SNAPSHOT                   TAKEN (UTC)          LABEL                                 OF                                 ANONYMOUS  TENSORS    TRANSACTION
20260301T101502.123Z-5f3a  2026-03-01 10:15:02  before                                generation 3, sha256:0123456789ab  310.0 MiB  514.0 MiB  t-7
20260302T000000.000Z-0000  -                    damaged: its manifest does not parse  -                                  -          -          -
"""  # noqa: E501 - as it is printed
_SHOW_TEXT = """\
snapshot      20260301T101502.123Z-5f3a
of            generation 3, sha256:0123456789ab
front         pid 70, 10.0 MiB anonymous, 30.0 MiB resident
engine        pid 71, 300.0 MiB anonymous, 900.0 MiB resident
generation 3  2 tensors, 1 restorable
stored        2.0 KiB new
blind: front io_uring:12: writes are not seen

PROCESS  ANONYMOUS  RSS       METHOD     CONFIDENCE  REGION
engine   64.0 MiB   64.0 MiB  page_hash  exact       [anon] 9000-a000 rw-p
front    4.0 MiB    4.0 MiB   page_hash  exact       [heap] 1000-2000 rw-p
engine   0 B        0 B       page_hash  blind       /dev/x b000-c000 rw-s
"""
_DIFF_TEXT = """\
before  20260301T101502.123Z-5f3a
after   now
effect  corruption
engine  +4.0 KiB anonymous, -8.0 KiB resident (pid 71)
front   another process now

EFFECT      SUBJECT                   WHAT
corruption  tensor w of generation 3  changed while resident

GROWTH    CHANGED  CONFIDENCE    PROCESS  REGION
+8.0 KiB  4.0 KiB  exact         engine   [heap]
-4.0 KiB  0 B      conservative  engine   [anon]
"""
_RESTORED_TEXT = """\
generation     3
restored       w
unchanged      2
KV recomputed  generation 3, generation 4
"""


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    snapshot.print_list([_ENTRY, _DAMAGED])
    assert capsys.readouterr().out == _LIST_TEXT


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    snapshot.print_taken({**_SHOWN, "evicted": ["old"]})
    captured = capsys.readouterr()
    assert captured.out == _SHOW_TEXT
    assert captured.err == "removed old: over the store's limits\n"


def test_diff(capsys: pytest.CaptureFixture[str]) -> None:
    snapshot.print_difference(_DIFFERENCE)
    assert capsys.readouterr().out == _DIFF_TEXT


def test_diff_without_differences_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    snapshot.print_difference({**_DIFFERENCE, "findings": _DIFFERENCE["findings"][1:], "regions": []})
    assert "all 2 tensors are as they were" in capsys.readouterr().out


def test_what_does_not_fit_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    snapshot.print_difference({**_DIFFERENCE, "regions": _DIFFERENCE["regions"] * 10})
    assert "5 regions with less growth left out" in capsys.readouterr().err


def test_restored(capsys: pytest.CaptureFixture[str]) -> None:
    snapshot.print_restored({"generation": 3, "restored": ["w"], "unchanged": 2, "kv_dropped": [3, 4]})
    assert capsys.readouterr().out == _RESTORED_TEXT
    snapshot.print_restored({"generation": 3, "restored": [], "unchanged": 2, "kv_dropped": []})
    assert "all named tensors hold the stored bytes" in capsys.readouterr().out
