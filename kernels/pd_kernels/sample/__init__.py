"""Choosing tokens: processed logits plus position-keyed noise."""
