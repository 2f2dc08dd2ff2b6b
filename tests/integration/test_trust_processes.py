"""What only separate processes show: signing at once, and verifying without a network."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

from patchctl.trust.domain import LocalDomain
from patchctl.trust.merkle import MerkleTree
from patchctl.trust.note import parse_checkpoint
from patchctl.trust.sign import sign_statement
from patchctl.trust.statement import encode_hotfix
from patchctl.trust.testing import IDENTITY, SUBJECT_SHA256, example_hotfix
from patchctl.trust.verify import verify_attestation

_SIGN = """
import sys
from pathlib import Path
from patchctl.trust.domain import LocalDomain
from patchctl.trust.sign import sign_statement
domain = LocalDomain.open(Path(sys.argv[1]))
statement = Path(sys.argv[2]).read_bytes()
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[4])):
    print(sign_statement(domain, sys.argv[3], statement), flush=True)
"""


def test_two_processes_signing_at_once_keep_one_log(tmp_path: Path) -> None:
    folder, statement = tmp_path / "domain", tmp_path / "statement.json"
    domain = LocalDomain.create(folder, "local")
    statement.write_bytes(encode_hotfix("fix.patch", SUBJECT_SHA256, example_hotfix()))
    count = 12
    signers = [
        subprocess.Popen(
            [sys.executable, "-c", _SIGN, folder, statement, f"{name}@example.com", str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in "ab"
    ]
    for signer in signers:
        assert signer.stdout is not None
        assert signer.stdout.readline() == "ready\n"
    for signer in signers:
        assert signer.stdin is not None
        signer.stdin.write("go\n")
        signer.stdin.flush()
    lines = [line for signer in signers for line in signer.communicate(timeout=120)[0].splitlines()]
    assert [signer.returncode for signer in signers] == [0, 0]

    roots = {"local": domain.trusted_root_json()}
    verified = [verify_attestation(roots, line.encode(), SUBJECT_SHA256) for line in lines]
    assert sorted(statement.log_index for statement in verified) == list(range(2 * count))
    assert domain.describe()["log_entries"] == 2 * count

    tree = MerkleTree()
    for entry in (folder / "log.entries").read_bytes().splitlines():
        tree.append(base64.b64decode(entry))
    for line in lines:
        (entry,) = json.loads(line)["verificationMaterial"]["tlogEntries"]
        checkpoint = parse_checkpoint(entry["inclusionProof"]["checkpoint"]["envelope"])
        assert tree.root(checkpoint.size) == checkpoint.root_hash


_VERIFY = """
import sys
touched = []
def audit(event, args):
    # Importing urllib3 asks the kernel whether IPv6 exists; that socket goes nowhere.
    if event in {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.sendmsg"}:
        touched.append(event)
        raise OSError(f"network touched: {event}")
sys.addaudithook(audit)
from pathlib import Path
from patchctl.trust.verify import verify_attestation
assert "sigstore" not in sys.modules, "the light module imports sigstore"
root, line, subject = sys.argv[1:]
verified = verify_attestation({"local": Path(root).read_text()}, Path(line).read_bytes(), subject)
assert "sigstore" in sys.modules
assert not touched, touched
print(verified.identity)
"""


def test_verifying_touches_no_network(tmp_path: Path) -> None:
    domain = LocalDomain.create(tmp_path / "domain", "local")
    statement = encode_hotfix("fix.patch", SUBJECT_SHA256, example_hotfix())
    (tmp_path / "root.json").write_text(domain.trusted_root_json())
    (tmp_path / "line").write_text(sign_statement(domain, IDENTITY, statement))
    nowhere = "http://192.0.2.1:9"
    environment = {
        **os.environ,
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"), nowhere),
        "HOME": str(tmp_path),
    }
    arguments = [str(tmp_path / "root.json"), str(tmp_path / "line"), SUBJECT_SHA256]
    before = sorted(path.name for path in tmp_path.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", _VERIFY, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, IDENTITY + "\n", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_light_modules_do_not_import_sigstore() -> None:
    modules = ("statement", "freshness", "verify", "attestations", "sign", "document", "note", "merkle", "root")
    imports = "; ".join(f"import patchctl.trust.{name}" for name in modules)
    code = (
        f"{imports}; import sys; print(sorted({{'sigstore', 'cryptography', 'pydantic', 'torch'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
