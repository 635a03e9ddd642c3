"""``cs.data``: data sets."""

from typing import NoReturn

from . import experimental
from .dataset import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Dataset
from .element_spec import TensorSpec
from .options import Options, ThreadingOptions

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "Dataset",
    "Options",
    "TensorSpec",
    "ThreadingOptions",
    "experimental",
]

_READERS = ("CsvDataset", "FixedLengthRecordDataset", "SqlDataset", "TFRecordDataset", "TextLineDataset")


def __getattr__(name: str) -> NoReturn:
    instead = "; grain reads files, and a strategy takes its data sets as they are (docs/guide/data.md)"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead if name in _READERS else ''}")
