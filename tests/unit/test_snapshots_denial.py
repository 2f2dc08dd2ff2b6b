"""Why memory may not be read, and what to do: one explanation per rule of the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from snapshots.capture.denial import AccessFacts, explain, look

_SAME, _OTHER = frozenset({1000}), frozenset({0, 7})


@pytest.mark.parametrize(
    ("facts", "why", "action"),
    [
        (AccessFacts(1000, None, 0, capable=False), "hidden from uid 1000", "sudo -u root"),
        (AccessFacts(1000, frozenset({7}), 0, capable=False), "belongs to uid 7; this is uid 1000", "sudo -u '#7'"),
        (AccessFacts(1000, frozenset({7}), 1, capable=False), "belongs to uid 7", "sudo -u root"),
        (AccessFacts(1000, frozenset({1000, 0}), 0, capable=False), "belongs to uid 0", "sudo -u '#0'"),
        (AccessFacts(1000, _SAME, 1, capable=False), "only a parent", "kernel.yama.ptrace_scope=0"),
        (AccessFacts(1000, _SAME, 2, capable=False), "only CAP_SYS_PTRACE", "sudo -u root"),
        (AccessFacts(0, _OTHER, 3, capable=True), "nobody may read", "reboot"),
        (AccessFacts(1000, _SAME, 0, capable=False), "not dumpable", "sudo -u root"),
        (AccessFacts(0, _OTHER, 0, capable=True), "another user namespace", "--cap-add SYS_PTRACE"),
    ],
)
def test_every_rule_has_its_explanation(facts: AccessFacts, why: str, action: str) -> None:
    denial = explain(42, facts)
    assert why in denial.why
    assert action in denial.action


def test_facts_of_this_process() -> None:
    facts = look(os.getpid())
    assert facts.target_uids is not None
    assert os.geteuid() in facts.target_uids
    assert 0 <= facts.ptrace_scope <= 3
    assert look(2**22 + 1).target_uids is None


_AS_NOBODY = """
    import os, sys
    from patchctl.errors import PatchctlError
    from patchctl.local_snapshots import LocalSnapshots
    from pathlib import Path
    target = int(sys.argv[1])
    os.chmod(sys.argv[2], 0o777)
    os.setgid(65534)
    os.setuid(65534)
    try:
        LocalSnapshots(Path(sys.argv[2]) / "s").take(target, "")
    except PatchctlError as error:
        print(error.code, error.exit_code.name, error.why, "|", error.next_command)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_process_is_denied_and_explained() -> None:
    import tempfile

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(_AS_NOBODY), str(os.getpid()), folder],
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout.startswith("snapshot.denied AUTH ")
    assert "belongs to uid 0; this is uid 65534 without CAP_SYS_PTRACE" in done.stdout
