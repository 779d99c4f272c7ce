"""Which implementation of the ops a process runs: chosen once, by name, and said."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from pd_kernels.ops import Ops
from pd_kernels.reference import ReferenceOps

log = logging.getLogger(__name__)

OpsName = Literal["auto", "cpu", "reference"]


class OpsUnavailable(RuntimeError):
    """The implementation that was asked for by name cannot run here; the message says why."""


def load_ops(name: OpsName, *, threads: int) -> Ops:
    """The ops of this process. Also sets torch's own threads, which the reference computes on.

    Args:
        name: "reference" is torch; "cpu" the compiled ops; "auto" the compiled ops if they are built, else the
            reference.
        threads: compute threads.

    Raises:
        OpsUnavailable: "cpu" was asked for and is not built.
    """
    torch.set_num_threads(threads)
    if name == "cpu":
        raise OpsUnavailable("the compiled CPU ops are not built")
    ops = ReferenceOps()
    log.info("ops: %s (%s)", ops.name, ops.numerics)
    return ops
