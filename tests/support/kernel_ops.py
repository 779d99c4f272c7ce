"""The implementations of the ops that this machine can run."""

from __future__ import annotations

import functools

import torch

from pd_kernels.ops import Ops
from pd_kernels.reference import ReferenceOps

torch.set_num_threads(1)


def names() -> list[str]:
    return ["reference"]


@functools.cache
def load(name: str) -> Ops:
    assert name == "reference"
    return ReferenceOps()
