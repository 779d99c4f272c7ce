"""`pd-relay autoscale`: pools whose sizes follow targets. Pure but for the command."""
