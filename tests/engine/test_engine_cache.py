"""Blocks, their memory and their layout."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch

from pd_engine.cache.arena import PAGE_BYTES, Arena, component_offsets
from pd_engine.cache.blocks import BlockPool
from pd_engine.cache.layout import CacheLayout, Component, ComponentKind
from pd_engine.errors import ResourceExhausted
from pd_engine.model.config import ModelConfig, cache_layout
from support.engine_v3_config import DEEPSEEK_V3

LAYOUT = CacheLayout(
    block_size=4,
    components=tuple(
        Component(name=name, kind=ComponentKind.PAGED, width=width, dtype=dtype)
        for name, width, dtype in (("layers.0", 6, "bf16"), ("layers.1", 6, "bf16"), ("mtp.0", 3, "fp32"))
    ),
)


def test_sizes() -> None:
    assert LAYOUT.bytes_per_token == 12 + 12 + 12
    assert [LAYOUT.piece_bytes(component) for component in range(3)] == [48, 48, 48]
    assert LAYOUT.block_bytes == 144
    assert [LAYOUT.num_blocks_for(tokens) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]
    v3 = cache_layout(ModelConfig.parse(DEEPSEEK_V3), "bf16", 16, with_mtp=False)
    assert v3.piece_bytes(60) == 18_432


def test_pieces_are_the_tensors_bytes() -> None:
    arena = Arena(LAYOUT, 5)
    for component, tensor in enumerate(arena.components):
        assert tensor.shape == (5, 4, LAYOUT.components[component].width)
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) + component)
        for block in range(5):
            raw = tensor[block].contiguous().view(torch.uint8).numpy().tobytes()
            assert arena.piece(component, block).tobytes() == raw
            assert arena.piece(component, block, 3).tobytes() == raw[: 3 * LAYOUT.components[component].slot_bytes]
    arena.piece(2, 4)[:4] = np.float32(7.5).tobytes()
    assert arena.components[2][4, 0, 0] == 7.5
    arena.close()


def test_the_file_is_laid_out_as_documented() -> None:
    """A process that knows the layout alone finds every piece in the memfd, and the generations in its header."""
    arena = Arena(LAYOUT, 600)
    offsets, num_bytes = component_offsets(LAYOUT, 600)
    assert os.fstat(arena.fd).st_size == arena.num_bytes == num_bytes
    assert offsets == arena.offsets
    assert all(offset % PAGE_BYTES == 0 for offset in offsets)
    assert offsets[0] >= 600 * 8
    arena.components[1][599] = 3
    assert os.pread(arena.fd, 48, offsets[1] + 599 * 48) == arena.piece(1, 599).tobytes()
    arena.renew(7)
    arena.renew(7)
    assert np.frombuffer(os.pread(arena.fd, 600 * 8, 0), dtype=np.uint64)[7] == 2
    arena.close()
    arena.close()


def test_a_large_arena_takes_no_memory_until_it_is_written() -> None:
    arena = Arena(LAYOUT, 1_000_000)
    assert os.fstat(arena.fd).st_size > 144_000_000
    assert os.fstat(arena.fd).st_blocks * 512 < 1_000_000
    arena.close()


def test_generations_rise_with_each_new_owner() -> None:
    arena = Arena(LAYOUT, 3)
    pool = BlockPool(3, on_reuse=arena.renew)
    blocks = pool.allocate(2, "a")
    pool.hold(blocks, "b")
    pool.release(blocks, "a")
    assert arena.generations.tolist() == [1, 1, 0]
    pool.release(blocks, "b")
    pool.allocate(3, "c")
    assert sorted(arena.generations.tolist()) == [1, 2, 2]
    arena.close()


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3, "a")
    assert len(set(blocks)) == 3
    with pytest.raises(ResourceExhausted, match="2 blocks wanted, 1 of 4 are free"):
        pool.allocate(2, "b")
    assert pool.num_free == 1
    assert pool.allocate(0, "b") == []
    assert pool.holdings() == {"a": blocks}


def test_a_block_is_free_when_its_last_owner_lets_go() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1, "a")
    pool.hold(blocks, "b")
    pool.hold(blocks, "b")
    pool.release(blocks, "a")
    pool.release(blocks, "b")
    assert pool.owners(blocks[0]) == ("b",)
    assert pool.num_free == 1
    pool.transfer(blocks, "b", "c")
    assert pool.holdings() == {"c": blocks}
    pool.release(blocks, "c")
    assert pool.num_free == 2
    pool.check_integrity()


def test_quarantined_blocks_are_nobodys() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2, "a")
    pool.quarantine(blocks[:1], "a")
    assert (pool.num_free, pool.num_quarantined) == (0, 1)
    assert not pool.can_allocate(1)
    pool.check_integrity()
    pool.end_quarantine(blocks[:1])
    assert pool.num_free == 1
    with pytest.raises(KeyError):
        pool.end_quarantine(blocks[:1])


def test_mistakes_of_the_caller_are_caught() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1, "a")
    with pytest.raises(AssertionError, match="not held by b"):
        pool.release(blocks, "b")
    with pytest.raises(AssertionError, match="no owner to share"):
        pool.hold([blocks[0] ^ 1], "b")
    pool.hold(blocks, "b")
    with pytest.raises(AssertionError, match="alone"):
        pool.quarantine(blocks, "a")
    pool.release(blocks, "a")
    pool.release(blocks, "b")
    with pytest.raises(AssertionError):
        pool.release(blocks, "b")


def test_a_memoryview_outlives_the_arenas_file_descriptor() -> None:
    """The mapping goes with its last user, so a copy that is under way cannot fault."""
    arena = Arena(LAYOUT, 2)
    arena.components[0].fill_(1)
    view = arena.piece(0, 1)
    arena.close()
    del arena
    thread = threading.Thread(target=view.tobytes)
    thread.start()
    thread.join()
    assert view.nbytes == 48
