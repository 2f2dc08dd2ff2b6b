"""The CPU backend: a tape of aten operations with fixed arguments.

Replay runs no model code. Views of static tensors and constants are made once, at instantiation; every
other intermediate is dropped after its last use. Memory is freed by reference count, so a view keeps
the storage it looks at: dropping a base early can never hand its memory to someone else.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import CaptureError
from engine.graphs.port import Captured
from engine.graphs.record import Call, Recording, Ref, describe, map_nested, record


@dataclass(frozen=True, slots=True)
class _Instruction:
    """A call, ready to run: ``args`` with constants in place, and where tensors have to be filled in."""

    op: Any
    args: tuple[Any, ...]
    plain: tuple[tuple[int, int], ...]
    nested: tuple[int, ...]
    kwargs: dict[str, Any]
    named: tuple[tuple[str, int], ...]
    outputs: tuple[int | None, ...]
    dead: tuple[int, ...]


def _refs(arg: Any) -> list[int]:
    if isinstance(arg, Ref):
        return [arg.value]
    return [value for item in arg for value in _refs(item)] if isinstance(arg, list | tuple) else []


def _reads(call: Call) -> list[int]:
    return _refs((*call.args, *call.kwargs.values()))


def _made(call: Call) -> list[int]:
    return [output for output in call.outputs if output is not None]


def _instruction(call: Call, dead: tuple[int, ...]) -> _Instruction:
    return _Instruction(
        op=call.op,
        args=call.args,
        plain=tuple((i, arg.value) for i, arg in enumerate(call.args) if isinstance(arg, Ref)),
        nested=tuple(i for i, arg in enumerate(call.args) if isinstance(arg, list) and _refs(arg)),
        kwargs={key: arg for key, arg in call.kwargs.items() if not isinstance(arg, Ref)},
        named=tuple((key, arg.value) for key, arg in call.kwargs.items() if isinstance(arg, Ref)),
        outputs=call.outputs,
        dead=dead,
    )


def _run(step: _Instruction, values: list[Any]) -> None:
    args = list(step.args)
    for position, value in step.plain:
        args[position] = values[value]
    for position in step.nested:
        args[position] = map_nested(lambda item: values[item.value] if isinstance(item, Ref) else item, args[position])
    kwargs = step.kwargs
    if step.named:
        kwargs = kwargs | {key: values[value] for key, value in step.named}
    result = step.op(*args, **kwargs)
    if len(step.outputs) == 1:
        output = step.outputs[0]
        if output is not None:
            values[output] = result
    else:
        for output, made in zip(step.outputs, result, strict=True):
            if output is not None:
                values[output] = made
    for value in step.dead:
        values[value] = None


@dataclass(frozen=True, slots=True)
class _Program:
    """A compiled recording: what to run once per binding, and what to run at every replay."""

    views: tuple[_Instruction, ...]
    steps: tuple[_Instruction, ...]

    @classmethod
    def of(cls, recording: Recording) -> _Program:
        fixed = {*range(len(recording.static)), *recording.constants}
        views, calls = [], []
        for call in recording.calls:
            if call.op.is_view and fixed.issuperset(_reads(call)):
                views.append(_instruction(call, ()))
                fixed.update(_made(call))
            else:
                calls.append(call)
        last_use = {value: number for number, call in enumerate(calls) for value in (*_reads(call), *_made(call))}
        dead: list[list[int]] = [[] for _ in calls]
        for value, number in last_use.items():
            if value not in fixed:
                dead[number].append(value)
        steps = (_instruction(call, tuple(gone)) for call, gone in zip(calls, dead, strict=True))
        return cls(tuple(views), tuple(steps))


class TapeExec:
    """A program bound to static tensors."""

    def __init__(self, program: _Program, values: list[Any]) -> None:
        self._steps = program.steps
        self._values = values
        with torch.no_grad():
            for view in program.views:
                _run(view, values)

    @property
    def held(self) -> int:
        """Tensors held between replays: static, constant, and views of these."""
        return sum(value is not None for value in self._values)

    def replay(self) -> None:
        """Run every operation, in order, in this thread."""
        with torch.no_grad():
            for step in self._steps:
                _run(step, self._values)

    def close(self) -> None:
        """Forget all tensors."""
        self._steps = ()
        self._values = []


class TapeGraph:
    """A recording and its program; holds constants, but no static tensor."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._program = _Program.of(recording)

    @property
    def signature(self) -> str:
        """See :class:`engine.graphs.port.Graph`; computed when asked for, it takes as long as a step."""
        return self._recording.signature()

    def instantiate(self, static: Sequence[torch.Tensor]) -> TapeExec:
        """See :meth:`engine.graphs.port.Graph.instantiate`."""
        for number, (tensor, expected) in enumerate(zip(static, self._recording.static, strict=True)):
            if describe(tensor) != expected:
                raise CaptureError(f"static tensor {number} is {describe(tensor)}, captured with {expected}")
        values: list[Any] = [None] * self._recording.values
        values[: len(static)] = static
        for value, constant in self._recording.constants.items():
            values[value] = constant
        return TapeExec(self._program, values)


class TapeBackend:
    """See :class:`engine.graphs.port.GraphBackend`."""

    name = "tape"

    def capture(self, function: Captured, static: Sequence[torch.Tensor]) -> TapeGraph:
        """See :meth:`engine.graphs.port.GraphBackend.capture`."""
        return TapeGraph(record(function, static))

    def stream(self) -> AbstractContextManager[None]:
        """The calling thread."""
        return nullcontext()

    def wait(self) -> None:
        """Replay returned, so it is done."""

    def close(self) -> None:
        """Nothing outlives the execs."""
