"""kill -9 at every named point of a transaction: the journal always tells a whole story afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from patchctl.journal.journal import Journal
from patchctl.transaction.machine import ON_PROBATION, Kind, State, Step

# A transaction whose steps do nothing but journal, as the agent's do around their work.
SCRIPT = """
import sys
from pathlib import Path
from patchctl.journal.journal import Journal
from patchctl.transaction.machine import Kind, Outcome, Step
from patchctl.transaction.runner import StepResult, run_transaction

journal = Journal(Path(sys.argv[1]))
first = journal.add_generation("sha256:" + "a" * 64, "1.0.0", None)
journal.commit_generation(first, None, {})
record, _ = journal.begin(Kind.DEPLOY, op_id="1" * 32, actor="test")
numbers = []

def stage():
    numbers.append(journal.add_generation("sha256:" + "b" * 64, "1.0.1", record.id))
    return StepResult()

def commit():
    journal.commit_generation(numbers[0], record.id, {})
    return StepResult()

steps = {step: StepResult for step in Step} | {Step.STAGE: stage, Step.COMMIT: commit}
ending = run_transaction(record, steps, journal, lambda event: None)
print(ending.state)
"""

STEPS = [
    Step.VERIFY,
    Step.GATE,
    Step.STAGE,
    Step.SNAPSHOT_BEFORE,
    Step.SWAP,
    Step.BAKE,
    Step.SNAPSHOT_AFTER,
    Step.VERDICT,
    Step.COMMIT,
]


def run(path: Path, fault: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATCHCTL_FAULT": fault}
    return subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_a_fault_it_commits(tmp_path: Path) -> None:
    done = run(tmp_path / "journal.db")
    assert done.stdout.strip() == State.COMMITTED, done.stderr
    journal = Journal(tmp_path / "journal.db")
    assert journal.recover() is None
    committed = journal.committed()
    assert committed is not None
    assert committed.version == "1.0.1"


MOMENTS = [(step, "intent") for step in STEPS]
MOMENTS += [(step, moment) for step in (Step.STAGE, Step.SWAP, Step.COMMIT) for moment in ("done", "outcome")]


@pytest.mark.parametrize(("step", "moment"), MOMENTS)
def test_kill_9_ends_on_a_whole_build(tmp_path: Path, step: Step, moment: str) -> None:
    path = tmp_path / "journal.db"
    done = run(path, f"deploy.{step}.{moment}")
    assert done.returncode == -signal.SIGKILL, done.stderr
    journal = Journal(path)
    record = journal.recover()
    assert record is not None
    journal_says_committed = step is Step.COMMIT and moment != "intent"
    committed = journal.committed()
    assert committed is not None
    if journal_says_committed:
        # The commit is durable, so the restart serves the new build although the transaction never closed.
        assert committed.version == "1.0.1"
        assert record.state == State.COMMITTED
    else:
        assert committed.version == "1.0.0"
        # Killed before a step's intent is on disk, the step before it is the newest one known.
        known = STEPS[: STEPS.index(step) + (moment != "intent")]
        probation = bool(known) and known[-1] in ON_PROBATION
        assert record.state == (State.ROLLED_BACK if probation else State.FAILED)
    # The next transaction is not blocked by the dead one.
    assert journal.begin(Kind.DEPLOY, op_id="2" * 32, actor="test")[1]
    journal.close()
