"""Rotary embedding of interleaved pairs."""
