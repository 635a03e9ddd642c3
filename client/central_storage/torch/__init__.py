"""torch models on Central Storage: ``import central_storage.torch as cst``.

torch is not a dependency of the package, so ``import central_storage`` does not import this one.
"""

from . import optim

__all__ = ["optim"]
