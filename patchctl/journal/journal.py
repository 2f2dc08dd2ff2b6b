"""The journal: every intent and outcome is on disk before the next thing happens.

SQLite in WAL mode with ``synchronous=FULL`` fsyncs each commit; ``BEGIN IMMEDIATE`` takes the write
lock first, so two writers queue instead of failing half-way.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
from sqlalchemy import Connection, Row, create_engine, event, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from patchctl.errors import ExitCode, PatchctlError
from patchctl.journal.record import GenerationRecord, StepRecord, TransactionRecord
from patchctl.journal.tables import GENERATIONS, META, METADATA, SCHEMA_VERSION, STEPS, TRANSACTIONS
from patchctl.transaction.machine import Kind, Outcome, State, Step, after_crash

# A second writer (another agent by mistake) waits this long for the lock, then gets an error.
_BUSY_TIMEOUT_MS = 5000


class Journal:
    """Append-mostly record of what this host was asked to do and what it did.

    Raises:
        PatchctlError: ``journal.unusable`` when the file cannot be opened, is damaged, or was written
            by another schema version.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._engine = create_engine(f"sqlite:///{path}", isolation_level=None)
        event.listen(self._engine, "connect", _on_connect)
        try:
            with self._write() as db:
                METADATA.create_all(db)
                found = db.execute(select(META.c.value).where(META.c.key == "schema_version")).scalar()
                if found is None:
                    db.execute(insert(META).values(key="schema_version", value=str(SCHEMA_VERSION)))
        except (SQLAlchemyError, OSError) as error:
            raise _unusable(path, str(error.__cause__ or error)) from error
        if found is not None and found != str(SCHEMA_VERSION):
            raise _unusable(path, f"it has schema version {found}, this patchctl writes {SCHEMA_VERSION}")
        path.chmod(0o600)

    def close(self) -> None:
        """Release the database."""
        self._engine.dispose()

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        with self._engine.connect() as db:
            db.exec_driver_sql("BEGIN IMMEDIATE")
            try:
                yield db
            except BaseException:
                db.exec_driver_sql("ROLLBACK")
                raise
            db.exec_driver_sql("COMMIT")

    # -- transactions

    def begin(self, kind: Kind, *, op_id: str, actor: str) -> tuple[TransactionRecord, bool]:
        """Open a transaction, or return the one this ``op_id`` already opened.

        Returns:
            The record, and True when it is new.

        Raises:
            PatchctlError: ``host.busy`` (exit 7) while another transaction is open.
        """
        with self._write() as db:
            same = db.execute(select(TRANSACTIONS).where(TRANSACTIONS.c.op_id == op_id)).first()
            if same is not None:
                return self._record(db, same), False
            other = db.execute(select(TRANSACTIONS.c.id).where(TRANSACTIONS.c.state == State.RUNNING)).scalar()
            if other is not None:
                raise PatchctlError(
                    code="host.busy",
                    what="the host did not start a second transaction",
                    why=f"transaction {other} is still running",
                    exit_code=ExitCode.FENCED,
                    serving="the active generation, untouched",
                    next_command="patchctl status",
                )
            identifier = f"tx-{uuid.uuid4().hex[:12]}"
            db.execute(
                insert(TRANSACTIONS).values(
                    id=identifier,
                    op_id=op_id,
                    kind=kind,
                    actor=actor,
                    state=State.RUNNING,
                    started_unix_ns=time.time_ns(),
                    patch_id="",
                    base_digest="",
                    target_digest="",
                )
            )
            row = db.execute(select(TRANSACTIONS).where(TRANSACTIONS.c.id == identifier)).one()
            return self._record(db, row), True

    def describe(self, identifier: str, *, patch_id: str, base_digest: str, target_digest: str) -> None:
        """Record what a transaction is about, once that is verified."""
        with self._write() as db:
            db.execute(
                update(TRANSACTIONS)
                .where(TRANSACTIONS.c.id == identifier)
                .values(patch_id=patch_id, base_digest=base_digest, target_digest=target_digest)
            )

    def intent(self, identifier: str, step: Step) -> None:
        """Record that ``step`` is about to be done."""
        with self._write() as db:
            _add_step(db, identifier, step, "intent", {})

    def outcome(self, identifier: str, step: Step, outcome: Outcome, data: dict[str, Any]) -> None:
        """Record how ``step`` ended."""
        with self._write() as db:
            _add_step(db, identifier, step, outcome, data)

    def finish(self, identifier: str, state: State, error: PatchctlError | None) -> None:
        """Close a transaction."""
        with self._write() as db:
            _close(db, identifier, state, None if error is None else error.as_dict())

    def recover(self) -> TransactionRecord | None:
        """Close the transaction that a crash left open, as the machine says; returns it, or None."""
        with self._write() as db:
            row = db.execute(select(TRANSACTIONS).where(TRANSACTIONS.c.state == State.RUNNING)).first()
            if row is None:
                return None
            steps = self._record(db, row).steps
            intents = [Step(step.step) for step in steps if step.phase == "intent"]
            commit_recorded = any((step.step, step.phase) == (Step.COMMIT, Outcome.OK) for step in steps)
            state = after_crash(intents[-1] if intents else None, commit_recorded=commit_recorded)
            error = PatchctlError(
                code="host.restarted",
                what=f"the transaction did not finish; it ended as {state}",
                why="the host stopped while the transaction ran",
                exit_code=ExitCode.ROLLED_BACK if state is State.ROLLED_BACK else ExitCode.INTERNAL,
                serving="the last committed generation",
                next_command="patchctl history",
            )
            _close(db, row.id, state, None if state is State.COMMITTED else error.as_dict())
            db.execute(
                update(GENERATIONS)
                .where(GENERATIONS.c.transaction_id == row.id, GENERATIONS.c.state == "staged")
                .values(state="rolled-back" if state is State.ROLLED_BACK else "discarded")
            )
            row = db.execute(select(TRANSACTIONS).where(TRANSACTIONS.c.id == row.id)).one()
            return self._record(db, row)

    def transaction(self, identifier: str) -> TransactionRecord | None:
        """One transaction by id, or None."""
        with self._engine.connect() as db:
            row = db.execute(select(TRANSACTIONS).where(TRANSACTIONS.c.id == identifier)).first()
            return None if row is None else self._record(db, row)

    def history(self, limit: int = 50) -> list[TransactionRecord]:
        """The newest transactions, newest first."""
        with self._engine.connect() as db:
            newest = select(TRANSACTIONS).order_by(TRANSACTIONS.c.started_unix_ns.desc()).limit(limit)
            return [self._record(db, row) for row in db.execute(newest)]

    def _record(self, db: Connection, row: Row[Any]) -> TransactionRecord:
        steps = db.execute(select(STEPS).where(STEPS.c.transaction_id == row.id).order_by(STEPS.c.id))
        return TransactionRecord(
            id=row.id,
            op_id=row.op_id,
            kind=row.kind,
            actor=row.actor,
            state=row.state,
            started_unix_ns=row.started_unix_ns,
            ended_unix_ns=row.ended_unix_ns,
            patch_id=row.patch_id,
            base_digest=row.base_digest,
            target_digest=row.target_digest,
            error=None if row.error is None else msgspec.json.decode(row.error),
            steps=tuple(
                StepRecord(step=s.step, phase=s.phase, at_unix_ns=s.at_unix_ns, data=msgspec.json.decode(s.data))
                for s in steps
            ),
        )

    # -- generations

    def add_generation(self, digest: str, version: str, transaction_id: str | None) -> int:
        """Number a build that is about to be loaded."""
        with self._write() as db:
            done = db.execute(
                insert(GENERATIONS).values(
                    digest=digest, version=version, transaction_id=transaction_id, state="staged"
                )
            )
            key = done.inserted_primary_key
            assert key is not None  # noqa: S101 - an INSERT of one row
            return cast("int", key[0])

    def commit_generation(self, number: int, transaction_id: str | None, data: dict[str, Any]) -> None:
        """Make ``number`` the build a restart serves; the COMMIT outcome is part of the same write."""
        with self._write() as db:
            db.execute(
                update(GENERATIONS)
                .where(GENERATIONS.c.number == number)
                .values(state="committed", committed_unix_ns=time.time_ns())
            )
            if transaction_id is not None:
                _add_step(db, transaction_id, Step.COMMIT, Outcome.OK, data)

    def drop_generation(self, number: int, state: str) -> None:
        """Record that ``number`` was rolled back or discarded."""
        with self._write() as db:
            db.execute(update(GENERATIONS).where(GENERATIONS.c.number == number).values(state=state))

    def generations(self) -> list[GenerationRecord]:
        """Every generation, oldest first."""
        with self._engine.connect() as db:
            rows = db.execute(select(GENERATIONS).order_by(GENERATIONS.c.number))
            return [GenerationRecord(**row._asdict()) for row in rows]

    def committed(self) -> GenerationRecord | None:
        """The generation committed last: what a restart serves."""
        done = [entry for entry in self.generations() if entry.committed_unix_ns is not None]
        return max(done, key=lambda entry: entry.committed_unix_ns or 0, default=None)


def _add_step(db: Connection, identifier: str, step: Step, phase: str, data: dict[str, Any]) -> None:
    db.execute(
        insert(STEPS).values(
            transaction_id=identifier,
            step=step,
            phase=phase,
            at_unix_ns=time.time_ns(),
            data=msgspec.json.encode(data).decode(),
        )
    )


def _close(db: Connection, identifier: str, state: State, error: dict[str, Any] | None) -> None:
    db.execute(
        update(TRANSACTIONS)
        .where(TRANSACTIONS.c.id == identifier)
        .values(
            state=state,
            ended_unix_ns=time.time_ns(),
            error=None if error is None else msgspec.json.encode(error).decode(),
        )
    )


def _on_connect(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute(f"PRAGMA busy_timeout={_BUSY_TIMEOUT_MS}")
    cursor.close()


def _unusable(path: Path, why: str) -> PatchctlError:
    return PatchctlError(
        code="journal.unusable",
        what="the host's journal cannot be used, so the host did not start",
        why=f"{path}: {why}",
        exit_code=ExitCode.INTERNAL,
        serving="nothing from this host",
        next_command="patchctl engine serve … with another PATCHCTL_HOME, or restore the journal from a backup",
    )
