"""Variables, optimizers and their updates: where each lies and what belongs to it."""
