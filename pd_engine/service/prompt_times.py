"""Where one prompt spends its time at the worker that computes it: for the trace of its request."""

from __future__ import annotations

from dataclasses import dataclass, field

from pd_engine.contracts import worker_pb2 as pb

MAX_CHUNKS = 256


@dataclass(kw_only=True, slots=True)
class PromptTimes:
    """On the worker's clock, in seconds.

    Attributes:
        fetching_s: its beginning was asked for at another worker; None: it never was.
        running_s: the compute thread had it from then on; None before.
        chunks: (when it began, its duration, tokens of this prompt), in order.
    """

    arrived_s: float
    fetching_s: float | None = None
    running_s: float | None = None
    chunks: list[tuple[float, float, int]] = field(default_factory=list)

    def note_chunk(self, ended_s: float, seconds: float, num_tokens: int) -> None:
        """Those beyond `MAX_CHUNKS` are one with the last."""
        if len(self.chunks) < MAX_CHUNKS:
            self.chunks.append((ended_s - seconds, seconds, num_tokens))
            return
        begun_s, _, num_before = self.chunks[-1]
        self.chunks[-1] = (begun_s, ended_s - begun_s, num_before + num_tokens)

    def message(self, now_s: float) -> pb.PromptTimes:
        """When the first token is known."""
        running_s = now_s if self.running_s is None else self.running_s
        fetching_s = running_s if self.fetching_s is None else self.fetching_s
        return pb.PromptTimes(
            total_ms=(now_s - self.arrived_s) * 1000,
            queue_ms=(fetching_s - self.arrived_s) * 1000,
            fetch_ms=(running_s - fetching_s) * 1000,
            chunks=[
                pb.ChunkTime(begun_ms=(begun_s - self.arrived_s) * 1000, ms=seconds * 1000, num_tokens=num_tokens)
                for begun_s, seconds, num_tokens in self.chunks
            ],
        )
