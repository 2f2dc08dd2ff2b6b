"""The CPU backend: a tape of aten operations on fixed registers.

Replay runs no model code. Views of static tensors and constants are made once, at instantiation; every
other intermediate is dropped after its last use. Memory is freed by reference count, so a view keeps
the storage it looks at: dropping a base early can never hand its memory to someone else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from engine.graphs.port import Captured, Graph
from engine.graphs.record import Recording, check_binding, record
from engine.graphs.result import UpdateResult
from engine.graphs.topology import Call, Kind, Ref, compare, references, signature

Registers = list[Any]
# What to call, how to fetch its arguments, the register of its result, and registers not needed any more.
# A plain tuple: the interpreter unpacks nothing faster.
_Step = tuple[Callable[..., Any], Callable[[Registers], Sequence[Any]], int, tuple[int, ...]]


def _pack(*items: Any) -> list[Any]:
    return list(items)


def _fetch(registers: Sequence[int]) -> Callable[[Registers], Sequence[Any]]:
    """Fetches several registers without running Python code."""
    if len(registers) > 1:
        return operator.itemgetter(*registers)
    # For one register, `itemgetter` would give the value and no sequence.
    return operator.itemgetter(slice(registers[0], registers[0] + 1) if registers else slice(0, 0))


def _keyworded(function: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        positional = len(args) - len(names)
        return function(*args[:positional], **dict(zip(names, args[positional:], strict=True)))

    return call


@dataclass(slots=True)
class _Instruction:
    """A step before it is known how long registers live."""

    function: Callable[..., Any]
    reads: tuple[int, ...]
    result: int


@dataclass(slots=True)
class _Assembler:
    """Turns calls into instructions; numbers passed to an operation get registers as well."""

    size: int
    immediates: dict[int, Any] = field(default_factory=dict)
    instructions: list[_Instruction] = field(default_factory=list)

    def call(self, call: Call, function: Callable[..., Any]) -> None:
        """Add one recorded call."""
        keywords = dict(call.kwargs)
        if any(isinstance(arg, Ref) for arg in keywords.values()):
            function = _keyworded(function, tuple(keywords))
            args = (*call.args, *keywords.values())
        else:
            function = partial(function, **keywords) if keywords else function
            args = call.args
        reads = tuple(map(self._operand, args))
        if not call.listed:
            (output,) = call.outputs
            self._emit(function, reads, self._new() if output is None else output)
            return
        results = self._emit(function, reads, self._new())
        for number, output in enumerate(call.outputs):
            if output is not None:
                self._emit(operator.getitem, (results, self._immediate(number)), output)

    def _new(self) -> int:
        self.size += 1
        return self.size - 1

    def _immediate(self, value: Any) -> int:
        register = self._new()
        self.immediates[register] = value
        return register

    def _emit(self, function: Callable[..., Any], reads: tuple[int, ...], result: int) -> int:
        self.instructions.append(_Instruction(function, reads, result))
        return result

    def _operand(self, arg: Any) -> int:
        """The register of an argument; a list that holds tensors is put together anew at every replay."""
        if isinstance(arg, Ref):
            return arg.value
        if references(arg):
            return self._emit(_pack, tuple(map(self._operand, arg)), self._new())
        return self._immediate(arg)


@dataclass(frozen=True, slots=True)
class _Program:
    """An assembled recording: what to run once per binding, what to run at every replay, registers at rest."""

    once: tuple[_Step, ...]
    every: tuple[_Step, ...]
    rest: tuple[Any, ...]

    @classmethod
    def of(cls, recording: Recording) -> _Program:
        topology = recording.topology
        fixed = {*range(len(topology.static)), *recording.constants}
        assembler, later = _Assembler(topology.values), []
        for call, function in zip(topology.calls, recording.calls, strict=True):
            if call.kind is Kind.VIEW and fixed.issuperset(call.reads):
                assembler.call(call, function)
                fixed.update(call.makes)
            else:
                later.append((call, function))
        boundary = len(assembler.instructions)
        for call, function in later:
            assembler.call(call, function)
        steps = _steps(assembler.instructions, keep={*fixed, *assembler.immediates})
        rest: Registers = [None] * assembler.size
        for register, value in (recording.constants | assembler.immediates).items():
            rest[register] = value
        return cls(steps[:boundary], steps[boundary:], tuple(rest))


def _steps(instructions: Sequence[_Instruction], keep: set[int]) -> tuple[_Step, ...]:
    """Adds to each instruction the registers it uses last."""
    last = {
        register: number
        for number, instruction in enumerate(instructions)
        for register in (*instruction.reads, instruction.result)
        if register not in keep
    }
    dead: list[list[int]] = [[] for _ in instructions]
    for register, number in last.items():
        dead[number].append(register)
    return tuple(
        (instruction.function, _fetch(instruction.reads), instruction.result, tuple(gone))
        for instruction, gone in zip(instructions, dead, strict=True)
    )


def _run(steps: Sequence[_Step], registers: Registers) -> None:
    with torch.inference_mode():
        for function, fetch, result, dead in steps:
            registers[result] = function(*fetch(registers))
            for register in dead:
                registers[register] = None


@dataclass(frozen=True, slots=True, eq=False)
class _Bound:
    """A graph on registers of its own: replaced as a whole, so that no replay sees half an update."""

    graph: TapeGraph
    registers: Registers

    @classmethod
    def of(cls, graph: TapeGraph, static: Sequence[torch.Tensor]) -> _Bound:
        registers = list(graph.program.rest)
        registers[: len(static)] = static
        _run(graph.program.once, registers)
        return cls(graph, registers)


class TapeExec:
    """A graph bound to static tensors."""

    def __init__(self, graph: TapeGraph, static: Sequence[torch.Tensor]) -> None:
        self._static = tuple(static)
        self._bound: _Bound | None = _Bound.of(graph, static)

    @property
    def held(self) -> int:
        """Tensors held between replays: static, constant, and views of these."""
        return 0 if self._bound is None else sum(isinstance(value, torch.Tensor) for value in self._bound.registers)

    def replay(self) -> None:
        """Run every operation, in order, in this thread."""
        bound = self._bound
        assert bound is not None, "replay of a closed exec"
        try:
            _run(bound.graph.program.every, bound.registers)
        except BaseException:
            # Between replays no intermediate is held, also not after one that failed.
            if self._bound is bound:
                self._bound = _Bound.of(bound.graph, self._static)
            raise

    def update(self, graph: Graph) -> UpdateResult:
        """See :meth:`engine.graphs.port.GraphExec.update`."""
        if self._bound is None:
            return UpdateResult.ERROR
        if not isinstance(graph, TapeGraph):
            return UpdateResult.NOT_SUPPORTED
        result = compare(self._bound.graph.topology, graph.topology)
        if result is UpdateResult.SUCCESS:
            self._bound = _Bound.of(graph, self._static)
        return result

    def close(self) -> None:
        """Forget all tensors."""
        self._bound = None
        self._static = ()


class TapeGraph:
    """A recording and its program; holds constants, but no static tensor."""

    def __init__(self, recording: Recording) -> None:
        self.topology = recording.topology
        self.program = _Program.of(recording)

    @property
    def signature(self) -> str:
        """See :class:`engine.graphs.port.Graph`; computed when asked for, it takes as long as a step."""
        return signature(self.topology)

    def instantiate(self, static: Sequence[torch.Tensor]) -> TapeExec:
        """See :meth:`engine.graphs.port.Graph.instantiate`."""
        check_binding(static, self.topology.static)
        return TapeExec(self, static)


class Done:
    """A launch that returned when its work was done."""

    def done(self) -> bool:
        """See :meth:`engine.graphs.port.Launch.done`."""
        return True


class TapeBackend:
    """See :class:`engine.graphs.port.GraphBackend`."""

    name = "tape"
    tolerance = 0.0
    in_place = True

    def capture(self, function: Captured, static: Sequence[torch.Tensor]) -> TapeGraph:
        """See :meth:`engine.graphs.port.GraphBackend.capture`."""
        return TapeGraph(record(function, static))

    def stream(self) -> AbstractContextManager[None]:
        """The calling thread."""
        return nullcontext()

    def launched(self) -> Done:
        """See :meth:`engine.graphs.port.GraphBackend.launched`."""
        return Done()

    def wait(self) -> None:
        """Replay returned, so it is done."""

    def close(self) -> None:
        """Nothing outlives the execs."""
