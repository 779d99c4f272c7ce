"""An engine whose cache lies apart from the shared memory that transports see, as on a GPU, at the speed of the CPU
ops: whatever is not copied between the two shows in tokens and checksums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pd_engine import engine as engine_module
from pd_kernels.backend import load_ops
from pd_kernels.cpu.ops import CpuOps
from pd_kernels.ops import Ops
from pd_kernels.reference import ReferenceOps


class StagedCpuOps(CpuOps):
    @property
    def is_on_host(self) -> bool:
        return False


class StagedReferenceOps(ReferenceOps):
    @property
    def is_on_host(self) -> bool:
        return False


def staged_ops() -> Ops:
    """The fastest there are here, with memory of their own."""
    ops = load_ops("auto", threads=1)
    return StagedCpuOps(ops.name.removeprefix("cpu-"), threads=1) if isinstance(ops, CpuOps) else StagedReferenceOps()


@contextmanager
def staged_engines() -> Iterator[None]:
    """Engines that are loaded meanwhile are staged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "_load_ops", lambda settings, dtype: staged_ops())
        yield
