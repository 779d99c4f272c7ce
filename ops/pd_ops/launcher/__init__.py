"""Clusters of many hosts: what a launcher file says, how hosts are reached, and Ray's node provider for named hosts."""
