"""Attention over the paged latent cache."""
