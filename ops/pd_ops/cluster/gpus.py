"""Which GPU of its host a worker computes on. Pure but for `visible_gpus`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them. The driver is not asked: once it has
    been, a change of that variable comes too late."""
    named = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    return named or [str(number) for number, _ in enumerate(devices.glob("nvidia[0-9]*"))]


def gpu_of(worker_id: str, gpus: Sequence[str], num_prefill_workers: int) -> str:
    """The workers take the GPUs in turn, prefill workers first; where there are fewer GPUs, some share one.

    Args:
        worker_id: "prefill-0", "decode-1".
        gpus: of its host, at least one.
        num_prefill_workers: that a cluster starts with; on a host with all of them, both pools are spread alike.
    """
    role, _, number = worker_id.rpartition("-")
    place = int(number) + (num_prefill_workers if role == "decode" else 0)
    return gpus[place % len(gpus)]
