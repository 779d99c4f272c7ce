"""`bench layers`: from single ops up to tokens that a client receives; each level, and what its parts explain of it."""
