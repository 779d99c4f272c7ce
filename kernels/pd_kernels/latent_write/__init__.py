"""Norm, rotate and write one latent a row into the paged cache."""
