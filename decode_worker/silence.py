"""Whether a choice's router is still there. Pure: time is passed in.

While a router reads its token stream it is there. Without a stream its choices go on for a bounded time since it was
last heard of: the end of its stream, or a call that named the choice.
"""

from __future__ import annotations

from collections.abc import Collection


class RouterWatch:
    """Args:
    silence_s: how long a choice goes on without a word of its router.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._left_s: dict[str, float] = {}

    def left(self, router_id: str, now_s: float) -> None:
        """Its token stream has ended."""
        self._left_s[router_id] = now_s

    def is_silent(self, router_id: str, *, is_listening: bool, heard_s: float, now_s: float) -> bool:
        """Args:
        heard_s: when the router last named the choice in a call.
        """
        if is_listening:
            return False
        return now_s >= max(heard_s, self._left_s.get(router_id, heard_s)) + self._silence_s

    def keep(self, router_ids: Collection[str]) -> None:
        """Forgets all others: they have no choices here."""
        self._left_s = {router_id: left_s for router_id, left_s in self._left_s.items() if router_id in router_ids}
