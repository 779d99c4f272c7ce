"""Notices that the process at the other end of an idle socket is gone."""

from __future__ import annotations

import asyncio
import socket


async def until_hung_up(sock: socket.socket) -> None:
    """Returns when the peer hangs up, whatever it sends before."""
    try:
        while await asyncio.get_running_loop().sock_recv(sock, 1):
            pass
    except OSError:
        return
