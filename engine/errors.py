"""What the engine refuses, each with the stable code that its reply to the agent carries."""

from __future__ import annotations


class EngineError(Exception):
    """A refusal or failure; ``code`` is stable, the message says why."""

    code = "engine_error"


class LoadError(EngineError):
    """A build cannot be loaded: unsupported configuration, or tensors missing, extra or mis-shaped."""

    code = "stage_failed"


class CaptureError(EngineError):
    """A function cannot become a graph, or a graph does not reproduce the function it was captured from."""

    code = "stage_failed"


class VerifyError(EngineError):
    """A staged generation does not give the tokens that the eager model gives, or gives non-finite logits."""

    code = "stage_failed"


class SwapRefusedError(EngineError):
    """A stage, swap or release that the present state does not allow."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code


class AbandonedError(EngineError):
    """Staging stopped because the generation was released."""

    code = "abandoned"
