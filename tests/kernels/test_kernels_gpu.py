"""Finding out what a host has for the Triton kernels: with a double of NVIDIA's driver, and as this host is."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import pytest
import torch

from pd_kernels import gpu
from pd_kernels.backend import OpsUnavailable, load_ops
from pd_kernels.gpu import Gpu, NoDriver, find_gpus, unfit

HOPPER = Gpu(name="NVIDIA H200", capability=(9, 0))


class Driver:
    """`cuInit` and the calls after it, for cards of these capabilities."""

    def __init__(self, gpus: list[Gpu], failing: str = "") -> None:
        self._gpus = gpus
        self._failing = failing

    def __getattr__(self, call: str) -> Any:
        return lambda *arguments: 803 if call == self._failing else self._do(call, *arguments)

    def _do(self, call: str, *arguments: Any) -> int:
        match call, arguments:
            case "cuDeviceGetCount", (out,):
                out._obj.value = len(self._gpus)
            case "cuDeviceGet", (out, number):
                out._obj.value = number
            case "cuDeviceGetName", (buffer, _, device):
                buffer.value = self._gpus[device.value].name.encode()
            case "cuDeviceGetAttribute", (out, attribute, device):
                out._obj.value = self._gpus[device.value].capability[{75: 0, 76: 1}[attribute]]
        return 0


def load(driver: Driver) -> Any:
    return lambda name: driver


def test_the_cards_of_a_host() -> None:
    cards = [HOPPER, Gpu(name="NVIDIA A100", capability=(8, 0))]
    assert find_gpus(load(Driver(cards))) == cards
    assert find_gpus(load(Driver([]))) == []


def test_a_driver_that_does_not_work_says_which_call() -> None:
    with pytest.raises(NoDriver, match=r"does not work here \(cuInit: error 803\)"):
        find_gpus(load(Driver([HOPPER], failing="cuInit")))


def test_a_host_without_a_driver() -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(name)

    with pytest.raises(NoDriver, match=r"no NVIDIA driver \(libcuda.so.1\)"):
        find_gpus(missing)


@pytest.mark.parametrize(("cards", "torch_version", "problem"), [
    ([HOPPER, HOPPER], "2.13.0+cu130", None),
    ([HOPPER], "2.13.0+cpu", "torch 2.13.0+cpu is a build for CPUs"),
    ([], "2.13.0", "finds no GPU"),
    ([HOPPER, Gpu(name="NVIDIA B200", capability=(10, 0))], "2.13.0", "NVIDIA B200 has 10.0"),
])
def test_what_keeps_a_host_from_serving(
    monkeypatch: pytest.MonkeyPatch, cards: list[Gpu], torch_version: str, problem: str | None
) -> None:
    monkeypatch.setattr(gpu, "version", lambda name: torch_version)
    found = unfit(lambda: cards)
    assert (found is None) == (problem is None)
    assert problem is None or problem in str(found)


def test_without_triton_nothing_else_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'pd-relay[gpu]'" in str(unfit(lambda: [HOPPER]))
    with pytest.raises(OpsUnavailable, match="Triton is not installed"):
        load_ops("auto", threads=1, device="cuda")


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_ops_of_the_other_device(name: Any) -> None:
    with pytest.raises(OpsUnavailable, match=f"the ops '{name}' compute on the CPU"):
        load_ops(name, threads=1, device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_ops_are_refused() -> None:
    """In a process without the interpreter, which would take the CPU for one."""
    program = """
from pd_kernels.backend import OpsUnavailable, load_ops
for device, name in (("cuda", "auto"), ("cuda", "triton"), ("cpu", "triton")):
    try:
        load_ops(name, threads=1, device=device)
    except OpsUnavailable as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True,
        check=True,
    )
    assert done.stdout.count("the Triton kernels need an NVIDIA GPU") == 3
