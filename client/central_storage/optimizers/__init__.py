"""Optimizers: objects in the client that name an update rule, its numbers and its slots in the server."""

from .adam import Adam
from .optimizer import Optimizer
from .sgd import SGD
from .table import optimizer_of

__all__ = ["SGD", "Adam", "Optimizer", "optimizer_of"]
