"""How many prompt tokens a decode worker computes between two of its decode steps. Pure: durations in, a number out.

What a running sequence waits between two tokens is a decode step and the chunk beside it; both together are to take no
longer than the budget. What a token of a chunk takes is measured: a slower chunk than expected counts at once, a faster
one by and by, so the estimate errs to the side of the running sequences.
"""

from __future__ import annotations

MIN_CHUNK_TOKENS = 16  # less would be mostly the fixed part of a forward
MAX_SKIPPED_STEPS = 4  # decode steps in a row without a chunk, where there is no room for one
SHARE = 0.8            # of the room that a decode step leaves: the next one may be longer
_WEIGHT = 0.2          # of the newest chunk, where it was faster than expected


class ItlBudget:
    """Args:
    budget_s: for a decode step and a chunk together.
    max_chunk_tokens: in any case.
    """

    def __init__(self, budget_s: float = 0.05, max_chunk_tokens: int = 256) -> None:
        assert budget_s > 0 and max_chunk_tokens >= 1, (budget_s, max_chunk_tokens)
        self._budget_s = budget_s
        self._max_tokens = max_chunk_tokens
        self._seconds_a_token: float | None = None
        self._num_skipped = 0

    def chunk_tokens(self, decode_s: float | None) -> int:
        """Of the next chunk at most; 0: none now.

        Decode steps that leave too little room, as those that are longer than the budget, are given a smallest chunk
        after every `MAX_SKIPPED_STEPS`: prompts move on whatever runs beside them.

        Args:
            decode_s: what the decode step took that the chunk follows; None: nothing decodes, nobody waits.
        """
        if decode_s is None:
            self._num_skipped = 0
            return self._max_tokens
        tokens = self._fitting(decode_s)
        if tokens < MIN_CHUNK_TOKENS and self._num_skipped < MAX_SKIPPED_STEPS:
            self._num_skipped += 1
            return 0
        self._num_skipped = 0
        return min(self._max_tokens, max(tokens, MIN_CHUNK_TOKENS))

    def note_chunk(self, num_tokens: int, seconds: float) -> None:
        """A chunk was computed beside a decode step."""
        measured = seconds / num_tokens
        known = self._seconds_a_token
        if known is None or measured > known:
            self._seconds_a_token = measured
        else:
            self._seconds_a_token = known + _WEIGHT * (measured - known)

    def _fitting(self, decode_s: float) -> int:
        """Tokens that the room has time for; the first chunk of all is a smallest one, to find out."""
        room_s = SHARE * (self._budget_s - decode_s)
        if self._seconds_a_token is None:
            return MIN_CHUNK_TOKENS if room_s > 0 else 0
        return int(max(0.0, room_s) / max(self._seconds_a_token, 1e-9))
