"""What `bench transfer` moves where nothing else is said. Imports nothing, for the command's help."""

from __future__ import annotations

REGION_BYTES = 64 * 2**20
NUM_PIECES = 2048
