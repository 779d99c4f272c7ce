"""A cluster: which processes there are, where they run, how they start and end. Ray is used here and nowhere else."""
