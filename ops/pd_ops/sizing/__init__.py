"""Pools of any size under any load, in simulated time: what `pd-relay simulate capacity` plays."""
