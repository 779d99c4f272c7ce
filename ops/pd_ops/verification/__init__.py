"""Whether a cluster gives what one process gives: requests, results and their comparison, bit for bit."""
