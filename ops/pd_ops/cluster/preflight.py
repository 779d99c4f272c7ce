"""What would fail only once everything is started, looked at before anything is."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Sequence

from pd_engine.errors import FailedPrecondition, InvalidArgument
from pd_engine.settings import EngineSettings, RouterSettings
from pd_kernels.cpu.native import library_problem, usable_isas
from pd_kernels.gpu import unfit

POLL_S = 0.05


def check_ports(settings: RouterSettings, wait_s: float = 0.0) -> None:
    """Args:
        wait_s: for ports that are in use, as somebody is just letting go of them.

    Raises:
        InvalidArgument: a port cannot be bound on `settings.host`, or the two are the same.
    """
    if settings.grpc_port == settings.http_port != 0:
        raise InvalidArgument(
            f"both doors have port {settings.grpc_port}: --grpc-port and --http-port must differ; 0 is any free one"
        )
    deadline_s = time.monotonic() + wait_s
    for flag, port in (("--grpc-port", settings.grpc_port), ("--http-port", settings.http_port)):
        while (problem := _problem(settings.host, port)) is not None:
            if problem.errno != errno.EADDRINUSE or time.monotonic() > deadline_s:
                raise InvalidArgument(
                    f"cannot listen on {settings.host}:{port}: {problem.strerror or problem}; choose another port with "
                    f"{flag}, or 0 for any free one"
                )
            time.sleep(POLL_S)


def _problem(host: str, port: int) -> OSError | None:
    """Why nobody can listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        return error
    return None


def check_ops(name: str, isas: Sequence[str] | None = None) -> None:
    """Whether the compiled ops are of the sources that lie beside them: after a pull they may not be.

    Args:
        name: as in `engine.ops`.
        isas: instruction sets that may be used, best last; None: those of this host.

    Raises:
        FailedPrecondition: the library that workers would load is damaged, of other sources, or cannot be read.
    """
    usable = usable_isas() if isas is None else isas
    if name in ("reference", "triton") or not usable:
        return
    problem = library_problem(usable[-1])
    if problem is not None:
        raise FailedPrecondition(f"{problem}; --ops reference does without")


def check_device(settings: EngineSettings, find_problem: Callable[[], str | None] = unfit) -> None:
    """Whether this host can do what `engine.device` says.

    Raises:
        InvalidArgument: the ops that are asked for are of the other device.
        FailedPrecondition: it has no GPU that the kernels are made for, or what they need is not installed.
    """
    if settings.device == "cpu":
        return
    if settings.ops not in ("auto", "triton"):
        raise InvalidArgument(
            f"settings: engine.ops: {settings.ops} computes on the CPU; with engine.device: cuda it is auto or triton"
        )
    problem = find_problem()
    if problem is not None:
        raise FailedPrecondition(f"settings: engine.device: cuda: {problem}")
