"""Metrics: running totals in variables, which replicas update and every process can read.

Each replica adds its own totals, so a mean is that of all examples, even if the replicas have unequal shares.
"""

from typing import TYPE_CHECKING

from central_storage.diagnostics.tensorflow_names import attributes

from .accuracy import Accuracy as Accuracy
from .accuracy import BinaryAccuracy as BinaryAccuracy
from .accuracy import CategoricalAccuracy as CategoricalAccuracy
from .accuracy import SparseCategoricalAccuracy as SparseCategoricalAccuracy
from .confusion import AUC as AUC
from .confusion import Precision as Precision
from .confusion import Recall as Recall
from .metric import Mean as Mean
from .metric import Metric as Metric
from .metric import Sum as Sum
from .regression import MeanAbsoluteError as MeanAbsoluteError
from .regression import MeanSquaredError as MeanSquaredError
from .regression import RootMeanSquaredError as RootMeanSquaredError

__all__ = [
    "AUC",
    "Accuracy",
    "BinaryAccuracy",
    "CategoricalAccuracy",
    "Mean",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Metric",
    "Precision",
    "Recall",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "Sum",
]

if not TYPE_CHECKING:
    __getattr__ = attributes(__name__, "tf.keras.metrics")
