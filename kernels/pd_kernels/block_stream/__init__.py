"""Pieces through a stream socket."""

from pd_kernels.block_stream.stream import receive_and_checksum_pieces, receive_pieces, send_pieces

__all__ = ["receive_and_checksum_pieces", "receive_pieces", "send_pieces"]
