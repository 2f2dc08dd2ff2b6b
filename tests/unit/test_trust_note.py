from __future__ import annotations

import base64

import pytest

from patchctl.trust.note import checkpoint_text, ed25519_key_id, parse_checkpoint, sign_text

_ROOT = bytes(range(32))
_KEY_ID = bytes(range(32))


def _note() -> str:
    return sign_text(checkpoint_text("log.example/one", 7, _ROOT), "log.example/one", _KEY_ID, b"signature")


def test_a_checkpoint_reads_back() -> None:
    checkpoint = parse_checkpoint(_note())
    assert (checkpoint.origin, checkpoint.size, checkpoint.root_hash) == ("log.example/one", 7, _ROOT)
    (signature,) = checkpoint.signatures
    assert (signature.name, signature.key_hint, signature.signature) == ("log.example/one", _KEY_ID[:4], b"signature")


def test_the_key_id_is_that_of_other_notes() -> None:
    # The published verifier key of Go's checksum database: name+hint+base64(0x01 || public key).
    name, hint, encoded = "sum.golang.org", "033de0ae", "Ac4zctda0e5eza+HJyk9SxEdh+s3Ux18htTTAD8OuAn8"
    raw = base64.b64decode(encoded)
    assert raw[:1] == b"\x01"
    assert ed25519_key_id(name, raw[1:])[:4].hex() == hint


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\n7\n", "\n07\n"),
        ("\n7\n", "\n+7\n"),
        ("\n7\n", "\n7 \n"),
        ("\n7\n", "\n-1\n"),
        ("log.example/one\n7", "\n7"),
        ("\u2014 ", "- "),
        ("\u2014 ", "\u2014  "),
        ("\n\n", "\n"),
        ("AAECAw", "AAECAw!"),
        ("AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=", "AAECAwQF"),
        ("AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=", "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh9="),
    ],
)
def test_a_lax_spelling_is_refused(old: str, new: str) -> None:
    note = _note()
    assert old in note
    with pytest.raises(ValueError, match=r".+"):
        parse_checkpoint(note.replace(old, new, 1))


@pytest.mark.parametrize("tail", ["", "junk\n", "\n\n"])
def test_anything_after_the_signatures_is_refused(tail: str) -> None:
    note = _note().removesuffix("\n") + tail
    with pytest.raises(ValueError, match=r".+"):
        parse_checkpoint(note)
