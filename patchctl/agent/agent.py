"""The agent: starts and watches the processes, runs one transaction at a time, answers questions."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from engine.wire import Reclaim
from patchctl import __version__
from patchctl.agent.context import HostContext
from patchctl.agent.deploy import Deploy
from patchctl.agent.inbox import Inbox
from patchctl.agent.operation import Operation
from patchctl.agent.requests import ReclaimRequest, SwapOptions
from patchctl.agent.rollback import OperatorRollback
from patchctl.agent.snapshots import HostSnapshots
from patchctl.errors import ExitCode, PatchctlError
from patchctl.journal.journal import Journal
from patchctl.journal.record import TransactionRecord
from patchctl.transaction.machine import EXIT_CODES, Kind, Step
from patchctl.transaction.runner import Ending, StepFunction, run_transaction

_POLL_S = 0.2
# Worth another try, within the restart budget; whatever else stops a restart will stop the next one too.
_TRY_AGAIN = frozenset({"host.process_gone", "host.spawn_failed"})
_log = logging.getLogger(__name__)


class Work(Protocol):
    """A kind of transaction: its steps, and what to release when it ended."""

    def steps(self) -> Mapping[Step, StepFunction]:
        """The function of every step in the machine's table."""

    def close(self) -> None:
        """Called once, whatever the end."""


class Agent:
    """One per engine host. Thread-safe; a transaction runs in its own thread."""

    def __init__(self, context: HostContext, url: str) -> None:
        self._context = context
        self._url = url
        self._operations: dict[str, Operation] = {}
        self._worker: threading.Thread | None = None
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self.failed: PatchctlError | None = None
        self.on_failed: Callable[[], None] = lambda: None

    @property
    def journal(self) -> Journal:
        """The host's journal."""
        return self._context.journal

    @property
    def inbox(self) -> Inbox:
        """Where uploads arrive."""
        return self._context.inbox

    @property
    def snapshots(self) -> HostSnapshots:
        """What of this host's memory is kept."""
        return HostSnapshots(self._context)

    def start(self) -> None:
        """Begin to watch the processes."""
        self._supervisor.start()

    def stop(self) -> None:
        """Let a running transaction go back, then end the processes."""
        self._context.stopping.set()
        if self._worker is not None:
            self._worker.join()
        self._context.watch.stop()
        self._context.host.close()
        self._context.policy_engine.close()
        self._context.journal.close()

    # -- operations

    def deploy(self, op_id: str, actor: str, options: SwapOptions) -> Operation:
        """Start a deploy of the upload ``op_id``, or join the one already running under that id."""
        return self._run(Kind.DEPLOY, op_id, actor, lambda record: Deploy(self._context, record, options))

    def rollback(self, op_id: str, actor: str, to: int | None) -> Operation:
        """Start a rollback to generation ``to`` (None: the build before)."""
        return self._run(Kind.ROLLBACK, op_id, actor, lambda record: OperatorRollback(self._context, record, to))

    def _run(self, kind: Kind, op_id: str, actor: str, make: Callable[[TransactionRecord], Work]) -> Operation:
        record, is_new = self.journal.begin(kind, op_id=op_id, actor=actor)
        if not is_new:
            return self._operations.get(record.id) or self._ended(record)
        operation = self._operations[record.id] = Operation(record.id)
        self._worker = threading.Thread(
            target=self._work, args=(record, make(record), operation), name=record.id, daemon=True
        )
        self._worker.start()
        return operation

    def _work(self, record: TransactionRecord, work: Work, operation: Operation) -> None:
        try:
            ending = run_transaction(record, work.steps(), self.journal, operation.emit)
            operation.finish(self._end_event(ending))
        finally:
            work.close()

    def _ended(self, record: TransactionRecord) -> Operation:
        """The stored result of an operation this agent ran before it was asked again."""
        operation = Operation(record.id)
        error = None
        if record.error is not None:
            error = PatchctlError(**{**record.error, "exit_code": ExitCode(record.error["exit_code"])})
        operation.finish(self._end_event(Ending(state=record.state, error=error)))  # type: ignore[arg-type]
        return operation

    def _end_event(self, ending: Ending) -> dict[str, Any]:
        active = self.journal.committed()
        fallback = ending.error.exit_code if ending.error else ExitCode.INTERNAL
        return {
            "event": "end",
            "state": ending.state,
            "exit_code": int(EXIT_CODES.get(ending.state, fallback)),
            "active": f"{active.version} (generation {active.number})" if active else "none",
            "reasons": [] if ending.error is None else [ending.error.why],
            "error": None if ending.error is None else ending.error.as_dict(),
        }

    def reclaim(self, request: ReclaimRequest) -> dict[str, Any]:
        """Set the engine's memory reclaim hook at run time; what the engine says about it."""
        message = Reclaim(policy=request.policy, high=request.high, low=request.low, now=request.now)
        return self._context.host.reclaim(message)

    # -- questions

    def status(self) -> dict[str, Any]:
        """What serves, what is resident, what runs."""
        context = self._context
        generations = self.journal.generations()
        active = next((entry for entry in generations if entry.number == context.host.active_generation), None)
        running = next((record.id for record in self.journal.history(1) if record.state == "running"), None)
        return {
            "schema": 1,
            "agent": {"pid": os.getpid(), "version": __version__},
            "url": self._url,
            "environment": context.settings.environment,
            "active": None
            if active is None
            else {"generation": active.number, "digest": active.digest, "version": active.version},
            "transaction": running,
            "memory_bytes": context.watch.memory_bytes(),
            **self._processes(),
            "generations": [msgspec.to_builtins(entry) for entry in generations],
        }

    def _processes(self) -> dict[str, Any]:
        """Pids, restarts and request counters; what is being replaced is left out."""
        host = self._context.host
        try:
            front = host.front_stats()
            requests = {name: front[f"requests_{name}"] for name in ("completed", "failed", "cancelled")}
        except PatchctlError:
            requests = {}
        restarts = {role: max(0, count - 1) for role, count in host.processes.starts.items()}
        return {"processes": host.processes.pids, "restarts": restarts, "requests": requests}

    def transaction(self, identifier: str) -> dict[str, Any]:
        """One transaction with its steps.

        Raises:
            PatchctlError: ``transaction.unknown`` (exit 3).
        """
        record = self.journal.transaction(identifier)
        if record is None:
            raise PatchctlError(
                code="transaction.unknown",
                what="there is no such transaction",
                why=f"the journal of this host has no {identifier!r}",
                exit_code=ExitCode.NOT_FOUND,
                next_command="patchctl history",
            )
        found: dict[str, Any] = msgspec.to_builtins(record)
        return found

    # -- supervision

    def _supervise(self) -> None:
        """Replace a process that ended or does not answer; the other one keeps running."""
        stopping, host = self._context.stopping, self._context.host
        while not stopping.wait(_POLL_S):
            if not host.processes.lost():
                continue
            try:
                restored = self._context.restore()
            except PatchctlError as error:
                if stopping.is_set():
                    return
                _log.warning("%s", error)
                if error.code not in _TRY_AGAIN:
                    self._give_up(error)
                    return
                continue
            for role, why in restored.replaced.items():
                _log.warning("the %s process was replaced (%s)", role, why)

    def _give_up(self, error: PatchctlError) -> None:
        self.failed = PatchctlError(
            code="host.cannot_serve",
            what="the engine host stopped",
            why=error.why,
            exit_code=ExitCode.ROLLBACK_INCOMPLETE,
            serving="nothing from this host: take it out of rotation",
            next_command="patchctl history; then patchctl engine serve …",
        )
        self.on_failed()
