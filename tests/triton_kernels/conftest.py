"""Kernels run under Triton's interpreter here, into memory that was filled with NaN (integers: their maximum)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support import triton_shim  # noqa: F401  (before any module with kernels)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty and its relatives give NaN, so that what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
