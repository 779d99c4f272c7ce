"""What stub workers do wrong, to order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import PdRelayError


@dataclass(kw_only=True)
class Faults:
    """What a stub does wrong, until told otherwise.

    Attributes:
        reserve, prefill, pull, compute: raised instead of an answer, as often as the list is long.
        prefill_gate: if set, prompts are not finished before it is.
        no_first_reply: prefill finishes the handoff, then breaks its call.
        fail_at: the decode stub reports this failure in place of the token at that index, once.
        die_at: the decode stub ends like a killed process in place of the token at that index, once.
        stall_at: it sends nothing more from that index on, once.
        wrong_token_at: it sends another token there, once.
        renew_gate: if set, renewals are not answered before it is.
        mute: it says nothing any more, as a stopped process does; its connections stay.
        spoil: by name of a message ("lease", "source", "first_token", "event"), what is done to the next one.
    """

    reserve: list[PdRelayError] = field(default_factory=list)
    prefill: list[PdRelayError] = field(default_factory=list)
    pull: list[PdRelayError] = field(default_factory=list)
    compute: list[PdRelayError] = field(default_factory=list)
    prefill_gate: asyncio.Event | None = None
    no_first_reply: int = 0
    fail_at: dict[int, pb.Failure] = field(default_factory=dict)
    die_at: int | None = None
    stall_at: int | None = None
    wrong_token_at: int | None = None
    renew_gate: asyncio.Event | None = None
    mute: bool = False
    spoil: dict[str, Callable[[Any], None]] = field(default_factory=dict)

    def spoil_next(self, name: str, message: Any) -> None:
        """If that was ordered, once."""
        if (change := self.spoil.pop(name, None)) is not None:
            change(message)
