"""Reads pickled allocator snapshots: plain data only, nothing in them is ever called.

Two fences. Before anything is built, every opcode is checked against the few that plain data needs: an opcode that
could name a global, call, or build an object is refused, and so are lengths and memo indices that would make the
unpickler reserve memory that the file does not account for. Then it is read by an Unpickler that knows no globals.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any, NoReturn

# A snapshot without traces holds 0.1-1 KB per block: 64 MiB are some 100 000 blocks with their stacks.
PICKLE_BYTES_MAX = 64 << 20
# Each opcode makes at most one object, of about 100 bytes: below 1 GiB in all. A file of 1.2 MB has 0.27 million.
OPCODES_MAX = 8_000_000
# Addresses and sizes have 64 bits, with room for a sign. Larger integers could be crafted to share one hash.
_INTEGER_BYTES_MAX = 9

# Opcodes by the fixed length of their argument.
_FIXED = {
    "PROTO": 1,
    "FRAME": 8,
    "STOP": 0,
    "MARK": 0,
    "NONE": 0,
    "NEWTRUE": 0,
    "NEWFALSE": 0,
    "BININT": 4,
    "BININT1": 1,
    "BININT2": 2,
    "BINFLOAT": 8,
    "EMPTY_DICT": 0,
    "EMPTY_LIST": 0,
    "EMPTY_TUPLE": 0,
    "TUPLE": 0,
    "TUPLE1": 0,
    "TUPLE2": 0,
    "TUPLE3": 0,
    "APPEND": 0,
    "APPENDS": 0,
    "SETITEM": 0,
    "SETITEMS": 0,
    "MEMOIZE": 0,
    "BINPUT": 1,
    "LONG_BINPUT": 4,
    "BINGET": 1,
    "LONG_BINGET": 4,
}
# Opcodes whose argument is preceded by its length, by the length of that.
_COUNTED = {"LONG1": 1, "SHORT_BINUNICODE": 1, "BINUNICODE": 4, "BINUNICODE8": 8, "SHORT_BINBYTES": 1, "BINBYTES": 4}
_INDEXED = ("BINPUT", "LONG_BINPUT")

_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_FIXED_BY_CODE = {code: _FIXED[name] for code, name in _NAMES.items() if name in _FIXED}
_COUNTED_BY_CODE = {code: _COUNTED[name] for code, name in _NAMES.items() if name in _COUNTED}
_CODE = {name: code for code, name in _NAMES.items()}
_INDEXED_CODES = frozenset(_CODE[name] for name in _INDEXED)


class PickleRefusedError(ValueError):
    """The pickle is not plain data, is damaged, or asks for more memory than it accounts for."""


class _PlainUnpickler(pickle.Unpickler):
    """Knows no globals."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise PickleRefusedError(f"names the global {module}.{name}")

    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise PickleRefusedError(f"refers to an outside object {str(pid)[:40]!r}")


def _check(raw: bytes) -> None:
    """Walk the opcodes without building anything.

    Raises:
        PickleRefusedError: see :func:`load_plain`.
    """
    at, seen, end = 0, 0, len(raw)
    while at < end:
        code = raw[at]
        at += 1
        seen += 1
        if seen > OPCODES_MAX:
            raise PickleRefusedError(f"more than {OPCODES_MAX} opcodes")
        length = _FIXED_BY_CODE.get(code)
        if length is None:
            counted = _COUNTED_BY_CODE.get(code)
            if counted is None:
                raise PickleRefusedError(f"opcode {_NAMES.get(code, hex(code))} at byte {at - 1} is not plain data")
            length = int.from_bytes(raw[at : at + counted], "little")
            at += counted
            if code == _CODE["LONG1"] and length > _INTEGER_BYTES_MAX:
                raise PickleRefusedError(f"an integer of {length} bytes at byte {at}")
        elif code in _INDEXED_CODES and int.from_bytes(raw[at : at + length], "little") > seen:
            raise PickleRefusedError(f"memo index beyond all objects at byte {at - 1}")
        at += length
        if code == _CODE["STOP"]:
            break
    if at != end or not end or raw[-1] != _CODE["STOP"]:
        raise PickleRefusedError("it is cut short, or something follows its end")


def load_plain(raw: bytes) -> Any:
    """Dicts, lists, tuples, strings, bytes, numbers, booleans and None from a pickle of any binary protocol.

    Shared references stay shared, so what comes back may look larger than it is: bound what walks over it.

    Raises:
        PickleRefusedError: anything else is in it, or it is larger than :data:`PICKLE_BYTES_MAX`.
    """
    if len(raw) > PICKLE_BYTES_MAX:
        raise PickleRefusedError(f"{len(raw)} bytes; the limit is {PICKLE_BYTES_MAX}")
    _check(raw)
    try:
        return _PlainUnpickler(io.BytesIO(raw)).load()
    except PickleRefusedError:
        raise
    except Exception as error:  # a boundary: damaged streams make the unpickler raise nearly anything
        raise PickleRefusedError(f"it is damaged: {type(error).__name__}: {str(error)[:80]}") from error
