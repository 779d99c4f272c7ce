"""Checks of what is installed: versions, the ops that would run, and what only larger hosts have."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

import pd_ops
from pd_engine.settings import Settings
from pd_kernels.build import find_compiler, isa_names
from pd_kernels.cpu.native import library_directory, library_problem, usable_isas
from pd_kernels.gpu import unfit
from pd_ops.bench.identity import cpu_model, installed
from pd_ops.doctor.check import Check, Result

CONSTRAINTS = Path(pd_ops.__file__).resolve().parents[2] / "constraints.txt"
MAX_NAMED = 5

Installed = Callable[[str], "str | None"]


def processor_check(
    settings: Settings, isas: list[str] | None = None, gpu_problem: Callable[[], str | None] = unfit,
    cpu_problem: Callable[[str], str | None] = library_problem,
) -> Check:
    """Which implementation of the ops `engine.device` and `engine.ops` mean on this host."""
    if settings.engine.device == "cuda":
        problem = gpu_problem()
        result = Result.OK if problem is None else Result.FAILED
        return Check(name="ops", result=result, sentence=problem or "Triton kernels, on Hopper")
    usable = usable_isas() if isas is None else isas
    wanted = settings.engine.ops
    processor = cpu_model()
    if wanted == "reference":
        sentence = f"{processor}; engine.ops says reference: the torch ops run, several times slower than compiled ones"
        return Check(name="ops", result=Result.WARNING, sentence=sentence)
    if settings.engine.dtype == "fp16":
        result = Result.FAILED if wanted == "cpu" else Result.WARNING
        sentence = f"{processor}: engine.dtype says fp16, which only the torch reference has on a CPU; it is slower"
        return Check(name="ops", result=result, sentence=sentence)
    if usable:
        problem = cpu_problem(usable[-1])
        if problem is not None:
            return Check(name="ops", result=Result.FAILED, sentence=f"{problem}; engine.ops: reference does without")
        unused = [isa for isa in isa_names() if isa not in usable]
        rest = f"; not built, or not of this processor: {', '.join(unused)}" if unused else ""
        return Check(name="ops", result=Result.OK, sentence=f"{processor}: compiled ops for {usable[-1]}{rest}")
    advice = "" if find_compiler() else "install a C++ compiler, then "
    sentence = (
        f"{processor}: no compiled ops in {library_directory()}, the torch reference would run; {advice}"
        "python -m pd_kernels.build builds them"
    )
    return Check(name="ops", result=Result.FAILED if wanted == "cpu" else Result.WARNING, sentence=sentence)


def versions_check(
    constraints: Path = CONSTRAINTS, requirements: Iterable[str] | None = None, find: Installed = installed
) -> Check:
    """Requirements of the base install must be met; versions other than the tested ones are named."""
    lines = (requires("pd-relay") or []) if requirements is None else requirements
    needed = [Requirement(line) for line in lines]
    needed = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    found = {one.name: find(one.name) for one in needed}
    unmet = [
        f"{one} (found {found[one.name] or 'none'})" for one in needed
        if found[one.name] is None or not one.specifier.contains(str(found[one.name]), prereleases=True)
    ]
    if unmet:
        return Check(name="versions", result=Result.FAILED, sentence=f"not met: {_listed(unmet)}")
    pins = _pins(constraints)
    if not pins:
        sentence = f"all {len(needed)} requirements are met; the tested versions are in a checkout only"
        return Check(name="versions", result=Result.OK, sentence=sentence)
    other = [
        f"{name} {has} instead of {pins[name.lower()]}" for name, has in found.items()
        if has is not None and name.lower() in pins and Version(has).public != Version(pins[name.lower()]).public
    ]
    if other:
        sentence = f"requirements are met, but not tested so: {_listed(other)}"
        return Check(name="versions", result=Result.WARNING, sentence=sentence)
    return Check(name="versions", result=Result.OK, sentence=f"all {len(needed)} are those that are tested")


def gpu_check(devices: Path = Path("/dev")) -> Check:
    nodes = sorted(path.name for path in devices.glob("nvidia[0-9]*"))
    if not nodes:
        return Check(name="gpu", result=Result.ABSENT, sentence="no NVIDIA GPU; the CPU serves")
    import torch

    if not torch.cuda.is_available():
        sentence = f"{', '.join(nodes)}, but torch {torch.__version__} cannot use it"
        return Check(name="gpu", result=Result.WARNING, sentence=sentence)
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return Check(name="gpu", result=Result.OK, sentence=", ".join(names))


def rdma_check(devices: Path = Path("/sys/class/infiniband")) -> Check:
    names = sorted(path.name for path in devices.iterdir()) if devices.is_dir() else []
    if not names:
        sentence = "no RDMA device; shared memory within a host and tcp between hosts carry the latents"
        return Check(name="rdma", result=Result.ABSENT, sentence=sentence)
    return Check(name="rdma", result=Result.OK, sentence=", ".join(names))


def module_check(name: str, modules: Iterable[str], purpose: str) -> Check:
    """An optional Python module, under the first of its names that is found."""
    for module in modules:
        if importlib.util.find_spec(module) is not None:
            return Check(name=name, result=Result.OK, sentence=f"installed, as {_with_version(module)}")
    return Check(name=name, result=Result.ABSENT, sentence=f"not installed; {purpose}")


def _with_version(module: str) -> str:
    from importlib.metadata import packages_distributions

    distributions = packages_distributions().get(module)
    return f"{module} {version(distributions[0])}" if distributions else module


def _pins(constraints: Path) -> dict[str, str]:
    """{name in lower case: version}; empty without the file."""
    if not constraints.is_file():
        return {}
    lines = constraints.read_text(encoding="utf-8").splitlines()
    return {
        name.strip().lower(): pinned.strip()
        for name, separator, pinned in (line.partition("==") for line in lines if not line.startswith("#"))
        if separator
    }


def _listed(items: list[str]) -> str:
    shown = "; ".join(items[:MAX_NAMED])
    return shown if len(items) <= MAX_NAMED else f"{shown}; and {len(items) - MAX_NAMED} more"
