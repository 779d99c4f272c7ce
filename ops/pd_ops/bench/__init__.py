"""Measurements: `pd-relay bench engine` and `pd-relay bench transfer`."""
