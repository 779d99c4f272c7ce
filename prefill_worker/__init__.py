"""Reads prompts and builds the latent cache, publishing each layer of a chunk as it is done.

A prompt's way: `service` (what arrives is checked) -> `core` (queue, blocks, the handoff's source) -> `runner`
(the compute thread: chunks that `scheduler` planned, the first token) -> back through `core` to the caller.
"""
