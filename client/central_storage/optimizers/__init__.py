"""Optimizers: objects in the client that name an update rule, its numbers and its slots in the server."""

from typing import TYPE_CHECKING

from central_storage.diagnostics.tensorflow_names import attributes

from . import schedules
from .accumulator import GradientAccumulator
from .adagrad import Adadelta, Adagrad, RowwiseAdagrad
from .adam import Adam, Adamax, AdamW, Nadam
from .ftrl import Ftrl
from .lion import Lion
from .optimizer import Optimizer
from .rmsprop import RMSprop
from .sgd import SGD
from .table import of_kind as of_kind
from .table import optimizer_of
from .update import apply_gradients

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "GradientAccumulator",
    "Lion",
    "Nadam",
    "Optimizer",
    "RMSprop",
    "RowwiseAdagrad",
    "apply_gradients",
    "optimizer_of",
    "schedules",
]

if not TYPE_CHECKING:
    __getattr__ = attributes(__name__, "tf.keras.optimizers")
