"""Block-scaled FP8 products."""
