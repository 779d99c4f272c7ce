"""Activations in e4m3, with a scale for each token and 128 channels."""
