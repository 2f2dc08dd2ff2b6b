from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.build import read_manifest
from patchctl.bundle.apply import apply
from patchctl.bundle.compose import compose
from patchctl.bundle.read import PatchFile
from patchctl.bundle.testing import META, NOTHING_DECLARED, safetensors_bytes, write_build
from patchctl.store import BuildStore

# Few names and contents, so that two drawn builds often share some.
CONTENTS = st.one_of(st.sampled_from([b"", b"a", b"b" * 511, b"c" * 512, b"d" * 513]), st.binary(max_size=3000))
TENSORS = st.dictionaries(
    st.sampled_from(["w", "b", "x.y", "*"]), st.sampled_from([b"", b"1" * 2000, b"2" * 2000, b"3" * 1000]), max_size=4
).map(safetensors_bytes)
FILES = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("a.txt", "b/c.bin", "b/d/e", "request_path.py", "é .json"), CONTENTS),
        **{name: st.one_of(TENSORS, CONTENTS) for name in ("m.safetensors", "s/n.safetensors")},
    },
)


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@settings(max_examples=60, deadline=None)
@given(old=FILES, new=FILES)
def test_apply_of_compose_is_the_target(old: dict[str, bytes], new: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_build(root / "a", old)
        write_build(root / "b", new)
        store = BuildStore(root / "store")
        store.import_build(root / "a")
        info = compose(root / "a", root / "b", root / "p", META, NOTHING_DECLARED)
        with PatchFile.open(root / "p") as patch:
            made = apply(patch, store.path(patch.config.base_digest), store)
        assert _contents(made) == _contents(root / "b")
        assert _contents(store.path(read_manifest(root / "a").digest)) == _contents(root / "a")
        assert (
            compose(root / "a", root / "b", root / "q", META, NOTHING_DECLARED).manifest_digest == info.manifest_digest
        )
        assert (root / "p").read_bytes() == (root / "q").read_bytes()
