"""Compiles for a Hopper GPU, without one, exactly what a call would launch there.

The ops are called with tensors on torch's meta device: shapes without memory. A stand-in for Triton's driver names
the target, and each launch is turned into a compilation with the same arguments, so that Triton's own rules decide
about specialization, and the gate cannot drift from what production launches.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
MAX_SHARED_BYTES = 232_448  # of a block on compute capability 9.0 (CUDA C++ Programming Guide, table of capabilities)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """One kernel as it came out for sm_90.

    Attributes:
        registers: a thread.
        stack_bytes: a thread; what does not fit in registers is spilled there.
        shared_bytes: a block.
        wgmma: matrix instructions of Hopper in the PTX, by shape and operand type, with their number.
        mma_sync: matrix instructions of older GPUs in the PTX.
        async_copies: cp.async and bulk copies in the PTX.
    """

    kernel: str
    num_warps: int
    num_stages: int
    constants: dict[str, Any]
    registers: int
    stack_bytes: int
    shared_bytes: int
    wgmma: dict[str, int]
    mma_sync: int
    async_copies: int


class _HopperDriver:
    """What a JIT function asks of the driver until it has compiled."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launches(call: Callable[[], object]) -> list[Compiled]:
    """Everything that `call` launches, compiled for sm_90 instead of run, in order of launch."""
    return [_measure(*launch) for launch in launches(call)]


def launches(call: Callable[[], object]) -> list[tuple[Any, Any, dict[str, Any]]]:
    """The same as Triton has it: the functions, what they were compiled to, and with which constants."""
    assert not triton.knobs.runtime.interpret, "TRITON_INTERPRET must be unset"
    driver.set_active(_HopperDriver())
    launched: list[Any] = []
    original = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = original(self, *args, grid=grid, warmup=True, **kwargs)
        constants = {name: value for name, value in kwargs.items() if name in self.arg_names}
        launched.append((self, compiled, constants))
        return compiled

    JITFunction.run = compile_only
    try:
        call()
    finally:
        JITFunction.run = original
    return launched


def _measure(function: Any, compiled: Any, constants: dict[str, Any]) -> Compiled:
    registers, stack_bytes = _resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    shapes = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)\.\w+\.(\w+)\.", ptx)
    names = [f"{shape}.{operand}" for shape, operand in shapes]
    return Compiled(
        kernel=function.fn.__name__, num_warps=compiled.metadata.num_warps, num_stages=compiled.metadata.num_stages,
        constants={name: value for name, value in constants.items() if isinstance(value, bool | int | float | str)},
        registers=registers, stack_bytes=stack_bytes, shared_bytes=compiled.metadata.shared,
        wgmma={name: names.count(name) for name in sorted(set(names))}, mma_sync=ptx.count("mma.sync"),
        async_copies=len(re.findall(r"cp\.async\.(?:c[ag]|bulk)", ptx)),
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) a thread, from NVIDIA's own tool."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [os.fspath(CUOBJDUMP), "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert match, text
    return int(match[1]), int(match[2])
