"""How the agent hands a data socket to a process that outlives its peer.

Front and engine each inherit one end of an *attach socket* from the agent. Whenever the other process is
started, the agent makes a new socket pair and sends each its end as ancillary data (``SCM_RIGHTS``,
unix(7)); the newest data socket replaces the one before it.
"""

from __future__ import annotations

import socket

# Ancillary data needs at least one byte of ordinary data to travel with (unix(7)).
_CARRIER = b"A"


def attach_pair() -> tuple[socket.socket, socket.socket]:
    """The agent's end and the process's end; messages keep their boundaries."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_data_socket(attach: socket.socket, data: socket.socket) -> None:
    """Hand over ``data``; the caller closes its own copy.

    Raises:
        OSError: the process is gone.
    """
    socket.send_fds(attach, [_CARRIER], [data.fileno()])


def receive_data_socket(attach: socket.socket) -> socket.socket | None:
    """The next data socket; None when the agent is gone. Blocks as ``attach`` does.

    Raises:
        OSError: what arrived carries no socket.
    """
    carrier, fds, _, _ = socket.recv_fds(attach, len(_CARRIER), 1)
    if not carrier:
        return None
    if len(fds) != 1:
        raise OSError("an attach message carries no data socket")
    return socket.socket(fileno=fds[0])
