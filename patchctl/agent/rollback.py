"""The steps of an operator's rollback: a recorded build, by name, with nothing but this host."""

from __future__ import annotations

from collections.abc import Mapping

from engine.build import BuildInvalidError
from patchctl.agent.context import HostContext
from patchctl.agent.ending import Wholeness, commit, go_back, release_after_commit, release_quietly
from patchctl.agent.evidence import record_generation
from patchctl.errors import ExitCode, PatchctlError
from patchctl.journal.record import TransactionRecord
from patchctl.transaction.machine import Step
from patchctl.transaction.rollback_target import choose_target
from patchctl.transaction.runner import StepFunction, StepResult


class OperatorRollback:
    """Re-stages a recorded build from the store, exchanges to it and commits it.

    No gate, bake or verdict: the build was verified, gated and judged when it was first committed,
    and this must work with registry, log, policy server and network gone.
    """

    def __init__(self, context: HostContext, record: TransactionRecord, to: int | None) -> None:
        self._context = context
        self._record = record
        self._to = to
        self._number = 0
        self._wholeness = Wholeness(context)
        committed = context.journal.committed()
        assert committed is not None  # a host that answers has a committed build
        self._active = committed
        self._target = committed

    def steps(self) -> Mapping[Step, StepFunction]:
        """The functions of the machine's steps."""
        return {
            Step.VERIFY: self._verify,
            Step.STAGE: self._stage,
            Step.SWAP: self._wholeness.around(self._swap),
            Step.COMMIT: self._commit,
            Step.ROLLBACK: self._rollback,
            Step.DISCARD: self._discard,
        }

    def close(self) -> None:
        """Nothing to release."""

    def _verify(self) -> StepResult:
        journal = self._context.journal
        active = self._active
        target = self._target = choose_target(journal.generations(), active, self._to)
        try:
            self._context.store.verify(target.digest)
        except BuildInvalidError as error:
            raise PatchctlError(
                code="store.build_damaged",
                what=f"generation {target.number} was not loaded",
                why=str(error),
                exit_code=ExitCode.SIGNATURE,
                serving=f"generation {active.number} ({active.version}), untouched",
                next_command="patchctl status, then rollback --to another generation",
            ) from error
        journal.describe(
            self._record.id,
            patch_id=f"rollback-to-{target.version}",
            base_digest=active.digest,
            target_digest=target.digest,
        )
        return StepResult(data={"note": f"generation {target.number} ({target.version}) re-hashed, intact"})

    def _stage(self) -> StepResult:
        context, target = self._context, self._target
        context.check_not_stopping()
        self._wholeness.begin()
        self._number = context.journal.add_generation(target.digest, target.version, self._record.id)
        report = context.host.stage(self._number, context.store.path(target.digest), target.digest)
        self._wholeness.check()
        return StepResult(data={"note": f"generation {self._number}, {report['mode']}", **report})

    def _swap(self) -> StepResult:
        data = self._context.host.swap(self._number, policy="drain" if self._tokenizer_differs() else "auto")
        return StepResult(data={"note": f"exchange {data.get('exchange_us', 0):.0f} µs", **data})

    def _tokenizer_differs(self) -> bool:
        return self._context.tokenizer_differs(self._active.digest, self._target.digest)

    def _commit(self) -> StepResult:
        data = {"note": f"generation {self._number} is the active build", "generation": self._number}
        record_generation(self._context, self._number)
        commit(self._context, self._wholeness, self._number, self._record.id, data)
        remark = release_after_commit(self._context, self._active.number)
        return StepResult(data={**data, "note": f"{data['note']}{remark}"})

    def _rollback(self) -> StepResult:
        data = go_back(self._context, self._number, drain=self._tokenizer_differs())
        self._context.journal.drop_generation(self._number, "rolled-back")
        return StepResult(data=data)

    def _discard(self) -> StepResult:
        if self._number:
            release_quietly(self._context, self._number)
        self._context.journal.drop_generation(self._number, "discarded")
        return StepResult(data={"note": "the active build never changed"})
