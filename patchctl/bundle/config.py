"""The config of a patch: how every file of the target build comes about, and what the author declares.

The bytes are RFC 8785 canonical JSON; :func:`patchctl.bundle.decode.decode_config` reads them back.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import rfc8785

from engine.build import BuildManifest

# A build lists a few dozen files; the limit keeps the OCI manifest under the 4 MiB registries accept.
FILES_MAX = 4096
# The largest integer every JSON reader keeps exactly (RFC 8785 follows ECMAScript numbers).
INTEGER_MAX = 2**53 - 1

# \Z, not $: $ would also match before a final newline.
Sha256Hex = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Digest = Annotated[str, msgspec.Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
Identifier = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)]
# Names and patterns of the safetensors world stay far below 512 characters.
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class Keep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="action", tag="keep"):
    """The file is the base's, unchanged."""

    path: str
    sha256: Sha256Hex
    size_bytes: Count


class Put(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="action", tag="put"):
    """The file travels whole.

    Attributes:
        layer: digest of the layer holding it; a stored file is its own layer, so it repeats ``sha256``.
        old_sha256: the base's file of that path, or None when the file is new.
    """

    path: str
    sha256: Sha256Hex
    size_bytes: Count
    layer: Digest
    old_sha256: Sha256Hex | None


class TensorChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One replaced tensor. Its place in the file comes from the base's own header, never from the patch.

    Attributes:
        dtype: as safetensors spells it, e.g. ``BF16``.
        pack_offset: first byte inside the tensor pack layer.
    """

    name: Name
    dtype: str
    shape: tuple[Count, ...]
    old_sha256: Sha256Hex
    sha256: Sha256Hex
    pack_offset: Count
    size_bytes: Count


class TensorDelta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="action", tag="tensor-delta"):
    """A safetensors file that is the base's with some tensors replaced.

    Header and size are equal to the base's, hence one ``size_bytes``.
    """

    path: str
    old_sha256: Sha256Hex
    sha256: Sha256Hex
    size_bytes: Count
    tensors: tuple[TensorChange, ...]


Action = Keep | Put | TensorDelta


class TensorPack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The layer with the bytes of all replaced tensors, in the order of the actions, without gaps."""

    digest: Digest
    size_bytes: Count


class Declared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the author says the patch changes; the gate compares it with what it does change.

    Attributes:
        files: exact paths that are added, replaced or removed; covers all tensors of a file too.
        tensors: exact names or globs (``fnmatch``, case-sensitive) of replaced tensors.
        growth_bytes_per_request_max: memory one request may retain, or None for no growth declared.
        summary: for humans.
    """

    files: Annotated[tuple[Name, ...], msgspec.Meta(max_length=FILES_MAX)]
    tensors: Annotated[tuple[Name, ...], msgspec.Meta(max_length=FILES_MAX)]
    growth_bytes_per_request_max: Count | None
    summary: Annotated[str, msgspec.Meta(max_length=4096)]


class Constraints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the patch may run. An empty ``device_kinds`` means any device."""

    device_kinds: tuple[Identifier, ...] = ()


class PatchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything a patch says about itself. Times are seconds since the Unix epoch.

    Attributes:
        sequence: position in ``channel``; the trust ledger refuses to go back.
        target_manifest: the target's ``build.json``, whose digest is ``target_digest``.
        files: one action per file of the target, sorted by path; ``build.json`` comes from ``target_manifest``.
        removed: paths of the base that the target lacks, sorted; a removal is a change to declare.
    """

    patch_id: Identifier
    channel: Identifier
    sequence: Count
    created_unix: Count
    expires_unix: Count
    author: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    engine_kind: Identifier
    constraints: Constraints
    base_digest: Digest
    target_digest: Digest
    target_manifest: BuildManifest
    files: Annotated[tuple[Action, ...], msgspec.Meta(max_length=FILES_MAX)]
    removed: Annotated[tuple[str, ...], msgspec.Meta(max_length=FILES_MAX)]
    tensor_pack: TensorPack | None
    declared: Declared
    schema_version: Literal[1] = 1

    def encode(self) -> bytes:
        """Canonical bytes (RFC 8785)."""
        return rfc8785.dumps(msgspec.to_builtins(self))

    @property
    def tensor_deltas(self) -> tuple[TensorDelta, ...]:
        """The tensor-delta actions, in file order."""
        return tuple(action for action in self.files if isinstance(action, TensorDelta))
