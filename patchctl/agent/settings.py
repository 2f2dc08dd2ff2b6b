"""What an engine host is told when it starts; nothing here can be changed by a client."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from snapshots.store.retention import RetentionLimits

# Processes replaced within a minute: a build that cannot stay up must not be restarted for ever.
RESTARTS_MAX = 5

Environment = Literal["production", "staging", "lab"]


@dataclass(frozen=True, slots=True)
class BakeLimits:
    """How long a new generation is watched before the verdict.

    Attributes:
        settle_s_min: heaps were trimmed before the swap; they fill up again within a few steps.
        settle_s_max: the wait for responses that began on the old request path; 512 tokens at
            12 tokens/s take 43 s, and the wait ends early when the last one is done.
        bake_s: the growth window; a 16 KiB-per-event leak shows in 2 s, a 1 KiB one in about 10 s.
        bake_s_max: the window is extended up to this while requests are too few, or while growth can
            neither be shown nor ruled out.
        requests_min: completed requests before growth per request means anything.
        before_s: the window before staging that growth is compared with.
        sample_s: time between two memory samples; about ten of them fall into one request, and the
            lowest counts: buffers of a step that is under way do not look like growth.
    """

    settle_s_min: float = 3.0
    settle_s_max: float = 45.0
    bake_s: float = 12.0
    bake_s_max: float = 120.0
    requests_min: int = 8
    before_s: float = 20.0
    sample_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Settings:
    """Host settings.

    Attributes:
        environment: which of the policy's environments this host is.
        target: the name sequences are counted under.
        bake: probation limits.
        restarts_max: processes replaced within a minute before the host gives up.
        retention: how many snapshots are kept, and how large they may become together.
    """

    environment: Environment = "production"
    target: str = "default"
    bake: BakeLimits = field(default_factory=BakeLimits)
    restarts_max: int = RESTARTS_MAX
    retention: RetentionLimits = field(default_factory=RetentionLimits)
