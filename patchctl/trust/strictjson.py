"""JSON without second readings: one meaning for every reader, or refused.

Most parsers keep the last of two equal keys, some the first; a signature over such a text means different
things to different verifiers. Floats are refused too: no format here has one, and they do not compare.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r}")
    return result


def _no_float(text: str) -> NoReturn:
    raise ValueError(f"{text} is not an integer")


def loads(raw: bytes) -> Any:
    """Parse UTF-8 JSON that has no duplicate key, float, NaN or infinity.

    Raises:
        ValueError: anything else, nesting too deep for the interpreter included.
    """
    text = raw.decode("utf-8")
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_float=_no_float, parse_constant=_no_float)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
