"""Checkpoints in torch's own format: the state dicts of all parts, and how far the training is.

Both programs of a model continue from the same file. It does not hold torch's random numbers, so dropout begins anew.
"""

import os
from typing import Any

import torch


def save(path: str, parts: dict[str, Any], done: int) -> None:
    """Write a file, which is replaced as a whole. ``done``: how many epochs or steps."""
    if path:
        torch.save({"done": done, **{name: part.state_dict() for name, part in parts.items()}}, f"{path}.new")
        os.replace(f"{path}.new", path)


def load(path: str, parts: dict[str, Any]) -> int:
    """How many epochs or steps are done: 0 if there is no file."""
    if not os.path.exists(path):
        return 0
    saved = torch.load(path)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved["done"]
