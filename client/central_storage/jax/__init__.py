"""JAX models in a strategy: pytrees of variables, steps from a loss, and optax's optimizers in the server.

    >>> import central_storage as cs, central_storage.jax as csj

It needs JAX: ``pip install 'central-storage[jax]'``. :func:`state` and :func:`load_state` need optax, too.
"""

from . import nodes as nodes
from . import optim
from .batches import batches
from .state import load_state, state
from .step import Step, step
from .tracing import key
from .trees import Narrow, centralize, read

__all__ = ["Narrow", "Step", "batches", "centralize", "key", "load_state", "optim", "read", "state", "step"]
