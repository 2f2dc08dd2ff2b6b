"""The claims a patch file makes about itself, in the form in which they are signed. Pure."""

from __future__ import annotations

from msgspec import structs

from patchctl.bundle.config import PatchConfig
from patchctl.trust.statement import Declared, HotfixPredicate


def predicate_of(config: PatchConfig) -> HotfixPredicate:
    """The hotfix predicate that says exactly what ``config`` says."""
    return HotfixPredicate(
        patch_id=config.patch_id,
        channel=config.channel,
        sequence=config.sequence,
        created_unix=config.created_unix,
        expires_unix=config.expires_unix,
        author=config.author,
        base_digest=config.base_digest,
        target_digest=config.target_digest,
        engine_kind=config.engine_kind,
        declared=Declared(
            files=tuple(sorted(set(config.declared.files))),
            tensors=tuple(sorted(set(config.declared.tensors))),
            growth_bytes_per_request_max=config.declared.growth_bytes_per_request_max,
        ),
    )


def first_difference(config: PatchConfig, signed: HotfixPredicate) -> str:
    """The first field in which the signed claims and the patch file disagree, or ""."""
    claimed = predicate_of(config)
    for field in structs.fields(HotfixPredicate):
        if getattr(claimed, field.name) != getattr(signed, field.name):
            return field.name
    return ""
