"""The model, its cache, sampling and the contracts between processes. Knows no role: a worker is built over it."""
