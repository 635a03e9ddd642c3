"""Arithmetic that more than one process must agree on: optimizers, learning rates, reductions."""
