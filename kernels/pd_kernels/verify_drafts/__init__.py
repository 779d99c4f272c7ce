"""How many tokens of each sequence a verification emits."""
