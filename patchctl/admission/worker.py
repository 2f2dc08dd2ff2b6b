"""The child process that runs the embedded Rego engine (regorus, native code) on the parent's behalf.

``python -P -m patchctl.admission.worker FD LIMITS`` talks over the socket ``FD``: a 4-byte little-endian length and
a JSON body each way. ``load`` compiles a policy, ``eval`` evaluates one query. Standard library
only, because its start is part of a cold decision. Nothing here decides: the parent judges every reply.
"""

from __future__ import annotations

import json
import math
import os
import resource
import socket
import struct
import sys
import time
from typing import Any

HEADER = struct.Struct("<I")
# regorus writes this instead of a result when the rule has no value.
_UNDEFINED = '"<undefined>"'


class _Server:
    """Holds the compiled policy between two requests."""

    def __init__(self, cpu_s: int) -> None:
        self._cpu_s = cpu_s
        self._engine: Any = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request; every failure is a reply."""
        self._allow_cpu()
        try:
            return self._load(request) if request["op"] == "load" else self._evaluate(request)
        except ModuleNotFoundError as error:
            return {"error": "gate.engine_missing", "why": str(error)}
        except BaseException as error:  # a native panic is no Exception
            why = str(error).partition("\n\nStack backtrace")[0].strip()
            return {"error": "gate.policy_failed", "why": f"{type(error).__name__}: {why}"[:2000]}

    def _allow_cpu(self) -> None:
        """Grant this request ``cpu_s`` seconds: the kernel counts a process's whole life."""
        limit = math.ceil(time.process_time()) + self._cpu_s
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))

    def _load(self, request: dict[str, Any]) -> dict[str, Any]:
        import regorus

        self._engine = None
        engine = regorus.Engine()
        for name, source in request["modules"]:
            engine.add_policy(name, source)
        engine.add_data_json(request["data"])
        engine.eval_query("true")  # compiles every module now, errors included, instead of in each evaluation
        self._engine = engine
        return {}

    def _evaluate(self, request: dict[str, Any]) -> dict[str, Any]:
        # A clone: nothing one evaluation computed can be seen by the next.
        engine = self._engine.clone()
        engine.set_input_json(request["input"])
        result = engine.eval_rule_as_json(request["query"])
        if result == _UNDEFINED:
            return {"error": "gate.result_undefined", "why": f"{request['query']} has no value"}
        return {"value": json.loads(result)}


def _receive(channel: socket.socket, count: int) -> bytes:
    raw = b""
    while len(raw) < count:
        part = channel.recv(count - len(raw))
        if not part:
            raise SystemExit(0)  # the parent is gone or done
        raw += part
    return raw


def main() -> None:
    """Serve requests until the parent closes the socket."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    memory_bytes, cpu_s = int(sys.argv[2]), int(sys.argv[3])
    for what, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CORE, 0),  # a core would spill facts to disk
        (resource.RLIMIT_FSIZE, 0),  # nothing here writes files
    ):
        resource.setrlimit(what, (limit, limit))
    os.chdir("/")
    server = _Server(cpu_s)
    while True:
        (count,) = HEADER.unpack(_receive(channel, HEADER.size))
        reply = json.dumps(server.answer(json.loads(_receive(channel, count)))).encode()
        channel.sendall(HEADER.pack(len(reply)) + reply)


if __name__ == "__main__":
    main()
