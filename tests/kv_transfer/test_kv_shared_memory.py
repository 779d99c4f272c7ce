"""Shared memory with a source that does not do what it should."""

from __future__ import annotations

import secrets
import socket

import pytest

from kv_transfer.transports.shared_memory import LENGTH, SharedMemoryPull, SharedMemorySource
from pd_engine.cache.arena import Arena
from pd_engine.errors import Unavailable
from pd_kernels.block_copy import copy_and_checksum_pieces
from support.handoffs import LAYOUT, SECRET
from support.leaks import assert_nothing_left

NUM_BLOCKS = 4


class HangsUpHalfway(SharedMemorySource):
    """Passes the descriptor, but not all of the length before it."""

    async def _serve(self, puller: socket.socket, token: str) -> None:
        assert self._arena is not None
        socket.send_fds(puller, [LENGTH.pack(self._arena.num_bytes)[:3]], [self._arena.fd])


async def test_a_descriptor_that_came_before_the_source_hung_up_is_closed() -> None:
    epoch = secrets.token_hex(16)
    async with assert_nothing_left():
        offered, own = Arena(LAYOUT, NUM_BLOCKS), Arena(LAYOUT, NUM_BLOCKS)
        source = HangsUpHalfway(secret=SECRET)
        await source.start(offered, epoch, lambda token: frozenset(range(NUM_BLOCKS)))
        pull = SharedMemoryPull(own, secret=SECRET, copy=copy_and_checksum_pieces)
        with pytest.raises(Unavailable):
            await pull.connect(
                source.metadata(), epoch=epoch, token=secrets.token_hex(16), num_blocks=NUM_BLOCKS, timeout_s=5.0
            )
        await pull.close()
        await source.stop()
        for arena in (offered, own):
            arena.close()
        del offered, own, arena, source, pull
