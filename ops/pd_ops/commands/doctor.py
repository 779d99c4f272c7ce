"""`pd-relay doctor`: can this host serve, and how."""

from __future__ import annotations

from pathlib import Path

import typer

from pd_engine.errors import EXIT_CHECK_FAILED
from pd_engine.model.checkpoint import DEMO_NAME, resolve_model, weight_files
from pd_engine.settings import Settings, load_settings
from pd_ops.commands import options
from pd_ops.doctor.check import Check, Result, can_serve, checks_text
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
from pd_ops.output import Output

LARGEST_CHECKED_BYTES = 1 << 30


def command(
    context: typer.Context,
    model: options.Model = None,
    dtype: options.Dtype = None,
    ops: options.Ops = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Check this host: processor, bits of the ops, versions, limits, ports. Exit status 1 if it cannot serve."""
    output = options.start(context, as_json)
    settings = load_settings(config, options.overrides(model=model, engine__dtype=dtype, engine__ops=ops))
    path = resolve_model(settings.model)
    checks = [*_quick_checks(settings, path), *_rows_checks(settings, path, output)]
    output.document({
        "can_serve": can_serve(checks), "model": str(path), "checks": [check.to_json() for check in checks],
    })
    output.text(checks_text(checks))
    if not can_serve(checks):
        raise typer.Exit(EXIT_CHECK_FAILED)


def _quick_checks(settings: Settings, path: Path) -> list[Check]:
    rdma = rdma_check()
    return [
        processor_check(settings),
        versions_check(),
        memory_check(settings, path),
        shared_memory_check(),
        ray_memory_check(settings),
        open_files_check(),
        locked_memory_check(settings, has_rdma=rdma.result is Result.OK),
        ports_check(settings),
        clock_check(),
        gpu_check(),
        rdma,
        module_check("nccl", ("nccl",), "only transfers between GPUs would use it (extra: gpu)"),
        module_check("nixl", ("nixl_cu13", "nixl"), "only its own transport would use it (extra: nixl)"),
        module_check("triton", ("triton",), "only GPU kernels would use it (extra: gpu)"),
    ]


def _rows_checks(settings: Settings, path: Path, output: Output) -> list[Check]:
    """On the model that would serve, or on the shipped one if that is too large to load for a check."""
    from pd_ops.doctor.rows import rows_check  # imports torch

    if sum(file.stat().st_size for file in weight_files(path)) > LARGEST_CHECKED_BYTES:
        output.note(f"{path} is large: the bits of the ops are checked on the shipped model")
        path = resolve_model(DEMO_NAME)
    checks = []
    for ops in ("cpu", "reference"):
        output.note(f"comparing bits of the {ops} ops ...")
        checks.append(rows_check(path, settings.engine, ops))
    return checks
