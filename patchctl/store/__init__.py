"""The host's build store: immutable builds by digest, added atomically, never half."""

from __future__ import annotations

from patchctl.store.builds import BuildStore

__all__ = ["BuildStore"]
