"""How requests reach an endpoint: what a sender does, and what every one of them is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pd_engine.errors import ErrorCode, PdRelayError
from pd_ops.bench.serve.record import Outcome, Recording

_REFUSALS = frozenset({ErrorCode.RESOURCE_EXHAUSTED})


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """The same for every request, but for the seed, to which its number is added. End tokens do not end an answer: its
    length is the trace's."""

    temperature: float = 0.0
    seed: int = 0
    speculate: int | None = None


class Sender(Protocol):
    """Sends one request and waits for its end."""

    async def send(self, token_ids: Sequence[int], recording: Recording, now: Callable[[], float]) -> None:
        """Adds arrivals and details to `recording` as they come; `now`: seconds since the beginning.

        Raises:
            PdRelayError: it was refused, or it failed.
        """
        ...


def outcome_of(error: PdRelayError) -> Outcome:
    return Outcome.REFUSED if error.code in _REFUSALS else Outcome.FAILED
