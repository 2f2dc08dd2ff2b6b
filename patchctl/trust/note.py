"""Checkpoints as signed notes: the text in which a log commits to its size and root. Pure.

Formats: https://c2sp.org/signed-note and https://c2sp.org/tlog-checkpoint.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from typing import Final

_SIGNATURE = re.compile("\u2014 (\\S+) ([A-Za-z0-9+/]+={0,2})\\Z")
_SIZE = re.compile(r"(0|[1-9][0-9]{0,18})\Z")
_KEY_HINT_BYTES: Final = 4
_ROOT_BYTES: Final = 32
# origin, size, root
_HEADER_LINES: Final = 3
# The algorithm byte of Ed25519 in a note's key id.
_ED25519: Final = b"\x01"


@dataclass(frozen=True, slots=True)
class NoteSignature:
    """One signature line: the signer's name, the first 4 bytes of its key id, and the signature."""

    name: str
    key_hint: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A parsed note; nothing in it is verified.

    Attributes:
        origin: the log's own name.
        size: number of entries.
        root_hash: 32 bytes.
    """

    origin: str
    size: int
    root_hash: bytes
    signatures: tuple[NoteSignature, ...]


def ed25519_key_id(name: str, public_key: bytes) -> bytes:
    """32-byte key id of a note signer; ``public_key`` is the raw 32-byte key."""
    return hashlib.sha256(name.encode() + b"\n" + _ED25519 + public_key).digest()


def checkpoint_text(origin: str, size: int, root_hash: bytes) -> str:
    """The text a log signs."""
    return f"{origin}\n{size}\n{base64.b64encode(root_hash).decode()}\n"


def sign_text(text: str, name: str, key_id: bytes, signature: bytes) -> str:
    """``text`` with one signature line."""
    return f"{text}\n\u2014 {name} {base64.b64encode(key_id[:_KEY_HINT_BYTES] + signature).decode()}\n"


def _canonical_base64(text: str) -> bytes:
    raw = base64.b64decode(text, validate=True)
    if base64.b64encode(raw).decode() != text:
        raise ValueError("base64 is not canonical")
    return raw


def _parse_signature(line: str) -> NoteSignature:
    match = _SIGNATURE.match(line)
    if match is None:
        raise ValueError("malformed signature line")
    raw = _canonical_base64(match[2])
    if len(raw) <= _KEY_HINT_BYTES:
        raise ValueError("signature too short")
    return NoteSignature(match[1], raw[:_KEY_HINT_BYTES], raw[_KEY_HINT_BYTES:])


def parse_checkpoint(note: str) -> Checkpoint:
    """Parse strictly: where a lax reader skips a line or a character, this one refuses.

    Raises:
        ValueError: not a checkpoint note.
    """
    text, separator, block = note.partition("\n\n")
    lines = text.split("\n")
    if not separator or "\n\n" in block or not block.endswith("\n"):
        raise ValueError("not one text and one signature block")
    if len(lines) < _HEADER_LINES or not lines[0] or not _SIZE.match(lines[1]):
        raise ValueError("malformed checkpoint header")
    root_hash = _canonical_base64(lines[2])
    if len(root_hash) != _ROOT_BYTES:
        raise ValueError("root hash is not 32 bytes")
    signatures = tuple(_parse_signature(line) for line in block.removesuffix("\n").split("\n"))
    return Checkpoint(lines[0], int(lines[1]), root_hash, signatures)
