"""Routed experts with the shared one, and the dense MLP."""
