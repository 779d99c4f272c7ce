"""The time between two tokens as a straight line over the batch, from what a decode worker reports. Pure."""

from __future__ import annotations

FIXED_STEP_SEQUENCES = 16  # assumed until batches have differed: the part of a step that does not grow, in sequences
_FORGET = 0.95  # of what is known, with each report: the last 20 count, four seconds
_ASSUMED_VARIANCE = 4.0  # of batches, in sequences squared: that much spread outweighs the assumption


class ItlLine:
    """Least squares over reports, old ones counting less, drawn to an assumed slope as long as batches hardly differ.

    Neither slope nor the time of an empty batch is ever below 0.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._batch = 0.0  # means
        self._itl_ms = 0.0
        self._variance = 0.0
        self._covariance = 0.0

    def note(self, batch: int, itl_ms: float) -> None:
        """A worker has measured `itl_ms` with that many sequences."""
        self._weight = _FORGET * self._weight + 1
        share = 1 / self._weight
        batch_off, itl_off = batch - self._batch, itl_ms - self._itl_ms
        self._batch += share * batch_off
        self._itl_ms += share * itl_off
        self._variance = (1 - share) * (self._variance + share * batch_off * batch_off)
        self._covariance = (1 - share) * (self._covariance + share * batch_off * itl_off)

    @property
    def is_measured(self) -> bool:
        return self._weight > 0

    def at(self, batch: int) -> float:
        """Milliseconds between two tokens with so many sequences; it has been measured."""
        assert self.is_measured
        assumed = self._itl_ms / (FIXED_STEP_SEQUENCES + self._batch)
        slope = (self._covariance + _ASSUMED_VARIANCE * assumed) / (self._variance + _ASSUMED_VARIANCE)
        most = self._itl_ms / self._batch if self._batch > 0 else assumed
        return max(0.0, self._itl_ms + min(max(slope, 0.0), most) * (batch - self._batch))
