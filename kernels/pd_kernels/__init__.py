"""The ops of the serving path, each beside its reference."""
