"""The checksum of a piece."""
