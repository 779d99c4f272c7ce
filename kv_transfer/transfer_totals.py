"""What a worker has fetched in its life, and what went wrong meanwhile: for its reports."""

from __future__ import annotations

from dataclasses import dataclass

from pd_engine.contracts import worker_pb2 as pb


@dataclass(kw_only=True, slots=True)
class TransferTotals:
    """Attributes:
    num_fetched_bytes, num_fetches, fetch_s: of fetches that ended well; those at the same time each count in full.
    num_failed_pulls: that ended without success, whoever was to blame.
    num_expired_leases: that nobody renewed.
    """

    num_fetched_bytes: int = 0
    num_fetches: int = 0
    fetch_s: float = 0.0
    num_failed_pulls: int = 0
    num_expired_leases: int = 0

    def note_fetch(self, num_bytes: int, seconds: float) -> None:
        self.num_fetched_bytes += num_bytes
        self.num_fetches += 1
        self.fetch_s += seconds

    def loads(self) -> pb.LoadsReply:
        """Their part of a worker's report."""
        return pb.LoadsReply(
            fetched_bytes_total=self.num_fetched_bytes,
            num_fetches_total=self.num_fetches,
            fetch_us_total=round(self.fetch_s * 1e6),
            num_failed_pulls_total=self.num_failed_pulls,
            num_expired_leases_total=self.num_expired_leases,
        )
