"""Logging, error reports, the inventory of GPUs."""
