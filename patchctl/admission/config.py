"""The settings the shipped policies read, at ``data.patchctl.config``; a misspelt key is refused on load."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from patchctl.admission.facts import Environment, Name, UInt

Level = Literal["pass", "hold", "deny"]


class _Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base: immutable, every key present, no unknown key."""


class AllowedIdentity(_Setting, frozen=True):
    """Who may sign for which channels. All of domain, issuer and identity must be equal, byte for byte."""

    domain: Name
    issuer: Name
    identity: Name
    channels: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1)]


class Levels(_Setting, frozen=True):
    """What each kind of missing or weak evidence means in one environment; unknown memory never passes."""

    clock_unsynced: Level
    memory_unknown: Literal["hold", "deny"]
    provenance_missing: Level
    qualification_missing: Level
    qualification_stale: Level
    signing_time_missing: Level
    snapshot_missing: Level
    snapshot_stale: Level
    transparency_missing: Level
    transparency_unreachable: Level


class EnvironmentConfig(_Setting, frozen=True):
    """Rules of one environment. ``domains``: trust domains whose signatures count there."""

    domains: tuple[Name, ...]
    levels: Levels


class GateConfig(_Setting, frozen=True):
    """The whole document.

    Attributes:
        identities: allowed signers; empty means that nobody is trusted.
        environments: one entry for each environment.
        declaration_partial: level of a patch whose actions touch what its declaration leaves out.
        clock_skew_s: how far in the future a signing or creation time may lie, for clocks that disagree.
    """

    identities: tuple[AllowedIdentity, ...]
    environments: dict[Environment, EnvironmentConfig]
    declaration_partial: Level
    clock_skew_s: UInt
