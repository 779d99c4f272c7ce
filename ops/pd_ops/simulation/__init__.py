"""A whole cluster in one process on a virtual clock: the production classes, a toy model, seeded faults. Decision 0210
says what is real in it and what is not."""
