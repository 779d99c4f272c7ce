"""A cache apart from the shared memory that transports see: what goes between the two, when, and what never does."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from pd_engine.cache.arena import Arena, component_offsets
from pd_engine.cache.checksums import slot_checksums
from pd_engine.cache.device_arena import DeviceArena
from pd_engine.cache.layout import CacheLayout, Component, ComponentKind
from pd_kernels.reference import ReferenceOps
from support.engine_cases import load_engine, random_ids, write_case
from support.engine_play import Request, alone
from support.staged import staged_engines

NUM_BLOCKS = 6
LAYOUT = CacheLayout(
    block_size=4,
    components=tuple(
        Component(name=name, kind=ComponentKind.PAGED, width=width, dtype=dtype)
        for name, width, dtype in (("layers.0", 6, "bf16"), ("layers.1", 20, "fp8"), ("mtp.0", 3, "fp32"))
    ),
)
IDS = np.array([4, 1], dtype=np.int64)


@pytest.fixture
def arena() -> DeviceArena:
    arena = DeviceArena(LAYOUT, NUM_BLOCKS, torch.device("cpu"))
    for component, slots in enumerate(arena.components):
        slots.copy_(torch.arange(slots.numel()).view_as(slots).add(component))
    return arena


def octets(slots: Tensor) -> bytes:
    return slots.contiguous().view(torch.uint8).numpy().tobytes()


def test_to_transports_it_is_an_arena_like_any_other(arena: DeviceArena) -> None:
    assert (arena.offsets, arena.num_bytes) == component_offsets(LAYOUT, NUM_BLOCKS)
    assert arena.is_staged
    assert not Arena(LAYOUT, 1).is_staged
    assert not any(arena.piece(0, 1)), "nothing is in the window before it travels"


@pytest.mark.parametrize("component", range(3))
def test_exposed_blocks_are_in_the_window_and_no_others(arena: DeviceArena, component: int) -> None:
    arena.expose(component, IDS, arena.generations[IDS])
    for block in range(NUM_BLOCKS):
        expected = octets(arena.components[component][block]) if block in IDS else bytes(LAYOUT.piece_bytes(component))
        assert arena.piece(component, block).tobytes() == expected
        assert not any(arena.piece((component + 1) % 3, block))


@pytest.mark.parametrize("component", range(3))
def test_taken_in_blocks_hold_what_the_window_has(arena: DeviceArena, component: int) -> None:
    before = [slots.clone() for slots in arena.components]
    for block in IDS.tolist():
        piece = arena.piece(component, block)
        piece[:] = bytes(range(1, 1 + len(piece)))
    arena.take_in(component, IDS)
    for index, slots in enumerate(arena.components):
        for block in range(NUM_BLOCKS):
            is_taken = index == component and block in IDS
            assert octets(slots[block]) == (
                arena.piece(index, block).tobytes() if is_taken else octets(before[index][block]))


def test_a_block_with_another_owner_is_not_exposed(arena: DeviceArena) -> None:
    """Its window may already hold what a transport brings for that one."""
    then = arena.generations[IDS].copy()
    arena.renew(4)
    arena.piece(0, 4)[:] = b"\x07" * LAYOUT.piece_bytes(0)
    arena.expose(0, IDS, then)
    assert arena.piece(0, 4).tobytes() == b"\x07" * LAYOUT.piece_bytes(0)
    assert arena.piece(0, 1).tobytes() == octets(arena.components[0][1])


def test_an_owner_that_comes_while_the_device_is_waited_for(
    arena: DeviceArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block gets its new owner after its contents were read, and before they would be written to the window."""
    read, read_blocks = threading.Event(), DeviceArena.read_blocks
    renewed = threading.Event()

    def slowly(self: DeviceArena, *arguments: Tensor) -> Tensor:
        found = read_blocks(self, *arguments)
        read.set()
        assert renewed.wait(10)
        return found

    monkeypatch.setattr(DeviceArena, "read_blocks", slowly)
    exposing = threading.Thread(target=arena.expose, args=(0, IDS, arena.generations[IDS].copy()))
    exposing.start()
    assert read.wait(10)
    arena.renew(4)  # does not wait for the device
    renewed.set()
    exposing.join()
    assert not any(arena.piece(0, 4))
    assert arena.piece(0, 1).tobytes() == octets(arena.components[0][1])


def test_blocks_go_to_host_memory_and_back(arena: DeviceArena) -> None:
    ids = torch.from_numpy(IDS)
    for component, slots in enumerate(arena.components):
        before, copy = slots.clone(), torch.empty(2, *slots.shape[1:], dtype=slots.dtype)
        arena.read_blocks(component, ids, out=copy)
        assert torch.equal(copy, before[ids])
        slots.zero_()
        arena.write_blocks(component, ids, copy)
        assert torch.equal(slots[ids], before[ids])
        assert not slots[[0, 2, 3, 5]].any()


def test_checksums_are_of_what_the_components_hold(arena: DeviceArena) -> None:
    plain = Arena(LAYOUT, NUM_BLOCKS)
    for slots, same in zip(arena.components, plain.components, strict=True):
        same.copy_(slots)
    ops = ReferenceOps()
    assert slot_checksums(ops, arena, IDS.tolist(), 7) == slot_checksums(ops, plain, IDS.tolist(), 7)


def test_an_engine_gives_what_it_gives_in_shared_memory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tokens, logprob bits and checksums, drafts and MTP's zero slot included."""
    path = write_case(tmp_path_factory.mktemp("staged"), "base")
    request = Request(
        prompt=tuple(random_ids(300, 21)), params={"temperature": 0.8, "seed": 2, "max_tokens": 12, "logprobs": 2})
    plain = load_engine(path)
    with staged_engines():
        staged = load_engine(path)
    assert staged.arena.is_staged
    assert alone(staged, request, speculate=2, sizes=[9, 12]) == alone(plain, request)
