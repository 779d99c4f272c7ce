"""Ray's shells over the router and the workers: they build the real thing inside their process, and translate.

Ray carries lifecycle only; requests, tokens and latents never pass here. What a role needs is imported inside its
process, so that the router's never imports torch. Errors are answered as values: what Ray would make of an exception
depends on what the other side can import.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import sys
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from pd_engine.errors import FailedPrecondition, Internal, PdRelayError, from_code
from pd_engine.service.importing import quick_imports
from pd_engine.settings import RouterSettings, Settings
from pd_ops.cluster.gpus import VISIBLE, gpu_of, visible_gpus
from pd_ops.cluster.plan import Role
from pd_ops.cluster.state_file import log_directory

if TYPE_CHECKING:
    from decode_worker.worker import DecodeWorker
    from pd_router.link_state import WorkerEndpoint
    from pd_router.server import Router
    from prefill_worker.worker import PrefillWorker

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An error that an actor answers with; `error()` is the typed error again."""

    code: str
    message: str

    def error(self) -> PdRelayError:
        return from_code(self.code, self.message)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStarted:
    pid: int
    address: str
    epoch: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterStarted:
    pid: int
    grpc_address: str
    http_address: str

    @property
    def address(self) -> str:
        return self.grpc_address


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingAlready:
    """What a controller needs to know of a process that another one has started. `secret`: the cluster's."""

    started: WorkerStarted | RouterStarted
    secret: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlace:
    """A worker as the router is told of it. `is_expected` is False of one that takes nothing new: it drains, or has
    ended and is not waited for."""

    worker_id: str
    role: str
    address: str
    is_expected: bool = True


class WorkerActor:
    """The process of one worker, of either role.

    Args:
        host: to listen on, and what peers are told; None: the address that Ray knows this host by.
        life: 1 for the first process of this id.
    """

    def __init__(
        self, role: Role, settings: Settings, *, worker_id: str, host: str | None, secret: str, life: int
    ) -> None:
        _begin_process(settings, worker_id, life)
        self._role = role
        self._settings = settings
        self._worker_id = worker_id
        self._host = host
        self._secret = secret
        self._worker: PrefillWorker | DecodeWorker | None = None
        self._started: WorkerStarted | None = None

    async def start(self) -> WorkerStarted | Failure:
        """Loads the model and serves."""
        return await _answer(self._start())

    async def _start(self) -> WorkerStarted:
        # Before torch is imported: its thread pools take their size from here.
        os.environ["OMP_NUM_THREADS"] = str(self._settings.engine.threads)
        if self._settings.engine.device == "cuda":
            self._take_gpu()
        self._worker = _import_worker(self._role)(
            self._settings, worker_id=self._worker_id, host=self._host or _host_in_ray(), secret=self._secret
        )
        started = await self._worker.start()
        _return_freed_memory()
        self._started = WorkerStarted(pid=os.getpid(), address=started.address, epoch=started.epoch)
        return self._started

    async def describe(self) -> ServingAlready | None:
        """None: it does not serve yet."""
        return None if self._started is None else ServingAlready(started=self._started, secret=self._secret)

    def _take_gpu(self) -> None:
        """Before torch is imported: this process sees one GPU from now on. Where there is none, loading says so."""
        gpus = visible_gpus()
        if gpus:
            os.environ[VISIBLE] = gpu_of(self._worker_id, gpus, self._settings.prefill.workers)
            log.info("computes on GPU %s of %s", os.environ[VISIBLE], ",".join(gpus))

    async def spoil(self, num_pieces: int) -> int | Failure:
        """Of a prefill worker: so many pieces more go out wrong. How many are to come."""
        return await _answer(self._spoil(num_pieces))

    async def _spoil(self, num_pieces: int) -> int:
        if self._role is not Role.PREFILL or self._worker is None:
            raise FailedPrecondition("only a prefill worker that serves spoils what it sends")
        return cast("PrefillWorker", self._worker).spoil(num_pieces)

    async def stop(self, drain_s: float) -> bool | Failure:
        """Ends within `drain_s` seconds, and a little: running requests may finish until then. Whether all have."""
        return await _answer(self._stop(drain_s))

    async def _stop(self, drain_s: float) -> bool:
        if self._worker is None:
            return True
        is_drained = await self._worker.drain(drain_s)
        if not is_drained:
            log.warning("not drained after %g s: stopping all the same", drain_s)
        await self._worker.stop()
        return is_drained

    async def imported_modules(self) -> list[str]:
        """Top-level names of all modules that this process has imported: for checks of what it must not."""
        return _top_level_modules()

    async def is_alive(self) -> bool:
        """Asked every few seconds."""
        _return_freed_memory()
        return True

    async def wait_for_death(self) -> None:
        """Never answers: the call fails when this process ends. A worker that can no longer serve ends it."""
        assert self._worker is not None, "not started"
        await self._worker.wait_crashed()
        log.error("%s can no longer serve: ending its process", self._worker_id)
        await self._worker.stop()
        os._exit(1)


def _import_worker(role: Role) -> type[PrefillWorker] | type[DecodeWorker]:
    with quick_imports():
        if role is Role.PREFILL:
            from prefill_worker.worker import PrefillWorker

            return PrefillWorker
        assert role is Role.DECODE, role
        from decode_worker.worker import DecodeWorker

        return DecodeWorker


class RouterActor:
    """The process of a router. Its ports may be shared with the router that it replaces.

    On a host of its pool it listens on the address that Ray knows that host by, unless the settings name one: the
    loopback address would be of use to nobody.
    """

    def __init__(self, settings: Settings, *, secret: str, life: int) -> None:
        _begin_process(settings, Role.ROUTER.value, life)
        if settings.cluster.by_pool and settings.router.host == RouterSettings().host:
            router = settings.router.model_copy(update={"host": _host_in_ray()})
            settings = settings.model_copy(update={"router": router})
        self._settings = settings
        self._secret = secret
        self._router: Router | None = None
        self._started: RouterStarted | None = None

    async def start(self, places: list[WorkerPlace]) -> RouterStarted | Failure:
        """Opens its doors, when it has these workers."""
        return await _answer(self._start(places))

    async def _start(self, places: list[WorkerPlace]) -> RouterStarted:
        from pd_router.garbage import spare_what_stays
        from pd_router.server import Router

        self._router = Router(self._settings, secret=self._secret, shares_ports=True)
        addresses = await self._router.start(_endpoints(places))
        spare_what_stays()
        self._started = RouterStarted(pid=os.getpid(), grpc_address=addresses.grpc, http_address=addresses.http)
        return self._started

    async def describe(self) -> ServingAlready | None:
        """None: it does not serve yet."""
        return None if self._started is None else ServingAlready(started=self._started, secret=self._secret)

    async def set_workers(self, places: list[WorkerPlace]) -> Failure | None:
        """All the workers there are, now."""
        return await _answer(self._set_workers(places))

    async def _set_workers(self, places: list[WorkerPlace]) -> None:
        assert self._router is not None, "not started"
        await self._router.set_workers(_endpoints(places))

    async def stop(self, drain_s: float) -> Failure | None:
        return await _answer(self._stop(drain_s))

    async def _stop(self, drain_s: float) -> None:
        if self._router is not None:
            await self._router.stop(drain_s)

    async def hand_over(self, drain_s: float) -> bool | Failure:
        """As `stop`, where another router has begun to serve at the same ports. Whether all its requests had ended."""
        return await _answer(self._hand_over(drain_s))

    async def _hand_over(self, drain_s: float) -> bool:
        assert self._router is not None, "not started"
        return await self._router.hand_over(drain_s)

    async def imported_modules(self) -> list[str]:
        """Top-level names of all modules that this process has imported: for checks of what it must not."""
        return _top_level_modules()

    async def is_alive(self) -> bool:
        return True

    async def wait_for_death(self) -> None:
        """Never answers: the call fails when this process ends."""
        await asyncio.Event().wait()


def _endpoints(places: list[WorkerPlace]) -> list[WorkerEndpoint]:
    from pd_router.link_state import WorkerEndpoint

    return [WorkerEndpoint(one.worker_id, one.role, one.address, is_expected=one.is_expected) for one in places]


def _begin_process(settings: Settings, actor_id: str, life: int) -> None:
    """Sends all that this process writes, a crash's last words included, to its own file; later lives go on in it."""
    path = actor_log_path(settings.cluster.name, actor_id)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (os.O_TRUNC if life == 1 else 0)
    fd = os.open(path, flags, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    logging.basicConfig(
        level=settings.cluster.log_level.upper(), stream=os.fdopen(2, "w", buffering=1, closefd=False), force=True,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    log.info("%s is process %d, its life number %d", actor_id, os.getpid(), life)


def _host_in_ray() -> str:
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _return_freed_memory() -> None:
    """What a model's loading or a prompt needed for a while; glibc would keep it: 10 to 20 MB of the demo's 350.

    It takes 0.3 to 5 ms."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own
    if trim is not None:
        trim(0)


def actor_log_path(cluster: str, actor_id: str) -> Path:
    """On the host where the actor runs."""
    return log_directory(cluster) / f"{actor_id}.log"


async def _answer(work: Awaitable[T]) -> T | Failure:
    try:
        return await work
    except PdRelayError as error:
        log.error("%s: %s", error.code.value, error.message)
        return Failure(code=error.code.value, message=error.message)
    except Exception as error:  # the process boundary
        log.exception("unexpected error")
        return Failure(code=Internal.code.value, message=f"{type(error).__name__}: {error}")


def _top_level_modules() -> list[str]:
    return sorted({name.partition(".")[0] for name in list(sys.modules)})
