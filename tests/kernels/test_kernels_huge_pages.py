"""Weights of the compiled ops on huge pages: the same numbers, in memory that goes with the last of them."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import pytest
import torch

from pd_kernels.cpu import huge_pages
from pd_kernels.cpu.huge_pages import ALIGNMENT, SMALL_BYTES, HugePages


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_what_is_kept_is_equal_aligned_and_side_by_side(dtype: torch.dtype) -> None:
    pages = HugePages()
    count = SMALL_BYTES // dtype.itemsize
    tensors = [torch.arange(count + size).to(dtype).view(1, -1) for size in (0, 1, 37)]
    kept = [pages.keep(tensor) for tensor in tensors]
    for tensor, there in zip(tensors, kept, strict=True):
        assert torch.equal(tensor, there)
        assert there.shape == tensor.shape
        assert there.data_ptr() % ALIGNMENT == 0
        assert there.data_ptr() != tensor.data_ptr()
    ends = [there.data_ptr() + there.nbytes for there in kept]
    for end, following in zip(ends, kept[1:], strict=False):
        assert 0 <= following.data_ptr() - end < ALIGNMENT


def test_small_ones_stay_where_they_are() -> None:
    small = torch.zeros(SMALL_BYTES - 1, dtype=torch.uint8)
    assert HugePages().keep(small) is small


def test_memory_goes_with_the_last_tensor_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is larger than a slab has one to itself, and what no longer fits begins another."""
    slabs: list[weakref.ref[mmap.mmap]] = []

    class Watched(mmap.mmap):
        def __new__(cls, *args: Any, **kwargs: Any) -> Watched:
            slab = super().__new__(cls, *args, **kwargs)
            slabs.append(weakref.ref(slab))
            return slab

    monkeypatch.setattr(huge_pages.mmap, "mmap", Watched)
    monkeypatch.setattr(huge_pages, "SLAB_BYTES", 1 << 18)
    pages = HugePages()
    first = pages.keep(torch.zeros(SMALL_BYTES, dtype=torch.uint8))
    large = pages.keep(torch.zeros((1 << 18) + 1, dtype=torch.uint8))
    last = pages.keep(torch.zeros(SMALL_BYTES, dtype=torch.uint8))
    assert len(slabs) == 2
    another = pages.keep(torch.zeros(1 << 18, dtype=torch.uint8))
    assert len(slabs) == 3
    del large
    assert [slab() is None for slab in slabs] == [False, True, False]
    del first, last, pages
    assert [slab() is None for slab in slabs] == [True, True, False]
    del another
    assert [slab() is None for slab in slabs] == [True, True, True]


def test_without_such_memory_they_stay_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise OSError

    monkeypatch.setattr(huge_pages.mmap, "mmap", refused)
    tensor = torch.zeros(SMALL_BYTES, dtype=torch.uint8)
    assert HugePages().keep(tensor) is tensor
