"""What a host has for the Triton kernels, found out without torch: NVIDIA's driver is asked."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

COMPUTE_CAPABILITY = (9, 0)  # Hopper: what the kernels are tiled for
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # CUdevice_attribute of cuda.h
MAX_NAME_BYTES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """`capability`: compute capability, (9, 0) for Hopper."""

    name: str
    capability: tuple[int, int]


class NoDriver(RuntimeError):
    """NVIDIA's driver is not there, or does not work; the message says which."""


def missing_triton() -> str | None:
    """What is not installed of what the kernels need, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; it comes with the extra: pip install 'pd-relay[gpu]'"
    return None


def find_gpus(load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> list[Gpu]:
    """The GPUs that this process may use (CUDA_VISIBLE_DEVICES), in the driver's order.

    Raises:
        NoDriver: there is no driver, or it does not work.
    """
    try:
        driver = load("libcuda.so.1")
    except OSError:
        raise NoDriver("this host has no NVIDIA driver (libcuda.so.1)") from None
    _check(driver.cuInit(0), "cuInit")
    count = ctypes.c_int()
    _check(driver.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    return [_gpu(driver, number) for number in range(count.value)]


def unfit(find: Callable[[], list[Gpu]] = find_gpus) -> str | None:
    """Why this host cannot serve with `engine.device: cuda`, or None. Workers look again, with torch."""
    problem = missing_triton()
    if problem is not None:
        return problem
    try:
        if version("torch").endswith("+cpu"):
            return f"torch {version('torch')} is a build for CPUs; install one for CUDA"
        gpus = find()
    except (NoDriver, PackageNotFoundError) as error:
        return str(error)
    if not gpus:
        return "NVIDIA's driver finds no GPU"
    wrong = [gpu for gpu in gpus if gpu.capability != COMPUTE_CAPABILITY]
    if wrong:
        major, minor = wrong[0].capability
        return (
            f"the Triton kernels are tiled for Hopper (compute capability 9.0); {wrong[0].name} has {major}.{minor}"
        )
    return None


def _gpu(driver: ctypes.CDLL, number: int) -> Gpu:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(MAX_NAME_BYTES)
    _check(driver.cuDeviceGet(ctypes.byref(device), number), "cuDeviceGet")
    _check(driver.cuDeviceGetName(name, MAX_NAME_BYTES, device), "cuDeviceGetName")
    return Gpu(
        name=name.value.decode(errors="replace"),
        capability=(_attribute(driver, CAPABILITY_MAJOR, device), _attribute(driver, CAPABILITY_MINOR, device)),
    )


def _attribute(driver: ctypes.CDLL, attribute: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    _check(driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device), "cuDeviceGetAttribute")
    return value.value


def _check(status: int, call: str) -> None:
    if status:
        raise NoDriver(f"NVIDIA's driver does not work here ({call}: error {status})")
