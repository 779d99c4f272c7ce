"""The commands of `pd-relay`, one module each. They import what is heavy only when they run."""
