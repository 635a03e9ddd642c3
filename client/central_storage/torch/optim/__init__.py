"""torch's optimizers, whose rules the server applies: ``cst.optim.AdamW`` in place of ``torch.optim.AdamW``."""

from typing import Any

from torch.optim import lr_scheduler

from .base import CentralOptimizer
from .classes import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, SparseAdam
from .papers import LAMB, Lion, RowwiseAdagrad

__all__ = [
    "LAMB",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "CentralOptimizer",
    "Lion",
    "NAdam",
    "RAdam",
    "RMSprop",
    "RowwiseAdagrad",
    "SparseAdam",
    "lr_scheduler",
]

#: The optimizers of torch that the server does not have, and what to use instead.
_MISSING = {
    "ASGD": "the server does not average parameters for it; use SGD",
    "Adafactor": "use Adam, whose state the server keeps once for all replicas",
    "LBFGS": "it computes the loss several times in a step; use Adam, or LBFGS of torch on a model that is not central",
    "Muon": "its step is no function of single elements; use AdamW",
    "Rprop": "it is meant for whole data sets, not for batches; use RMSprop",
}


def __getattr__(name: str) -> Any:
    if name in _MISSING:
        raise AttributeError(f"cst.optim has no {name}: {_MISSING[name]}")
    raise AttributeError(f"cst.optim has no {name}; it has {', '.join(__all__)}")
