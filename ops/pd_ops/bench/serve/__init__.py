"""`pd-relay bench serve`: a load generator, what it measured, and what that says."""
