"""Who is on the other end of the agent's unix socket, as the kernel says (``SO_PEERCRED``, unix(7))."""

from __future__ import annotations

import asyncio
import os
import pwd
import socket
import struct
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol

_UCRED = struct.Struct("3i")


def user_name(uid: int) -> str:
    """The account name of ``uid``, or ``uid:<n>`` when it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid:{uid}"


class PeerProtocol(H11Protocol):
    """HTTP/1.1 that refuses callers other than root and the agent's own user.

    The caller's name becomes ``request.client.host``: the actor is what the kernel vouches for,
    never a name the caller sent.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn narrows it
        """Check the peer before a byte is read."""
        sock = cast("socket.socket", transport.get_extra_info("socket"))
        _pid, uid, _gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if uid not in (0, os.geteuid()):
            transport.abort()
            return
        super().connection_made(transport)
        self.client = (user_name(uid), uid)
