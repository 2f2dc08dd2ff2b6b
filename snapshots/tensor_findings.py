"""What tensor comparisons mean: between the builds, and of each resident generation with itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from snapshots.diff import HostDiff, TensorChange, TensorDiff
from snapshots.findings import Finding, matches
from snapshots.tensor_chunks import DIGEST_BYTES, changed_chunks


def _describe(change: TensorChange) -> tuple[str, str]:
    """The figures on which a tensor differs, before and after."""
    sides = []
    for state in (change.before, change.after):
        if state is None:
            sides.append("absent")
            continue
        alias = f", shares {state.alias}" if state.alias else ""
        sides.append(f"{state.dtype}{list(state.shape)} {state.digest[:12]}{alias}")
    return sides[0], sides[1]


def _place(change: TensorChange) -> str:
    """Where in the tensor it changed, "" when that is not known."""
    if change.before is None or change.after is None:
        return ""
    chunks = changed_chunks(change.before, change.after)
    if not chunks:
        return ""
    return f", in {len(chunks)} of {len(change.after.chunks) // DIGEST_BYTES} MiB, first in MiB {chunks[0]}"


def _derived(change: TensorChange) -> bool:
    """Computed by the engine on every side that has it; a stored weight never passes for one."""
    return all(state.derived for state in (change.before, change.after) if state is not None)


def exchange_findings(diff: TensorDiff, declared: tuple[str, ...]) -> Iterator[Finding]:
    """Old generation before the swap against the new one after the bake: only what was declared may differ."""
    for change in diff.changes:
        before, after = _describe(change)
        if _derived(change):
            what = f"computed from the build's configuration ({change.event})"
            yield Finding("expected", f"tensor {change.name}", what, before, after)
        elif matches(change.name, declared):
            yield Finding("expected", f"tensor {change.name}", f"declared change ({change.event})", before, after)
        else:
            yield Finding(
                "corruption",
                f"tensor {change.name}",
                f"undeclared change ({change.event}) from generation {diff.generation_before} to "
                f"{diff.generation_after}",
                before,
                after,
                "declare the tensor in the patch's effects if the change is meant, and sign it again",
            )
    untouched = [glob for glob in declared if not any(matches(change.name, (glob,)) for change in diff.changes)]
    for glob in untouched:
        yield Finding("unchanged", f"tensor {glob}", "declared as changed, but nothing it names differs")
    if not diff.tensors:
        yield Finding(
            "unknown",
            "tensors",
            "no tensor of the serving generation was captured",
            action="check that the engine answers an inspection",
        )
    elif not diff.changes:
        yield Finding("unchanged", "tensors", f"all {diff.tensors} tensors of the serving generation are identical")


def resident_findings(diff: HostDiff) -> Iterator[Finding]:
    """Weights are immutable while resident: the new ones must be as staged, the old ones must allow a rollback."""
    required = {
        diff.exchange.generation_before: "the previous generation: a rollback would not be exact",
        diff.exchange.generation_after: "the new generation: it no longer is what was staged and checked",
    }
    compared = {resident.generation_before: resident for resident in diff.resident}
    for generation in sorted(required.keys() | compared.keys()):
        resident = compared.get(generation)
        role = required.get(generation, "a resident generation")
        if resident is None or not resident.tensors:
            yield Finding(
                "unknown",
                f"generation {generation}",
                f"its tensors were not captured both before and after ({role.partition(':')[0]})",
                action="take the first snapshot after staging and the second before anything is released",
            )
        elif resident.build_before != resident.build_after:
            yield Finding(
                "unknown",
                f"generation {generation}",
                "its number names another build now",
                resident.build_before,
                resident.build_after,
                "take both snapshots within one transaction",
            )
        elif not resident.changes:
            yield Finding("unchanged", f"generation {generation}", f"all {resident.tensors} tensors are as they were")
        for change in resident.changes if resident is not None else ():
            before, after = _describe(change)
            yield Finding(
                "corruption",
                f"tensor {change.name} of generation {generation}",
                f"{change.event} while resident{_place(change)}; it belongs to {role}",
                before,
                after,
                "look for code that writes weights in place (out=, copy_, an optimiser step)",
            )
