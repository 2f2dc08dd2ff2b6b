"""Frames survive any chunking; what is not a frame is refused."""

from __future__ import annotations

import socket
import struct
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.framing import FRAME_BYTES_MAX, Connection, Decoder, FramingError, encode_frame
from engine.wire import Cancel, Token, Tokens


@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_any_chunking_gives_the_same_bodies(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(encode_frame(body) for body in bodies)
    decoder, found = Decoder(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += decoder.feed(stream[:size])
        stream = stream[size:]
    assert [msgspec.msgpack.decode(body) for body in found] == bodies
    assert decoder.buffered_bytes == 0


def test_an_oversized_length_is_refused_before_its_body_arrives() -> None:
    with pytest.raises(FramingError, match="announced"):
        Decoder().feed(struct.pack("<I", FRAME_BYTES_MAX + 1))


def test_an_oversized_message_is_not_sent() -> None:
    with pytest.raises(FramingError, match="more than"):
        encode_frame(bytes(FRAME_BYTES_MAX + 1))


def test_a_stream_that_ends_inside_a_frame_is_an_error() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(encode_frame(Cancel(1)) + b"\x05\x00")
        there.shutdown(socket.SHUT_WR)
        connection = Connection(here)
        assert connection.recv() is not None
        with pytest.raises(FramingError, match="inside a frame"):
            connection.recv()


def test_concurrent_senders_never_interleave() -> None:
    here, there = socket.socketpair()
    with here, there:
        sender, receiver = Connection(here), Connection(there)
        message = Tokens(1, tuple(Token(i, i) for i in range(5000)))
        threads = [threading.Thread(target=sender.send, args=(message,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for _ in threads:
            body = receiver.recv()
            assert body is not None
            assert msgspec.msgpack.decode(body, type=Tokens) == message
        for thread in threads:
            thread.join()
