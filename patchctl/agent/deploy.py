"""The steps of a deploy, in the order of the machine's table. Each does one thing and reports its evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from patchctl.admission.gate import decide, require_allow
from patchctl.admission.log import append
from patchctl.admission.policy import PolicySet
from patchctl.agent.bake import bake
from patchctl.agent.context import HostContext, is_tokenizer, unix_now
from patchctl.agent.ending import Wholeness, commit, go_back, release_after_commit, release_quietly
from patchctl.agent.evidence import Evidence, record_generation
from patchctl.agent.facts import gather
from patchctl.agent.requests import Policy, SwapOptions
from patchctl.agent.stager import stage_in_child
from patchctl.agent.watch import monotonic_s
from patchctl.bundle.declaration import changed_files
from patchctl.bundle.read import PatchFile
from patchctl.claims import first_difference
from patchctl.errors import ExitCode, PatchctlError
from patchctl.journal.record import GenerationRecord, TransactionRecord
from patchctl.transaction.machine import Outcome, Step
from patchctl.transaction.runner import UNTOUCHED, StepFunction, StepResult
from patchctl.trust.attestations import verify_file
from patchctl.trust.freshness import FreshnessStore
from patchctl.trust.verify import VerifiedStatement
from snapshots.verdict import Finding, Verdict


@dataclass(slots=True)
class _Staged:
    """The new generation while the transaction runs."""

    number: int
    old: GenerationRecord


class Deploy:
    """One deploy: owns the patch file's descriptor from hash to use, and the staged generation."""

    def __init__(self, context: HostContext, record: TransactionRecord, options: SwapOptions) -> None:
        self._context = context
        self._record = record
        self._options = options
        self._opened: PatchFile | None = None
        self._verified: VerifiedStatement | None = None
        self._loaded: _Staged | None = None
        self._admitted_unix = 0
        self._wholeness = Wholeness(context)
        self._evidence = Evidence(context, record.id)
        self._freshness = FreshnessStore(context.home.freshness)

    def steps(self) -> Mapping[Step, StepFunction]:
        """The functions of the machine's steps."""
        whole = self._wholeness.around
        return {
            Step.VERIFY: self._verify,
            Step.GATE: self._gate,
            Step.STAGE: self._stage,
            Step.SNAPSHOT_BEFORE: whole(self._snapshot_before),
            Step.SWAP: whole(self._swap),
            Step.BAKE: whole(self._bake),
            Step.SNAPSHOT_AFTER: whole(self._snapshot_after),
            Step.VERDICT: whole(self._verdict),
            Step.COMMIT: self._commit,
            Step.ROLLBACK: self._rollback,
            Step.DISCARD: self._discard,
        }

    def close(self) -> None:
        """Release the patch file and forget the upload."""
        if self._opened is not None:
            self._opened.close()
        self._evidence.close()
        self._context.inbox.clear(self._record.op_id)

    # -- before anything changes

    def _verify(self) -> StepResult:
        inbox, op_id = self._context.inbox, self._record.op_id
        self._opened = patch = PatchFile.open(inbox.path(op_id, "patch"))
        config = patch.config
        attested = verify_file(self._context.trusted_roots, inbox.path(op_id, "attestations"), patch.manifest_digest)
        self._verified = statement = _by_allowed_signer(attested.statements, self._context.policy)
        if field := first_difference(config, statement.predicate):
            raise _mismatch(field)
        self._context.journal.describe(
            self._record.id,
            patch_id=config.patch_id,
            base_digest=config.base_digest,
            target_digest=config.target_digest,
        )
        if self._tokenizer_changes() and self._options.policy in ("carry", "recompute"):
            raise _policy_refused(self._options.policy)
        serving = self._serving()
        if serving.digest != config.base_digest:
            raise PatchctlError(
                code="patch.wrong_base",
                what="the patch was not applied",
                why=f"it is made for {config.base_digest}, but {serving.digest} serves",
                exit_code=ExitCode.INCOMPATIBLE,
                serving=UNTOUCHED,
                next_command="patchctl status",
            )
        return StepResult(
            data={
                "note": f"signed by {statement.identity}, log index {statement.log_index}",
                "refused_lines": [f"{line.line}: {line.code}" for line in attested.refused],
                "domain": statement.domain,
                "issuer": statement.issuer,
                "identity": statement.identity,
                "manifest_digest": patch.manifest_digest,
                "patch_bytes": patch.size_bytes,
            }
        )

    def _gate(self) -> StepResult:
        decision = self._decide("apply", "not_run")
        self._admitted_unix = unix_now()
        data = {
            "note": f"{decision.outcome}: {len(decision.passed)} checks passed ({decision.engine})",
            "outcome": decision.outcome,
            "denied": [finding.id for finding in decision.denied],
            "held": [finding.id for finding in decision.held],
            "policy_digest": decision.policy_digest,
            "input_digest": decision.input_digest,
        }
        try:
            require_allow(decision, serving=UNTOUCHED, next_command="patchctl history -o json")
        except PatchctlError as error:
            return StepResult(Outcome.HOLD if decision.outcome == "hold" else Outcome.FAILED, data, error)
        return StepResult(data=data)

    def _decide(self, action: Any, memory: Any) -> Any:
        context, config = self._context, self._patch.config
        facts = gather(
            context,
            action=action,
            actor=self._record.actor,
            patch=self._patch,
            statement=self._statement,
            serving=self._serving(),
            highest_sequence=self._freshness.read().highest(config.channel, context.settings.target),
            memory=memory,
        )
        decision = decide(facts, context.policy, context.policy_engine)
        append(context.home.decisions, decision, unix=unix_now())
        return decision

    def _stage(self) -> StepResult:
        context, patch = self._context, self._patch
        config, old = patch.config, self._serving()
        context.check_not_stopping()
        self._wholeness.begin()
        self._evidence.begin_before_window()
        number = context.journal.add_generation(config.target_digest, config.target_manifest.version, self._record.id)
        self._loaded = _Staged(number, old)
        started_s = monotonic_s()
        child = stage_in_child(patch.fd, context.store.path(old.digest), context.home.store)
        unpack_ms = (monotonic_s() - started_s) * 1e3
        folder, commit_mode = context.store.path(config.target_digest), self._options.commit_mode
        report = context.host.stage(number, folder, config.target_digest, commit_mode=commit_mode)
        if report["golden"] != child["golden"]:
            raise PatchctlError(
                code="stage.golden_differs",
                what="the staged generation was not accepted",
                why="its graphs answer the golden prompt with other tokens than the build does in the stager",
                exit_code=ExitCode.INCOMPATIBLE,
                serving=UNTOUCHED,
                next_command="patchctl history -o json",
            )
        self._wholeness.check()
        note = f"generation {number}, {report['mode']}; unpack and golden test {unpack_ms:.0f} ms, "
        note += f"load {report['load_ms']:.0f} ms, capture and warm {report['capture_ms'] + report['warm_ms']:.0f} ms"
        return StepResult(data={"note": note, "generation": number, "unpack_ms": round(unpack_ms, 1), **report})

    def _snapshot_before(self) -> StepResult:
        return StepResult(data=self._evidence.take_before(old=self._staged.old.number, new=self._staged.number))

    # -- the new generation serves, on probation

    def _swap(self) -> StepResult:
        self._context.check_not_stopping()
        data = self._context.host.swap(
            self._staged.number, policy=self._policy, hard_stop_after_s=self._options.hard_stop_after_s
        )
        note = f"{data.get('mode', self._policy)}, exchange {data.get('exchange_us', 0):.0f} µs"
        return StepResult(data={"note": note, "policy": self._policy, **data})

    @property
    def _policy(self) -> Policy:
        return "drain" if self._tokenizer_changes() else self._options.policy

    def _tokenizer_changes(self) -> bool:
        """A running response must not decode the new build's tokens with the old build's tokenizer."""
        return any(is_tokenizer(path) for path in changed_files(self._patch.config))

    def _bake(self) -> StepResult:
        return StepResult(
            data=bake(
                self._context,
                self._evidence,
                self._patch.config.declared,
                generation=self._staged.number,
                drained=self._policy == "drain",
                wholeness=self._wholeness,
            )
        )

    def _snapshot_after(self) -> StepResult:
        return StepResult(data=self._evidence.take_after(old=self._staged.old.number, new=self._staged.number))

    def _verdict(self) -> StepResult:
        verdict = self._evidence.judge(self._patch.config.declared)
        reasons = "; ".join(f"{finding.subject}: {finding.what}" for finding in _weightiest(verdict))
        data = {"note": f"{verdict.outcome}: {reasons}", "growth": self._evidence.growth_figures(), **verdict.as_dict()}
        if verdict.outcome == "rollback":
            return StepResult(Outcome.FAILED, data, _not_committed("verdict.rollback", reasons))
        # A clean verdict is one fact among those that allow a promotion; what unknown means, the policy says.
        decision = self._decide("promote", verdict.outcome)
        if verdict.outcome == "commit" and decision.outcome == "allow":
            return StepResult(data=data)
        why = "; ".join(f"{finding.id}: {finding.message}" for finding in decision.reasons)
        error = _not_committed("gate.promote_refused", why)
        if verdict.outcome == "hold":
            error = _not_committed("verdict.hold", reasons)
        return StepResult(Outcome.FAILED if decision.outcome == "deny" else Outcome.HOLD, data, error)

    def _commit(self) -> StepResult:
        context, staged = self._context, self._staged
        data: dict[str, Any] = {"note": f"generation {staged.number} is the active build", "generation": staged.number}
        # As of its admission: a patch does not expire while it bakes.
        # The freshness ledger first: a crash in between leaves a sequence spent on a build that is
        # not committed, which is refused as a replay later; the other order could accept it twice.
        self._freshness.accept(self._statement.predicate, context.settings.target, self._admitted_unix)
        record_generation(context, staged.number)
        commit(context, self._wholeness, staged.number, self._record.id, data)
        return StepResult(data={**data, "note": data["note"] + release_after_commit(context, staged.old.number)})

    # -- ways back

    def _rollback(self) -> StepResult:
        context, staged = self._context, self._staged
        data = go_back(context, staged.number, drain=self._tokenizer_changes())
        context.journal.drop_generation(staged.number, "rolled-back")
        return StepResult(data=data)

    def _discard(self) -> StepResult:
        if self._loaded is None:
            return StepResult(data={"note": "nothing was staged"})
        release_quietly(self._context, self._staged.number)
        self._context.journal.drop_generation(self._staged.number, "discarded")
        return StepResult(data={"note": f"generation {self._staged.number} freed; the active build never changed"})

    # What earlier steps left; the machine's table guarantees the order.

    @property
    def _patch(self) -> PatchFile:
        assert self._opened is not None
        return self._opened

    @property
    def _statement(self) -> VerifiedStatement:
        assert self._verified is not None
        return self._verified

    @property
    def _staged(self) -> _Staged:
        assert self._loaded is not None
        return self._loaded

    def _serving(self) -> GenerationRecord:
        """The committed generation: what serves outside a transaction's probation."""
        serving = self._context.journal.committed()
        assert serving is not None
        return serving


def _by_allowed_signer(statements: tuple[VerifiedStatement, ...], policy: PolicySet) -> VerifiedStatement:
    """The first statement by a signer the policy lists, else the first: a stranger's line blocks nobody."""
    listed = {
        (signer["domain"], signer["issuer"], signer["identity"])
        for signer in policy.data["patchctl"]["config"]["identities"]
    }
    return next((s for s in statements if (s.domain, s.issuer, s.identity) in listed), statements[0])


def _weightiest(verdict: Verdict) -> tuple[Finding, ...]:
    """The findings worth a line: those that stopped the patch, else the growth it removed or kept."""
    if verdict.outcome != "commit":
        return verdict.reasons
    return tuple(finding for finding in verdict.findings if finding.subject.startswith("memory per request"))


def _mismatch(name: str) -> PatchctlError:
    return PatchctlError(
        code="patch.statement_mismatch",
        what="the patch was refused",
        why=f"the signed statement and the patch file disagree on {name}",
        exit_code=ExitCode.SIGNATURE,
        serving=UNTOUCHED,
        next_command="patchctl inspect FILE",
    )


def _policy_refused(policy: str) -> PatchctlError:
    return PatchctlError(
        code="swap.policy_refused",
        what="the patch was not applied",
        why=f"the patch changes the tokenizer: {policy} would decode the new build's tokens with the old one",
        exit_code=ExitCode.INCOMPATIBLE,
        serving=UNTOUCHED,
        next_command="patchctl deploy … --policy drain",
    )


def _not_committed(code: str, why: str) -> PatchctlError:
    return PatchctlError(
        code=code,
        what="the patch was not committed",
        why=why,
        exit_code=ExitCode.ROLLED_BACK,
        serving="the build that served before, after the exchange back",
        next_command="patchctl history -o json",
    )
