"""What an exec update answers. Pure."""

from __future__ import annotations

import enum


class UpdateResult(enum.IntEnum):
    """What became of :meth:`GraphExec.update`; anything but ``SUCCESS`` left the exec as it was.

    Codes and names are those of ``cudaGraphExecUpdateResult`` (CUDA Runtime API, section Data types, and
    ``cudaGraphExecUpdate``). Every backend first compares the recordings, see
    :func:`engine.graphs.topology.compare`; the CUDA driver may then refuse for reasons of its own.
    """

    SUCCESS = 0
    ERROR = 1
    TOPOLOGY_CHANGED = 2
    NODE_TYPE_CHANGED = 3
    FUNCTION_CHANGED = 4
    PARAMETERS_CHANGED = 5
    NOT_SUPPORTED = 6
    UNSUPPORTED_FUNCTION_CHANGE = 7
    ATTRIBUTES_CHANGED = 8
