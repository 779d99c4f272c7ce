"""Moves a request's cached state from the worker that computed it to the worker that continues it.

The destination pulls: `source` publishes what is computed in manifest parts, `destination` fetches it through a
transport, checks every piece, and only then commits. Nothing here knows a model, a role or Ray.
"""
