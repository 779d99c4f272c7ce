"""Takes a prompt's latents over and continues it in a batch, drafting with MTP and verifying.

A choice's way: `service` (what arrives is checked) -> `core` (lease, pull, blocks) -> `runner` (the compute thread:
the batch that `scheduler` picked, one step after the other) -> `step_results` -> `tokens_hub` -> the router.
"""
