"""Checkpoints: the graph of objects that is saved, and the files."""
