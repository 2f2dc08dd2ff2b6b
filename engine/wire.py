"""Messages between front and engine (data socket) and from the agent to both (control sockets).

Every frame is a 4-byte little-endian length and a msgpack body (see :mod:`engine.framing`). The data
socket is ordered: when the front reads :class:`Exchanged`, every token before it was made by the old
generation and every token after it by the new one, so the front swaps its half on that message.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "cancelled", "error"]


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling options, as in the OpenAI API. ``temperature`` 0 is greedy; ``seed`` None is random."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


class Submit(msgspec.Struct, frozen=True, tag=True):
    """front → engine: a request. ``stop_tokens`` end generation without being emitted."""

    request: int
    prompt: tuple[int, ...]
    tokens_max: int
    sampling: Sampling
    stop_tokens: tuple[int, ...] = ()


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """front → engine: the client left, or a stop string was found."""

    request: int


class Token(msgspec.Struct, frozen=True, array_like=True):
    """One generated token. ``token`` is -1 when only ``finish`` is news."""

    request: int
    token: int
    finish: FinishReason | None = None


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """engine → front: the tokens of one step, all made by ``generation``."""

    generation: int
    tokens: tuple[Token, ...]


class Exchanged(msgspec.Struct, frozen=True, tag=True):
    """engine → front: from the next message on, ``generation`` serves."""

    generation: int


ToEngine = Submit | Cancel
ToFront = Tokens | Exchanged


class Stage(msgspec.Struct, frozen=True, tag=True):
    """agent → engine and front: load a verified build beside the active one, up to READY."""

    generation: int
    folder: str
    digest: str


class Swap(msgspec.Struct, frozen=True, tag=True):
    """agent → engine: exchange at the next step boundary that ``policy`` allows.

    ``auto`` carries KV when weights digest and KV signature are equal, else recomputes ahead.
    The reply comes when the exchange happened or ``deadline_s`` passed (then READY again, code
    ``boundary_missed``). Rollback is the same message naming the old generation.
    """

    generation: int
    policy: Literal["auto", "carry", "recompute", "drain"] = "auto"
    deadline_s: float = 30.0


class Release(msgspec.Struct, frozen=True, tag=True):
    """agent → engine and front: free a generation that does not serve (commit frees the old one)."""

    generation: int


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """agent → engine: digest every named tensor of ``generation``."""

    generation: int


class Stats(msgspec.Struct, frozen=True, tag=True):
    """agent → engine and front: counters and latency windows, as a flat JSON object."""


class Arm(msgspec.Struct, frozen=True, tag=True):
    """agent → engine and front: start write tracking of this process's own memory."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """agent → engine and front: finish and exit 0."""


Control = Stage | Swap | Release | Inspect | Stats | Arm | Stop


class Reply(msgspec.Struct, frozen=True):
    """Answer to one control message. ``code`` is "" on success, else a stable identifier."""

    code: str = ""
    what: str = ""
    data: dict[str, Any] = {}

    @property
    def ok(self) -> bool:
        """True when the message was carried out."""
        return self.code == ""
