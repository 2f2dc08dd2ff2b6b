"""What may be restored, and what is refused with which reason, before the engine is asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from snapshots.model import GenerationState, HostSnapshot, ProcessSnapshot, TensorState
from snapshots.restore import LiveEngine, LiveTensor, RestoreRefusedError, plan_restore
from snapshots.store.manifest import Blob, Manifest, TensorContent

_A, _B, _BAD = (TensorState(digit * 32, "float32", (2, 3)) for digit in "abc")
_ALIAS = replace(_A, alias="embed")
_TENSORS = {"embed": _A, "head": _ALIAS, "layers.0.up": _B, "unstored": _B}
_CHUNK = "f" * 64


def _manifest() -> Manifest:
    process = ProcessSnapshot("engine", 50, 1234, 0, 0, 0)
    snapshot = HostSnapshot(0, 3, (GenerationState(3, "sha256:x", _TENSORS),), {"engine": process})
    contents = tuple(
        TensorContent(3, name, address, _TENSORS[name].digest, Blob(24, (_CHUNK,)))
        for name, address in (("embed", 0x1000), ("layers.0.up", 0x2000))
    )
    return Manifest("id", "", "", snapshot, Blob(0, ()), contents)


def _live(**tensors: LiveTensor) -> LiveEngine:
    present = {
        "embed": LiveTensor(_A, 0x1000, 24),
        "layers.0.up": LiveTensor(_BAD, 0x2000, 24),
        "unstored": LiveTensor(_B, 1, 24),
    }
    return LiveEngine(50, 1234, 3, "sha256:x", {**present, **{k.replace("__", "."): v for k, v in tensors.items()}})


_COMMITTED = {name: state.digest for name, state in _TENSORS.items()}


def test_only_what_differs_is_planned() -> None:
    plan = plan_restore(_manifest(), ["embed", "layers.*"], _live(), _COMMITTED)
    assert [one.name for one in plan.tensors] == ["layers.0.up"]
    assert (plan.tensors[0].address, plan.tensors[0].state) == (0x2000, _B)
    assert plan.unchanged == ("embed",)


def test_an_alias_stands_for_the_tensor_it_shares_and_no_tensor_is_planned_twice() -> None:
    plan = plan_restore(_manifest(), ["head", "embed"], _live(embed=LiveTensor(_BAD, 0x1000, 24)), None)
    assert [one.name for one in plan.tensors] == ["embed"]


@pytest.mark.parametrize(
    "name", ["[heap]", "heap", "[stack]", "STACK", "globals", "7f00a000-7f00b000", "/usr/lib/libc.so.6", "[anon:x]"]
)
def test_everything_but_tensors_is_evidence_only(name: str) -> None:
    with pytest.raises(RestoreRefusedError, match="kills the process") as caught:
        plan_restore(_manifest(), ["embed", name], _live(), _COMMITTED)
    assert caught.value.code == "restore.evidence_only"


@pytest.mark.parametrize(
    ("code", "live", "names"),
    [
        ("restore.other_process", replace(_live(), pid=51), ["embed"]),
        ("restore.other_process", replace(_live(), start_ticks=1235), ["embed"]),
        ("restore.other_build", replace(_live(), build_digest="sha256:y"), ["embed"]),
        ("restore.other_build", replace(_live(), generation=4), ["embed"]),
        ("restore.no_such_tensor", _live(), ["embed", "nothing.*"]),
        ("restore.not_stored", _live(), ["unstored"]),
        ("restore.mismatch", _live(embed=LiveTensor(replace(_A, shape=(3, 2)), 0x1000, 24)), ["embed"]),
        ("restore.mismatch", _live(embed=LiveTensor(replace(_A, dtype="bfloat16"), 0x1000, 24)), ["embed"]),
        ("restore.on_device", _live(embed=LiveTensor(_A, None, 24)), ["embed"]),
        ("restore.moved", _live(embed=LiveTensor(_A, 0x1040, 24)), ["embed"]),
        ("restore.moved", _live(layers__0__up=LiveTensor(_BAD, 0x1040, 24)), ["*.up", "embed"]),
    ],
)
def test_refusals_name_their_reason(code: str, live: LiveEngine, names: list[str]) -> None:
    with pytest.raises(RestoreRefusedError) as caught:
        plan_restore(_manifest(), names, live, _COMMITTED)
    assert caught.value.code == code
    assert caught.value.why
    assert caught.value.action


def test_a_snapshot_of_a_corruption_is_not_restored() -> None:
    with pytest.raises(RestoreRefusedError) as caught:
        plan_restore(_manifest(), ["layers.0.up"], _live(), {**_COMMITTED, "layers.0.up": "d" * 32})
    assert caught.value.code == "restore.not_as_committed"


def test_a_snapshot_without_an_engine_restores_nothing() -> None:
    manifest = _manifest()
    alone = Manifest("id", "", "", replace(manifest.snapshot, processes={}), manifest.pages, manifest.contents)
    with pytest.raises(RestoreRefusedError, match="no engine process"):
        plan_restore(alone, ["embed"], _live(), None)
