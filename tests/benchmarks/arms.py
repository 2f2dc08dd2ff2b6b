"""Arms of a comparison in processes of their own: all loaded, one at a time at work, so that neither meets the other.

The parent sends a JSON line and waits for one; between two questions a child only waits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

_STOP_S = 10.0


class Arm:
    """``python -m tests.benchmarks.<module>`` with arguments, until the block ends."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"tests.benchmarks.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, **question: Any) -> dict[str, Any]:
        """One question, one answer.

        Raises:
            RuntimeError: the child ended instead; its own words are on stderr.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._module} ended with {self._process.wait(_STOP_S)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def answer_with(handle: Callable[..., dict[str, Any]]) -> None:
    """The child's side: call ``handle`` with each question until stdin ends."""
    # Whatever a library prints must not be taken for an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        answers.write(json.dumps(handle(**json.loads(line))) + "\n")
        answers.flush()
