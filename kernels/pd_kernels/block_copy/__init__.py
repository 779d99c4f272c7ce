"""Copying pieces between arenas."""
