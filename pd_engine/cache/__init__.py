"""Blocks of latents: their layout in memory, who owns them, and where they live."""
