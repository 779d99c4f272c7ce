"""A whole cluster on the GPU: `pd-relay verify`, which compares every token and logprob bit with one process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.metadata import version
from typing import Any

TIMEOUT_S = 150
NUM_REQUESTS = 8
NEEDED = ("ray", "grpcio", "typer", "pd-relay")  # distributions


def run_cluster(seconds: float = TIMEOUT_S) -> dict[str, Any]:
    """{seconds, verify: its report} of the demo checkpoint, one prefill and one decode worker on the same GPU.

    Args:
        seconds: it may take so long, and no longer than `TIMEOUT_S`.

    Raises:
        ImportError: what a cluster needs beside the kernels is not installed.
        AssertionError: something differs, or the cluster did not serve; with the end of what it wrote.
    """
    for name in NEEDED:
        version(name)
    command = [
        sys.executable, "-m", "pd_ops.cli", "verify", "--model", "demo", "--device", "cuda", "--count",
        str(NUM_REQUESTS), "--json",
    ]
    began_s, limit_s = time.perf_counter(), min(seconds, TIMEOUT_S)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"verify took longer than {limit_s:.0f} s") from None
    assert done.returncode == 0, f"verify: exit status {done.returncode}: {done.stderr[-2000:]}"
    return {"seconds": round(time.perf_counter() - began_s, 1), "verify": json.loads(done.stdout)}
