"""torch models on Central Storage: ``import central_storage.torch as cst``.

torch is not a dependency of the package, so ``import central_storage`` does not import this one; the extra ``torch``
installs it.
"""

from . import optim
from .batches import batches
from .centralize import centralize, pull
from .collectives import all_gather, all_reduce
from .errors import StateDictError
from .parameters import CentralParameter
from .step import clip_grad_norm_, evaluate, function, step
from .sync_batchnorm import SyncBatchNorm

__all__ = [
    "CentralParameter",
    "StateDictError",
    "SyncBatchNorm",
    "all_gather",
    "all_reduce",
    "batches",
    "centralize",
    "clip_grad_norm_",
    "evaluate",
    "function",
    "optim",
    "pull",
    "step",
]
