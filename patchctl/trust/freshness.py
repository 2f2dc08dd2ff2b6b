"""Is this patch news? A valid signature stays valid for ever; order and expiry are ours to keep.

For every channel and target the highest accepted sequence is on disk. A patch at or below it is a replay,
whoever signed it. (The model is TUF's, https://theupdateframework.github.io/specification/latest/.)
"""

from __future__ import annotations

import enum
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec
import rfc8785

from patchctl.atomic import write_atomic
from patchctl.errors import PatchctlError
from patchctl.trust import strictjson
from patchctl.trust.refusal import fail_closed, refusal
from patchctl.trust.statement import Count, HotfixPredicate, Label, Sequence

# A release job and a host, both synchronised, differ by less; expiry is not stretched by it.
CLOCK_SKEW_S_MAX: Final = 60
# One record per channel and target: a host has tens.
_STATE_BYTES_MAX: Final = 1 << 20


class Freshness(enum.StrEnum):
    """The decision about one patch. Anything but FRESH refuses."""

    FRESH = "fresh"
    REPLAYED = "replayed"
    EXPIRED = "expired"
    NOT_YET_VALID = "not_yet_valid"


class Accepted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The highest sequence accepted for one channel and target."""

    channel: Label
    target: Label
    sequence: Sequence
    accepted_unix: Count


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything remembered; ``accepted`` is sorted by channel and target, each pair once."""

    accepted: tuple[Accepted, ...] = ()
    schema_version: Literal[1] = 1

    def highest(self, channel: str, target: str) -> int:
        """The highest accepted sequence, 0 when there is none."""
        return next(
            (entry.sequence for entry in self.accepted if (entry.channel, entry.target) == (channel, target)), 0
        )

    def with_accepted(self, entry: Accepted) -> State:
        """This state with ``entry`` in place of the older one for its channel and target."""
        others = [old for old in self.accepted if (old.channel, old.target) != (entry.channel, entry.target)]
        return State(tuple(sorted([*others, entry], key=lambda kept: (kept.channel, kept.target))))


def check(state: State, predicate: HotfixPredicate, target: str, now_unix: int) -> Freshness:
    """Decide. Pure.

    Args:
        state: what was accepted before.
        predicate: verified; names the channel.
        target: the name of what is patched, e.g. the engine host's build slot.
        now_unix: the host's time, seconds since the epoch.
    """
    if predicate.sequence <= state.highest(predicate.channel, target):
        return Freshness.REPLAYED
    if now_unix >= predicate.expires_unix:
        return Freshness.EXPIRED
    if now_unix < predicate.created_unix - CLOCK_SKEW_S_MAX:
        return Freshness.NOT_YET_VALID
    return Freshness.FRESH


@dataclass(frozen=True, slots=True)
class FreshnessStore:
    """The state file; its folder must exist."""

    path: Path

    def read(self) -> State:
        """The state; empty when the file was never written.

        Raises:
            PatchctlError: ``trust.freshness_damaged``. Starting over would accept every old patch again.
        """
        command = f"restore {self.path} from a backup"
        with fail_closed("freshness_damaged", "no patch was accepted", next_command=command):
            try:
                with self.path.open("rb") as stream:
                    raw = stream.read(_STATE_BYTES_MAX + 1)
            except FileNotFoundError:
                return State()
            if len(raw) > _STATE_BYTES_MAX:
                raise ValueError(f"{self.path} has more than {_STATE_BYTES_MAX} bytes")
            state = msgspec.convert(strictjson.loads(raw), State)
            keys = [(entry.channel, entry.target) for entry in state.accepted]
            if keys != sorted(set(keys)) or _encode(state) != raw:
                raise ValueError(f"{self.path} is not as it was written")
            return state

    def accept(self, predicate: HotfixPredicate, target: str, now_unix: int) -> None:
        """Record ``predicate`` as accepted for ``target``; durable on return. Decides again, under a lock.

        Raises:
            PatchctlError: ``trust.replayed``, ``trust.expired``, ``trust.not_yet_valid``,
                ``trust.freshness_damaged`` or ``trust.freshness_unwritten``.
        """
        with fail_closed("freshness_unwritten", "no patch was accepted"), self._locked():
            state = self.read()
            require_fresh(state, predicate, target, now_unix)
            fields = {
                "channel": predicate.channel,
                "target": target,
                "sequence": predicate.sequence,
                "accepted_unix": now_unix,
            }
            write_atomic(self.path, _encode(state.with_accepted(msgspec.convert(fields, Accepted))))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # A separate file: the state file itself is replaced, and a lock would stay with the old one.
        fd = os.open(self.path.with_name(self.path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def require_fresh(state: State, predicate: HotfixPredicate, target: str, now_unix: int) -> None:
    """Raise the explained form of :func:`check`.

    Raises:
        PatchctlError: ``trust.replayed``, ``trust.expired`` or ``trust.not_yet_valid``.
    """
    decision = check(state, predicate, target, now_unix)
    if decision is not Freshness.FRESH:
        raise _explain(decision, state, predicate, target, now_unix)


def _explain(
    decision: Freshness, state: State, predicate: HotfixPredicate, target: str, now_unix: int
) -> PatchctlError:
    why = {
        Freshness.REPLAYED: f"sequence {predicate.sequence} is not above {state.highest(predicate.channel, target)}, "
        f"the highest accepted in channel {predicate.channel} for {target}",
        Freshness.EXPIRED: f"it expired {now_unix - predicate.expires_unix} s ago",
        Freshness.NOT_YET_VALID: f"it was created {predicate.created_unix - now_unix} s in the future",
    }[decision]
    command = (
        "sign a new statement with a higher sequence" if decision is not Freshness.NOT_YET_VALID else "check the clock"
    )
    return refusal(decision.value, f"patch {predicate.patch_id} was not accepted", why, next_command=command)


def _encode(state: State) -> bytes:
    return rfc8785.dumps(msgspec.to_builtins(state))
