from __future__ import annotations

import pytest

from patchctl.trust import strictjson


def test_json_of_integers_strings_and_containers_is_read() -> None:
    assert strictjson.loads('{"a":[1,-2,true,null,"\u00e9"]}'.encode()) == {"a": [1, -2, True, None, "\u00e9"]}


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":1,"a":1}',
        b'{"b":{"a":1,"\\u0061":2}}',
        b"[1.0]",
        b"[1e3]",
        b"[NaN]",
        b"[-Infinity]",
        b"\xef\xbb\xbf[]",
        "[]".encode("utf-16"),
        b'["\xff"]',
        b"[1] [2]",
        b"[" * 200_000,
        b"[" + b"9" * 10_000 + b"]",
    ],
)
def test_what_readers_disagree_about_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        strictjson.loads(raw)
