"""Our RFC 3161 responses against OpenSSL, a reader that shares no code with sigstore's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from patchctl.trust.domain import LocalDomain
from patchctl.trust.timestamp import timestamp_response

_MESSAGE = b"the signature to date"


@pytest.mark.parametrize(("message", "accepted"), [(_MESSAGE, True), (_MESSAGE + b"!", False)])
def test_openssl_agrees(tmp_path: Path, message: bytes, accepted: bool) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path / "domain"
    domain = LocalDomain.create(folder, "local")
    now = domain.created_unix + 5
    response = timestamp_response(domain.keys.p256["tsa"], domain.certificates["tsa"], _MESSAGE, now)
    (tmp_path / "response.tsr").write_bytes(response)
    (tmp_path / "message").write_bytes(message)
    files: list[str | Path] = ["-in", tmp_path / "response.tsr", "-data", tmp_path / "message"]
    chain: list[str | Path] = [
        "-CAfile",
        folder / "tsa-root.crt",
        "-untrusted",
        folder / "tsa.crt",
        "-attime",
        str(now),
    ]
    done = subprocess.run([openssl, "ts", "-verify", *files, *chain], capture_output=True, text=True, check=False)
    assert ("Verification: OK" in done.stdout) is accepted, done.stderr
    shown = subprocess.run(
        [openssl, "ts", "-reply", "-in", tmp_path / "response.tsr", "-text"], capture_output=True, text=True, check=True
    )
    assert "Status: Granted." in shown.stdout
    assert "Hash Algorithm: sha256" in shown.stdout
