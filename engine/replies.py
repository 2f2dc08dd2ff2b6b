"""Replies to control messages that are known at once, and what a failure answers."""

from __future__ import annotations

import logging
from concurrent.futures import CancelledError, Future

from engine.errors import EngineError
from engine.wire import Reply

_log = logging.getLogger(__name__)


def settled(reply: Reply) -> Future[Reply]:
    """A future that has its result."""
    done: Future[Reply] = Future()
    done.set_result(reply)
    return done


def refusal(error: Exception) -> Reply:
    """The reply for an error: a refusal's own code and words, or ``internal``, logged, for a defect."""
    if isinstance(error, EngineError):
        return Reply(error.code, str(error))
    if isinstance(error, CancelledError):
        return Reply("stopping", "the engine is stopping")
    _log.error("control message failed", exc_info=error)
    return Reply("internal", f"{type(error).__name__}: {error}")
