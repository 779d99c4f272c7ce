"""What a model takes: bytes of weights and cache, legal layouts, what crosses links. Arithmetic only, no torch."""
