"""Logging, error reports, tracebacks, the inventory of GPUs."""
