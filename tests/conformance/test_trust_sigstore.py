"""The bundle corpus of sigstore/sigstore-conformance, through the cryptographic half of our procedure."""

from __future__ import annotations

import hashlib
import json
import os
from importlib import resources
from pathlib import Path
from urllib.parse import quote

import pytest

from patchctl.errors import ExitCode, PatchctlError
from patchctl.trust.material import VerifiedMaterial, root_verifier
from patchctl.trust.statement import PAYLOAD_TYPE

_PROJECT = Path(__file__).parents[2]
_DATA = Path(os.environ.get("PATCHCTL_TEST_DATA", _PROJECT.parent / "shared" / "data"))
_CORPUS = _DATA / "sigstore-conformance"
_CASES = sorted(path.name for path in _CORPUS.iterdir() if path.is_dir()) if _CORPUS.is_dir() else []
_BEACON = (
    "https://github.com/sigstore-conformance/extremely-dangerous-public-oidc-beacon"
    "/.github/workflows/extremely-dangerous-oidc-beacon.yml@refs/heads/main"
)
_GITHUB = "https://token.actions.githubusercontent.com"

# Valid cases that are refused here, and why. Everything else must agree with the corpus.
_BARE_KEY = "signed by a bare key: it names no identity, and sigstore-python does not read such bundles"
_DIFFERENCES = {"managed-key-happy-path": _BARE_KEY, "managed-key-and-trusted-root": _BARE_KEY}

pytestmark = pytest.mark.skipif(not _CASES, reason=f"no corpus at {_CORPUS}; set PATCHCTL_TEST_DATA")


def _public_good_root() -> str:
    store = resources.files("sigstore._store") / quote("https://tuf-repo-cdn.sigstore.dev", safe="")
    return (store / "trusted_root.json").read_text(encoding="utf-8")


def _text(case: Path, name: str, default: str) -> str:
    path = case / name
    return path.read_text(encoding="utf-8").strip() if path.exists() else default


def _verify(case: Path) -> VerifiedMaterial:
    own_root, own_artifact = case / "trusted_root.json", case / "artifact"
    root = own_root.read_text(encoding="utf-8") if own_root.exists() else _public_good_root()
    artifact = own_artifact if own_artifact.exists() else _CORPUS / "a.txt"
    digest = hashlib.sha256(artifact.read_bytes()).digest()
    raw = (case / "bundle.sigstore.json").read_bytes()
    if b'"dsseEnvelope"' not in raw:
        return root_verifier(root).verify(raw, digest)
    material = root_verifier(root).verify(raw)
    assert material.payload_type == PAYLOAD_TYPE
    subjects = [subject["digest"]["sha256"] for subject in json.loads(material.payload)["subject"]]
    assert digest.hex() in subjects
    return material


@pytest.mark.parametrize("name", _CASES)
def test_the_corpus_case(name: str) -> None:
    case = _CORPUS / name
    if name.endswith("_fail") or name in _DIFFERENCES:
        with pytest.raises(PatchctlError) as caught:
            _verify(case)
        assert caught.value.code.startswith("trust.")
        assert caught.value.exit_code is ExitCode.SIGNATURE
    else:
        material = _verify(case)
        assert material.signer.identity == _text(case, "identity", _BEACON)
        assert material.signer.issuer == _text(case, "issuer", _GITHUB)
        assert material.log_index >= 0


def test_the_corpus_is_not_all_refused() -> None:
    assert sum(name.endswith("_fail") for name in _CASES) >= 25
    assert sum(not name.endswith("_fail") and name not in _DIFFERENCES for name in _CASES) >= 10


def test_every_difference_is_a_case() -> None:
    assert set(_DIFFERENCES) <= set(_CASES)
