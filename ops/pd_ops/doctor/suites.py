"""Which checks there are: those of a host that has a whole cluster, and those of a host of one pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pd_engine.model.checkpoint import DEMO_NAME, resolve_model, weight_files
from pd_engine.settings import Settings
from pd_ops.cluster.plan import Role
from pd_ops.doctor.check import Check, Result
from pd_ops.doctor.host import (
    clock_check,
    locked_memory_check,
    memory_check,
    open_files_check,
    ports_check,
    ray_memory_check,
    shared_memory_check,
)
from pd_ops.doctor.software import gpu_check, module_check, processor_check, rdma_check, versions_check

LARGEST_CHECKED_BYTES = 1 << 30
ANY_ADDRESS = "0.0.0.0"


def whole_checks(settings: Settings, model: Path) -> list[Check]:
    """Of a host that has all of a cluster."""
    return [*_of_all(settings), ports_check(settings), *_of_workers(settings, model, None)]


def pool_checks(pool: Role | None, settings: Settings, model: Path, num_workers: int) -> list[Check]:
    """Of a host of one pool; None: of the head.

    Args:
        num_workers: that the host has at most.
    """
    checks = _of_all(settings)
    if pool is Role.ROUTER:
        checks.append(_router_ports_check(settings))
    elif pool is not None:
        checks += _of_workers(settings, model, num_workers)
    return checks


def _of_all(settings: Settings) -> list[Check]:
    return [versions_check(), ray_memory_check(settings), open_files_check(), clock_check()]


def _of_workers(settings: Settings, model: Path, num_workers: int | None) -> list[Check]:
    rdma = rdma_check()
    return [
        processor_check(settings),
        memory_check(settings, model, num_workers=num_workers),
        shared_memory_check(),
        locked_memory_check(settings, has_rdma=rdma.result is Result.OK),
        gpu_check(),
        rdma,
        module_check("nccl", ("nccl",), "only transfers between GPUs would use it (extra: gpu)"),
        module_check("nixl", ("nixl_cu13", "nixl"), "only its own transport would use it (extra: nixl)"),
        module_check("triton", ("triton",), "only GPU kernels would use it (extra: gpu)"),
    ]


def _router_ports_check(settings: Settings) -> Check:
    """The router of a cluster that runs has them already, and nobody here can tell it from others."""
    router = settings.router.model_copy(update={"host": ANY_ADDRESS})
    check = ports_check(settings.model_copy(update={"router": router}))
    if check.result is not Result.FAILED:
        return check
    sentence = f"{check.sentence}; all is well if that is this cluster's router"
    return Check(name=check.name, result=Result.WARNING, sentence=sentence)


def rows_checks(settings: Settings, model: Path, note: Callable[[str], None]) -> list[Check]:
    """On the model that would serve, or on the shipped one if that is too large to load for a check."""
    from pd_ops.doctor.rows import rows_check  # imports torch

    if sum(file.stat().st_size for file in weight_files(model)) > LARGEST_CHECKED_BYTES:
        note(f"{model} is large: the bits of the ops are checked on the shipped model")
        model = resolve_model(DEMO_NAME)
    checks = []
    for ops in ("cpu", "reference"):
        note(f"comparing bits of the {ops} ops ...")
        checks.append(rows_check(model, settings.engine, ops))
    return checks
