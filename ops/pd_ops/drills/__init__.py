"""Drills: something is broken on purpose in a running cluster, under a steady stream of requests. What clients, pools
and blocks make of it is measured, and every answer compared with one process."""
