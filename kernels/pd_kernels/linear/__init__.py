"""y = x W^T with rows that do not depend on company."""
