"""Blocks in device memory: checksums, copies; and the acceptance of drafts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pd_kernels.block_checksum import reference as checksum_reference
from pd_kernels.block_copy.reference import copy_pieces as reference_copy
from pd_kernels.verify_drafts import reference as verify_reference
from support.triton_cases import triton_ops

from pd_kernels.block_checksum.triton import piece_checksums  # isort: skip
from pd_kernels.block_copy.triton import copy_pieces  # isort: skip
from pd_kernels.verify_drafts.triton import verify_drafts  # isort: skip

LENGTHS = [0, 1, 3, 4, 5, 656, 1152, 4095, 4096, 4097, 8192, 9001, 12_286]


def test_checksums_are_those_of_the_reference() -> None:
    octets = np.random.default_rng(0).integers(0, 256, 60_000, dtype=np.uint8)
    offsets = np.cumsum([0, *(-(-length // 4) * 4 for length in LENGTHS[:-1])])
    sums = piece_checksums(torch.from_numpy(octets), torch.from_numpy(offsets), torch.tensor(LENGTHS))
    expected = [
        checksum_reference.checksum(octets[start : start + length].tobytes())
        for start, length in zip(offsets.tolist(), LENGTHS, strict=True)
    ]
    assert sums.numpy().view(np.uint64).tolist() == expected
    pieces = [
        memoryview(octets[start : start + length].tobytes())
        for start, length in zip(offsets.tolist(), LENGTHS, strict=True)
    ]
    assert triton_ops().block_checksums(pieces).tolist() == expected
    assert triton_ops().block_checksums([]).tolist() == []


def test_one_changed_bit_changes_the_checksum() -> None:
    octets = np.zeros(1152, dtype=np.uint8)
    clean = triton_ops().block_checksums([memoryview(octets.tobytes())])[0]
    for bit in (0, 7, 31, 1151 * 8):
        changed = octets.copy()
        changed[bit // 8] ^= 1 << (bit % 8)
        assert triton_ops().block_checksums([memoryview(changed.tobytes())])[0] != clean


def test_copies_are_those_of_the_reference() -> None:
    source = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 80_000, dtype=np.uint8))
    lengths = torch.tensor([0, 8, 656, 18_432, 16_384])
    source_offsets, target_offsets = torch.tensor([0, 16, 24, 40_000, 1024]), torch.tensor([8, 0, 60_000, 41_000, 16])
    ours, theirs = torch.zeros(80_000, dtype=torch.uint8), torch.zeros(80_000, dtype=torch.uint8)
    copy_pieces(source, ours, source_offsets, target_offsets, lengths, int(lengths.max()))
    reference_copy(source.numpy(), theirs.numpy(), source_offsets.numpy(), target_offsets.numpy(), lengths.numpy())
    assert torch.equal(ours, theirs)


def test_a_copy_within_one_buffer() -> None:
    memory = torch.arange(256, dtype=torch.int32).view(torch.uint8).clone()
    expected = memory.clone()
    expected[512:768] = memory[:256]
    copy_pieces(memory, memory, torch.tensor([0]), torch.tensor([512]), torch.tensor([256]), 256)
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("max_drafts", [1, 3, 8])
def test_accepted_drafts_are_those_of_the_reference(max_drafts: int) -> None:
    generator = torch.Generator().manual_seed(max_drafts)
    count = 60

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    drafts = draw(0, 3, count, max_drafts)
    sampled = torch.cat([drafts, draw(0, 3, count, 1)], dim=1)
    changed = torch.rand(sampled.shape, generator=generator) < 0.2
    sampled[changed] = 3
    num_drafts, room = draw(0, max_drafts + 1, count), draw(1, max_drafts + 3, count)
    ending = torch.where(torch.rand(count, 2, generator=generator) < 0.2, draw(0, 4, count, 2), -1).int()
    arguments = (sampled, drafts, num_drafts, room, ending)
    counts = verify_drafts(*arguments)
    assert torch.equal(counts, verify_reference.verify_drafts(*arguments))
    assert len(set(counts.tolist())) > 1
    assert (counts <= num_drafts + 1).all()


def test_acceptance_by_hand() -> None:
    """Rejected at the second; all accepted; ended by an accepted token; no room; nothing drafted."""
    sampled = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 0, 0]], dtype=torch.int32)
    drafts = torch.tensor([[5, 9], [5, 6], [5, 6], [5, 6], [5, 6]], dtype=torch.int32)
    num_drafts, room = torch.tensor([2, 2, 2, 2, 0]).int(), torch.tensor([9, 9, 9, 2, 9]).int()
    ending = torch.tensor([[-1], [-1], [5], [-1], [-1]]).int()
    for function in (verify_drafts, verify_reference.verify_drafts):
        assert function(sampled, drafts, num_drafts, room, ending).tolist() == [2, 3, 1, 2, 1]
