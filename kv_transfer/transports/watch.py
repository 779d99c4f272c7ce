"""What the peer at the other end of a socket does on which nothing is due from it."""

from __future__ import annotations

import asyncio
import logging
import socket

log = logging.getLogger(__name__)


async def until_hung_up(sock: socket.socket) -> None:
    """Returns when the peer hangs up or sends anything: what is not due is not waited for, and not read."""
    try:
        if await asyncio.get_running_loop().sock_recv(sock, 1):
            log.warning("a peer has sent what nobody asked for")
    except OSError as error:
        log.debug("a peer has gone: %s", error)


def is_silent(sock: socket.socket) -> bool:
    """Whether the peer is there, and has sent nothing that is not read yet."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
