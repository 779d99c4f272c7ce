"""Copying pieces between arenas."""

from pd_kernels.block_copy.copy import copy_and_checksum_pieces, copy_pieces, memcpy_pieces

__all__ = ["copy_and_checksum_pieces", "copy_pieces", "memcpy_pieces"]
