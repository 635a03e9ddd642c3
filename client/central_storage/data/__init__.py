"""``cs.data``: data sets."""

from typing import TYPE_CHECKING

from central_storage.diagnostics.tensorflow_names import attributes

from . import experimental
from .dataset import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Dataset
from .element_spec import TensorSpec
from .options import Options, ThreadingOptions
from .plan import DatasetIterator

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "Dataset",
    "DatasetIterator",
    "Options",
    "TensorSpec",
    "ThreadingOptions",
    "experimental",
]

if not TYPE_CHECKING:
    __getattr__ = attributes(__name__, "tf.data")
