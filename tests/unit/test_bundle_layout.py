from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from patchctl.bundle.apply import apply
from patchctl.bundle.compose import compose
from patchctl.bundle.layout import Source, member_header, parse_header, write_layout
from patchctl.bundle.manifest import encode_index
from patchctl.bundle.read import PatchFile
from patchctl.bundle.testing import META, NOTHING_DECLARED, sample_builds
from patchctl.errors import ExitCode, PatchctlError
from patchctl.store import BuildStore

Edit = tuple[bytes, bytes]


class Target:
    """A host that would apply whatever it accepts."""

    def __init__(self, root: Path) -> None:
        self.base, target = sample_builds(root)
        self.raw = compose(self.base, target, root / "p.patch", META, NOTHING_DECLARED).path.read_bytes()
        self.store = BuildStore(root / "store")
        self.fd = os.memfd_create("patch")

    def load(self, raw: bytes) -> None:
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, raw, 0)

    def error(self) -> PatchctlError:
        """What opening the loaded file raises: nothing after that step may be needed to find a fault."""
        with pytest.raises(PatchctlError) as caught:
            PatchFile.open(self.fd).close()
        return caught.value

    def refuses(self, raw: bytes, why: str = "") -> bool:
        self.load(raw)
        return self.refuses_loaded(why)

    def refuses_loaded(self, why: str = "") -> bool:
        error = self.error()
        return (error.code, error.exit_code) == ("patch.damaged", ExitCode.SIGNATURE) and why in error.why

    def apply_error(self, raw: bytes) -> PatchctlError:
        """For a file that is sound in itself: what applying it to the base raises; the store must stay empty."""
        self.load(raw)
        with PatchFile.open(self.fd) as patch, pytest.raises(PatchctlError) as caught:
            apply(patch, self.base, self.store)
        assert caught.value.exit_code is ExitCode.SIGNATURE
        assert list(self.store.builds.iterdir()) == []
        return caught.value


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    built = Target(tmp_path_factory.mktemp("layout"))
    yield built
    os.close(built.fd)


@pytest.mark.parametrize("pattern", [0x01, 0x20, 0x80, 0xFF])
def test_any_flipped_byte_is_refused(target: Target, pattern: int) -> None:
    target.load(target.raw)
    for at, byte in enumerate(target.raw):
        os.pwrite(target.fd, bytes([byte ^ pattern]), at)
        assert target.refuses_loaded(), f"byte {at} of {len(target.raw)}"
        os.pwrite(target.fd, bytes([byte]), at)
    with PatchFile.open(target.fd) as patch:
        assert patch.size_bytes == len(target.raw)


def test_truncation_and_trailing_bytes_are_refused(target: Target) -> None:
    for end in {*range(0, len(target.raw), 512), *range(len(target.raw) - 512, len(target.raw), 7), 1, 511}:
        assert target.refuses(target.raw[:end]), f"cut at {end}"
    for tail in (b"\0", bytes(512), bytes(8192), b"x", target.raw):
        assert target.refuses(target.raw + tail)


def test_every_block_swapped_duplicated_or_dropped_is_refused(target: Target) -> None:
    blocks = [target.raw[at : at + 512] for at in range(0, len(target.raw), 512)]
    for at in range(len(blocks)):
        assert target.refuses(b"".join(blocks[:at] + blocks[at + 1 :]))
        assert target.refuses(b"".join([*blocks[:at], blocks[at], *blocks[at:]]))
        if at and blocks[at] != blocks[at - 1]:
            assert target.refuses(b"".join([*blocks[: at - 1], blocks[at], blocks[at - 1], *blocks[at + 1 :]]))


def raw_member(name: bytes, content: bytes, kind: bytes = b"0", link: bytes = b"", size: bytes | None = None) -> bytes:
    """Any ustar member with a valid checksum."""
    size = b"%011o\0" % len(content) if size is None else size
    head = name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + size + b"0" * 11 + b"\0"
    tail = kind + link.ljust(100, b"\0") + b"ustar\x0000" + bytes(64) + b"0000000\0" * 2 + bytes(167)
    checksum = sum(head) + 256 + sum(tail)
    return head + b"%06o\0 " % checksum + tail + content + bytes(-len(content) % 512)


def split(raw: bytes) -> list[bytes]:
    """The members of a sound file, header and padding included."""
    members, at = [], 0
    while raw[at] != 0:
        _, size = parse_header(raw[at : at + 512])
        end = at + 512 + size + -size % 512
        members.append(raw[at:end])
        at = end
    return members


EVIL = b"#!/bin/sh\n"
HEX = hashlib.sha256(EVIL).hexdigest().encode()
EXTRA = {
    "blob nobody names": raw_member(b"blobs/sha256/" + HEX, EVIL),
    "parent": raw_member(b"../../etc/cron.d/evil", EVIL),
    "parent below blobs": raw_member(b"blobs/sha256/../../../evil", EVIL),
    "absolute": raw_member(b"/etc/cron.d/evil", EVIL),
    "plain extra file": raw_member(b"readme.txt", EVIL),
    "upper-case blob": raw_member(b"blobs/sha256/" + HEX.upper(), EVIL),
    "upper-case folder": raw_member(b"BLOBS/sha256/" + HEX, EVIL),
    "hard link": raw_member(b"blobs/sha256/" + HEX, b"", b"1", b"/etc/passwd"),
    "symbolic link": raw_member(b"blobs/sha256/" + HEX, b"", b"2", b"/etc/passwd"),
    "character device": raw_member(b"blobs/sha256/" + HEX, b"", b"3"),
    "block device": raw_member(b"blobs/sha256/" + HEX, b"", b"4"),
    "folder": raw_member(b"blobs/sha256", b"", b"5"),
    "fifo": raw_member(b"blobs/sha256/" + HEX, b"", b"6"),
    "contiguous": raw_member(b"blobs/sha256/" + HEX, EVIL, b"7"),
    "old regular": raw_member(b"blobs/sha256/" + HEX, EVIL, b"\0"),
    "gnu sparse": raw_member(b"blobs/sha256/" + HEX, EVIL, b"S"),
    "gnu long name": raw_member(b"././@LongLink", b"../" * 50, b"L"),
    "gnu long link": raw_member(b"././@LongLink", b"../" * 50, b"K"),
    "pax header": raw_member(b"PaxHeader", b"22 path=../../../evil\n", b"x"),
    "pax global header": raw_member(b"PaxHeader", b"22 path=../../../evil\n", b"g"),
    "name with NUL": raw_member(b"blobs/sha256/\0" + HEX, EVIL),
    "not ascii": raw_member(b"blobs/sha256/\xff" + HEX[1:], EVIL),
    "size without end": raw_member(b"blobs/sha256/" + HEX, b"", size=b"7" * 11 + b"\0"),
    "size of 2^88": raw_member(b"blobs/sha256/" + HEX, b"", size=b"\x80" + b"\xff" * 11),
    "small size in base-256": raw_member(b"blobs/sha256/" + HEX, b"", size=b"\x80" + bytes(11)),
    "negative base-256": raw_member(b"blobs/sha256/" + HEX, b"", size=b"\xff" * 12),
    "negative octal": raw_member(b"blobs/sha256/" + HEX, b"", size=b"-0000000001\0"),
    "size with spaces": raw_member(b"blobs/sha256/" + HEX, b"", size=b"         12\0"),
    "size with underscore": raw_member(b"blobs/sha256/" + HEX, b"", size=b"0000000_012\0"),
    "wrong digest": raw_member(b"blobs/sha256/" + b"0" * 64, EVIL),
}


@pytest.mark.parametrize("name", EXTRA)
def test_hostile_members_are_refused_wherever_they_stand(target: Target, name: str) -> None:
    members = split(target.raw)
    assert not target.raw.removeprefix(b"".join(members)).strip(b"\0")
    for at in range(len(members) + 1):
        hostile = [*members[:at], EXTRA[name], *members[at:]]
        assert target.refuses(b"".join(hostile) + bytes(1024)), f"at {at}"


def test_missing_repeated_and_reordered_members_are_refused(target: Target) -> None:
    members = split(target.raw)
    for at in range(len(members)):
        assert target.refuses(b"".join(members[:at] + members[at + 1 :]) + bytes(1024))
        assert target.refuses(b"".join([*members[:at], members[at], *members[at:]]) + bytes(1024))
    for at in range(len(members) - 1):
        assert target.refuses(b"".join([*members[:at], *reversed(members[at:])]) + bytes(1024))


def test_many_empty_members_are_refused(target: Target) -> None:
    assert target.refuses(b"".join([raw_member(b"x", b"")] * 5000) + bytes(1024))


def rebuilt(raw: bytes, *, config: Edit = (b"", b""), manifest: Edit = (b"", b"")) -> bytes:
    """The file with config or manifest edited and every digest above recomputed: a forger without a key."""
    files = {parse_header(m[:512])[0]: m[512 : 512 + parse_header(m[:512])[1]] for m in split(raw)}
    blobs = {name.rpartition("/")[2]: content for name, content in files.items() if name.startswith("blobs/")}
    new_manifest = blobs.pop(json.loads(files["index.json"])["manifests"][0]["digest"].removeprefix("sha256:"))
    old_name = json.loads(new_manifest)["config"]["digest"].removeprefix("sha256:")
    old_config = blobs.pop(old_name)
    new_config = old_config.replace(*config)
    new_name = hashlib.sha256(new_config).hexdigest()
    for edit in (
        (old_name.encode(), new_name.encode()),
        (b'"size":%d' % len(old_config), b'"size":%d' % len(new_config)),
        manifest,
    ):
        new_manifest = new_manifest.replace(*edit)
    assert (new_config != old_config) == (config != (b"", b""))
    blobs |= {new_name: new_config, hashlib.sha256(new_manifest).hexdigest(): new_manifest}
    out = io.BytesIO()
    sources = {name: Source(len(content), partial(tuple[bytes], (content,))) for name, content in blobs.items()}
    write_layout(out, encode_index(new_manifest), sources)
    return out.getvalue()


def test_rebuilding_without_an_edit_gives_the_same_file(target: Target) -> None:
    assert rebuilt(target.raw) == target.raw


@pytest.mark.parametrize(
    "edit",
    [
        (b'"path":"new/notes.txt"', b'"path":"../notes.txt"'),
        (b'"pack_offset":0', b'"pack_offset":1'),
        (b'"author":"dev"', b'"author":"dev","author":"dev"'),
    ],
)
def test_configs_that_break_a_rule_are_refused(target: Target, edit: Edit) -> None:
    assert target.refuses(rebuilt(target.raw, config=edit))


@pytest.mark.parametrize(
    "edit",
    [
        (b'"schemaVersion":2', b'"schemaVersion":2,"subject":{}'),
        (b"patch.v1+json", b"other.v1+json"),
        (b"patch.file.v1", b"patch.file.v2"),
        (b"{", b" {"),
    ],
)
def test_manifests_that_do_not_follow_from_the_config_are_refused(target: Target, edit: Edit) -> None:
    assert target.refuses(rebuilt(target.raw, manifest=edit), "manifest")


def test_configs_that_contradict_the_base_are_refused(target: Target) -> None:
    forged = rebuilt(target.raw, config=(b'"removed":["old/gone.txt"]', b'"removed":[]'))
    assert "removed" in target.apply_error(forged).why
    forged = rebuilt(target.raw, config=(b'"old_sha256":null', b'"old_sha256":"%064d"' % 0))
    assert "old file" in target.apply_error(forged).why
    forged = rebuilt(target.raw, config=(b'"layers.2.weight"', b'"layers.9.weight"'))
    assert "no tensor layers.9.weight" in target.apply_error(forged).why
    forged = rebuilt(target.raw, config=(b'"shape":[600]', b'"shape":[30,20]'))
    assert "dtype and shape" in target.apply_error(forged).why


def test_naming_another_tensor_than_the_changed_one_is_refused(target: Target) -> None:
    forged = rebuilt(target.raw, config=(b'"layers.2.weight"', b'"layers.3.weight"'))
    assert target.apply_error(forged).code == "store.build_damaged"


def test_sizes_are_checked_before_content_is_read(target: Target) -> None:
    layout, index, *rest = split(target.raw)
    giant = raw_member(b"blobs/sha256/" + b"0" * 64, b"", size=b"7" * 11 + b"\0")
    assert target.refuses(b"".join([layout, index, giant, *rest]) + bytes(1024), "more than the file has")
    large = raw_member(b"index.json", b"{" + b" " * 5000)
    assert target.refuses(b"".join([layout, large, *rest]) + bytes(1024), "too large")


def test_later_schema_is_incompatible_not_damaged(target: Target) -> None:
    raw = rebuilt(target.raw, config=(b'"schema_version":1,"sequence"', b'"schema_version":2,"sequence"'))
    target.load(raw)
    error = target.error()
    assert (error.code, error.exit_code) == ("patch.unsupported", ExitCode.INCOMPATIBLE)


def test_standard_tools_read_the_file(target: Target) -> None:
    with tarfile.open(fileobj=io.BytesIO(target.raw)) as tar:
        names = tar.getnames()
        assert names[:2] == ["oci-layout", "index.json"]
        assert names[2:] == sorted(names[2:])
        for member in tar.getmembers():
            assert (member.mode, member.uid, member.gid, member.mtime, member.isreg()) == (0o644, 0, 0, 0, True)
            stream = tar.extractfile(member)
            assert stream is not None
            if member.name.startswith("blobs/"):
                assert hashlib.sha256(stream.read()).hexdigest() == member.name.rpartition("/")[2]
        index = json.load(tar.extractfile("index.json") or io.BytesIO())
    assert index["manifests"][0]["artifactType"] == "application/vnd.patchctl.patch.v1+json"


@pytest.mark.parametrize("size", [0, 1, 8**11 - 1, 8**11, 10**15])
def test_headers_of_any_size_are_read_by_tarfile(size: int) -> None:
    info = tarfile.TarInfo.frombuf(member_header("blobs/sha256/" + "0" * 64, size), "ascii", "strict")
    assert info.size == size
    assert parse_header(member_header("index.json", size)) == ("index.json", size)


def test_what_is_no_file_is_refused(target: Target, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, code in (
        (tmp_path / "fifo", "patch.damaged"),
        (tmp_path, "patch.damaged"),
        (tmp_path / "no", "patch.not_found"),
    ):
        with pytest.raises(PatchctlError) as caught:
            PatchFile.open(path)
        assert caught.value.code == code


def test_refusals_leak_no_descriptor(target: Target) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        assert target.refuses(target.raw[:-1])
    assert len(list(Path("/proc/self/fd").iterdir())) == before
