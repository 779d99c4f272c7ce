"""What is seen of calls at the workers: lines of the story, and rules that no reply may break."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pd_engine.contracts import worker_pb2 as pb
from pd_ops.simulation.network import Call
from pd_ops.simulation.process import Process

ROUTINE = frozenset({"Loads", "Renew", "CacheEvents", "Info", "SourceRenew", "Tokens", "Manifest"})


@dataclass(slots=True)
class _Attempts:
    """Of one journey at one life of a worker: the highest released, and the highest granted."""

    released: int = 0
    granted: int = 0


@dataclass(kw_only=True, slots=True)
class Watch:
    """Args:
    tell: (process, words, whether they are routine).
    complain: told of what must never be.
    has_verified: whether the destination of a journey's attempt has all of it, or needs nothing more.
    """

    tell: Callable[[Process, str, bool], None]
    complain: Callable[[str], None]
    has_verified: Callable[[str, int], bool]
    _lives: dict[str, Process] = field(default_factory=dict)
    _attempts: dict[tuple[Process, str], _Attempts] = field(default_factory=dict)

    def called(self, server: Process, call: Call, request: Any) -> None:
        self.tell(server, f"is called by {call.client.label}: {call.method}{_of(request)}", call.method in ROUTINE)
        if isinstance(request, pb.CommitRequest) and not self.has_verified(
            request.journey.journey_id, request.journey.attempt
        ):
            self.complain(f"the handoff of {_name(request.journey)} is committed before it is verified")

    def answered(self, server: Process, call: Call, request: Any, reply: Any) -> None:
        epoch = getattr(reply, "epoch", "")
        if epoch and self._lives.setdefault(epoch, server) is not server:
            self.complain(f"{server.label} has the epoch of {self._lives[epoch].label}")
        if isinstance(request, pb.ReserveRequest):
            self._granted(server, request.journey)
        if isinstance(request, pb.ReleaseRequest):
            for ref in request.journeys:
                known = self._known(server, ref)
                known.released = max(known.released, ref.attempt)

    def refused(self, server: Process, call: Call, request: Any, why: str) -> None:
        self.tell(server, f"refuses {call.method}{_of(request)}: {why}", call.method in ROUTINE)

    def _granted(self, server: Process, ref: pb.JourneyRef) -> None:
        known = self._known(server, ref)
        if ref.attempt <= known.released:
            self.complain(f"{server.label} granted {_name(ref)}, which was released before")
        if ref.attempt < known.granted:
            self.complain(f"{server.label} granted {_name(ref)} after attempt {known.granted}")
        known.granted = max(known.granted, ref.attempt)

    def _known(self, server: Process, ref: pb.JourneyRef) -> _Attempts:
        return self._attempts.setdefault((server, ref.journey_id), _Attempts())


def _name(ref: pb.JourneyRef) -> str:
    return f"journey {ref.journey_id[:6]}/{ref.attempt}"


def _of(request: Any) -> str:
    """Which journeys a call is about."""
    if isinstance(request, pb.ReleaseRequest | pb.RenewRequest):
        return "".join(f" {_name(ref)}" for ref in request.journeys)
    ref = getattr(request, "journey", None)
    return "" if ref is None else f" {_name(ref)}"
