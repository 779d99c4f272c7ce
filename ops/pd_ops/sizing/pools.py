"""How many workers of which size, and what placement sees of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pd_router.pools import WorkerView


@dataclass(frozen=True, kw_only=True, slots=True)
class Pools:
    """What is simulated. Blocks have the size of the load's.

    Attributes:
        num_blocks: of a decode worker, and of a prefill worker's cache.
        refuses: the router knows the targets, and refuses what cannot be in time; else they are only counted.
        num_prefill_blocks: of a prefill worker's cache, where it is another number.
        local_tokens: a decode worker that has the beginning of a prompt cached may compute so many of the rest itself.
    """

    prefill: int
    decode: int
    num_blocks: int
    block_size: int
    num_prefill_blocks: int | None = None
    chunk_tokens: int = 256
    max_batch: int = 64
    itl_budget_ms: float = 50.0
    max_running: int = 1_000_000
    max_waiting: int = 1_000_000
    max_queued_ms: float = 2_000.0
    ttft_target_ms: float | None = None
    itl_target_ms: float | None = None
    refuses: bool = False
    local_tokens: int = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A worker dies; its requests go elsewhere once that is noticed; another life of it begins."""

    worker_id: str
    at_s: float
    noticed_after_s: float = 1.0
    back_after_s: float = 30.0


class Viewed(Protocol):
    worker_id: str


W = TypeVar("W", bound=Viewed)


class Pool(Generic[W]):
    """Workers by id, and what placement sees of each, made anew where something has changed."""

    def __init__(self, workers: Iterable[W], view: Callable[[W], WorkerView]) -> None:
        self.workers = {worker.worker_id: worker for worker in workers}
        self._view = view
        self._views = {name: view(worker) for name, worker in self.workers.items()}
        self._changed: set[str] = set()

    def change(self, worker: W) -> None:
        self._changed.add(worker.worker_id)

    def change_all(self) -> None:
        self._changed.update(self.workers)

    def views(self) -> tuple[WorkerView, ...]:
        for name in self._changed:
            self._views[name] = self._view(self.workers[name])
        self._changed.clear()
        return tuple(self._views.values())
