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
    """Sampling options, as in the OpenAI API; ``top_k`` and ``min_p`` as in vLLM's.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 keeps the whole vocabulary.
        seed: None is random.
        logit_bias: (token id, added to its logit) pairs.
        logprobs: how many alternatives to report per token; None reports nothing, 0 the chosen token alone.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None


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


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log probabilities at one position: of the chosen token, and by token id of the likeliest."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


class Token(msgspec.Struct, frozen=True, array_like=True):
    """One generated token. ``token`` is -1 when only ``finish`` is news."""

    request: int
    token: int
    finish: FinishReason | None = None
    logprobs: Logprobs | None = None


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """engine → front: the tokens of one step, all made by ``generation``."""

    generation: int
    tokens: tuple[Token, ...]


class Exchanged(msgspec.Struct, frozen=True, tag=True):
    """engine → front: from the next message on, ``generation`` serves. Also the first message after an attach."""

    generation: int


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """engine → front: a request left the queue; ``cached_tokens`` of its prompt came from the prefix cache."""

    request: int
    cached_tokens: int


class Load(msgspec.Struct, frozen=True, tag=True):
    """engine → front: gauges and counters for /metrics, a few times a second while the engine works.

    Attributes:
        kv_blocks_used: blocks that running sequences hold; blocks kept for their prefix alone are not counted.
        prefix_query_tokens: prompt tokens looked up in the prefix cache so far.
        prefix_hit_tokens: of these, found there.
    """

    running: int
    waiting: int
    kv_blocks: int
    kv_blocks_used: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    swaps: int
    steps: int


ToEngine = Submit | Cancel
ToFront = Tokens | Exchanged | Admitted | Load


class Stage(msgspec.Struct, frozen=True, tag=True):
    """agent → engine and front: load a verified build beside the active one, up to READY.

    ``commit_mode`` ``exchange`` captures graphs of its own; ``copy`` uses the active generation's graphs and
    overwrites its weights at the boundary; ``auto`` copies only when there is no memory for an exchange.
    """

    generation: int
    folder: str
    digest: str
    commit_mode: Literal["auto", "exchange", "copy"] = "auto"


class Swap(msgspec.Struct, frozen=True, tag=True):
    """agent → engine: exchange at the next step boundary that ``policy`` allows.

    ``auto`` carries KV when weights digest and KV signature are equal, else recomputes ahead.
    The reply comes when the exchange happened or ``deadline_s`` passed (then READY again, code
    ``boundary_missed``). Rollback is the same message naming the old generation. A drain that lasts longer
    than ``hard_stop_after_s`` (None: never) ends the sequences still running with finish ``cancelled``.
    """

    generation: int
    policy: Literal["auto", "carry", "recompute", "drain"] = "auto"
    deadline_s: float = 30.0
    hard_stop_after_s: float | None = None


class Release(msgspec.Struct, frozen=True, tag=True):
    """agent → engine and front: free a generation that does not serve (commit frees the old one)."""

    generation: int


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """agent → engine: digest every named tensor and buffer of ``generation``; says where each lies."""

    generation: int


class RestoreTensor(msgspec.Struct, frozen=True):
    """One tensor to restore.

    Attributes:
        name: as :class:`Inspect` lists it; not an alias.
        dtype: that it must have.
        shape: that it must have.
        address: where its memory was when the bytes were stored, and must still be.
        digest: of the bytes, as ``Inspect`` would give it.
        offset: of the bytes in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    address: int
    digest: str
    offset: int


class Restore(msgspec.Struct, frozen=True, tag=True):
    """agent → engine: put stored bytes back into tensors of a resident generation, between two steps.

    Attributes:
        digest: of the build that the generation must be.
        path: file with the bytes of all tensors.
    """

    generation: int
    digest: str
    path: str
    tensors: tuple[RestoreTensor, ...]


class Stats(msgspec.Struct, frozen=True, tag=True):
    """agent → engine and front: counters and latency windows, as a flat JSON object."""


class Arm(msgspec.Struct, frozen=True, tag=True):
    """agent → engine and front: start write tracking of this process's own memory."""


class Reclaim(msgspec.Struct, frozen=True, tag=True):
    """agent → engine: set the reclaim hook, and run it once at the next boundary when ``now``.

    ``threshold`` reclaims by itself above ``high`` of memory in use until it is below ``low``; ``explicit``
    only when told; None leaves the policy as it is.
    """

    policy: Literal["explicit", "threshold"] | None = None
    high: float = 0.85
    low: float = 0.75
    now: bool = False


class Stop(msgspec.Struct, frozen=True, tag=True):
    """agent → engine and front: finish and exit 0."""


Control = Stage | Swap | Release | Inspect | Restore | Stats | Arm | Reclaim | Stop


class Reply(msgspec.Struct, frozen=True):
    """Answer to one control message. ``code`` is "" on success, else a stable identifier."""

    code: str = ""
    what: str = ""
    data: dict[str, Any] = {}

    @property
    def ok(self) -> bool:
        """True when the message was carried out."""
        return self.code == ""
