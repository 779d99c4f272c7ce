"""The same load for pd-relay and for vLLM's CPU build with NIXL, on the same cores, in turns."""
