"""The source's half of the nixl transport: registers the arena once, and hands out how to read it.

    after the handshake     source -> puller   bytes of the arena, its address, length of the agent's metadata
                                               (8 + 8 + 4 bytes, little-endian), the metadata

The socket stays open: its end says that the source's process is gone. Reads are one-sided where UCX has shared memory
or RDMA; over its TCP the source's process must take part: a thread lets its agent go on while anybody is connected.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading

import numpy as np

from kv_transfer.transport import Authorize, Metadata
from kv_transfer.transports.listener import Listener
from kv_transfer.transports.nixl_agent import MEMORY, MakeAgent, NixlAgent, make_nixl_agent
from kv_transfer.transports.watch import until_hung_up
from pd_engine.cache.arena import Arena

NAME = "nixl"
WELCOME = struct.Struct("<QQI")
MAX_METADATA_BYTES = 64 * 1024
PROGRESS_PERIOD_S = 0.000_2


class NixlSource:
    """Args:
    host: the address on which pullers ask; the bytes go over whatever UCX finds.
    """

    name = NAME

    def __init__(self, *, secret: str, host: str, make_agent: MakeAgent = make_nixl_agent) -> None:
        self._secret = secret
        self._host = host
        self._make_agent = make_agent
        self._port = 0
        self._welcome = b""
        self._listener: Listener | None = None
        self._num_pullers = 0
        self._has_pullers = threading.Event()
        self._is_stopping = threading.Event()
        self._thread: threading.Thread | None = None

    async def start(self, arena: Arena, epoch: str, authorize: Authorize) -> None:
        agent = await asyncio.to_thread(self._make_agent, f"source-{epoch}")
        octets = np.frombuffer(arena.buffer, dtype=np.uint8)
        region = (octets.ctypes.data, arena.num_bytes, 0, "")
        registration = await asyncio.to_thread(agent.register_memory, [region], MEMORY)
        metadata = agent.get_agent_metadata()
        assert len(metadata) <= MAX_METADATA_BYTES, len(metadata)
        self._welcome = WELCOME.pack(arena.num_bytes, octets.ctypes.data, len(metadata)) + metadata
        sock = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET, socket.SOCK_STREAM)
        sock.bind((self._host, 0))
        self._port = sock.getsockname()[1]
        self._listener = Listener(sock, secret=self._secret, epoch=epoch, authorize=authorize, serve=self._serve)
        self._listener.start()
        self._thread = threading.Thread(target=self._progress, args=(agent, registration), name="kv-nixl-source")
        self._thread.start()

    def metadata(self) -> Metadata:
        return {"host": self._host, "port": self._port}

    async def stop(self) -> None:
        """Hangs up on all pullers; afterwards the arena cannot be read any more."""
        if self._listener is None or self._thread is None:
            return
        await self._listener.stop()
        self._listener = None
        self._is_stopping.set()
        self._has_pullers.set()
        await asyncio.to_thread(self._thread.join)

    async def _serve(self, puller: socket.socket, token: str) -> None:
        self._num_pullers += 1
        self._has_pullers.set()
        try:
            await asyncio.get_running_loop().sock_sendall(puller, self._welcome)
            await until_hung_up(puller)
        finally:
            self._num_pullers -= 1
            if not self._num_pullers:
                self._has_pullers.clear()

    def _progress(self, agent: NixlAgent, registration: object) -> None:
        """In a thread of its own, the only one that uses the agent from now on."""
        while not self._is_stopping.is_set():
            self._has_pullers.wait()
            agent.update_notifs()
            self._is_stopping.wait(PROGRESS_PERIOD_S)
        agent.deregister_memory(registration)
