"""``cs.data``: data sets."""

from .dataset import Dataset

__all__ = ["Dataset"]
