"""Both halves of kv_b_proj, absorbed into the queries and the output."""
