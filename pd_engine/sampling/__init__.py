"""How a token is chosen. Torch-free, so that the router can validate without loading a model library."""
