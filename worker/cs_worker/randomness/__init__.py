"""Random generators: the seed of each draw, and torch's state."""
