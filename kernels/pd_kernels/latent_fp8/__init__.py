"""The FP8 form of a cache slot."""
