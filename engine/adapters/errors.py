"""What an adapter refuses, each with the stable code that its reply carries."""

from __future__ import annotations

from engine.errors import EngineError, LoadError


class PackageMissingError(LoadError):
    """The vendor's package is not installed."""

    code = "engine_missing"


class PackageUnusableError(LoadError):
    """The vendor's package is installed but does not import, or lacks what the adapter needs."""

    code = "engine_unusable"


class DeviceMissingError(LoadError):
    """No GPU, or no driver for it."""

    code = "device_missing"


class OutOfDeviceMemoryError(LoadError):
    """The device ran out of memory while a model was loaded."""

    code = "out_of_memory"


class RequestRefusedError(EngineError):
    """A request asks for what this engine cannot do."""

    code = "request_refused"


class GenerationFailedError(EngineError):
    """A running request failed inside the engine."""

    code = "generation_failed"


class UpdateRefusedError(EngineError):
    """An update, exchange or release that the present state, version or memory does not allow; nothing was changed."""

    code = "update_refused"


class UpdateFailedError(EngineError):
    """An update began and did not succeed; the message says what serves now."""

    code = "stage_failed"


class BoundaryMissedError(EngineError):
    """Running requests did not end within the deadline; nothing was changed."""

    code = "boundary_missed"


class EngineFailedError(EngineError):
    """The engine is in an unknown state and serves nobody until it is started anew."""

    code = "engine_failed"
