"""Synchronous data-parallel training on one machine, with every variable held once.

    >>> import central_storage as cs

The Strategy API of ``tf.distribute.experimental.CentralStorageStrategy`` as a service: one server process owns the
variables, one worker process per device runs the replica function.
"""

import functools as _functools
import gc as _gc
import sys as _sys
from importlib import import_module as _import_module
from importlib.util import resolve_name as _resolve_name
from sys import modules as _modules
from typing import TYPE_CHECKING
from typing import Any as _Any

from cs_proto.version import __version__ as __version__

from .core import opening as _opening

# The public names. Type checkers read this block, and so does ``_imports``: each name is imported when it is first
# asked for. The supervisor, which runs ``central_storage.launch``, asks for none: it would take three times as long to
# start, and NumPy's memory, with them.
if TYPE_CHECKING:
    from cs_proto.messages import Counters as Counters

    from . import aio as aio
    from . import compat as compat
    from . import data as data
    from . import distribute as distribute
    from . import errors as errors
    from . import metrics as metrics
    from . import nest as nest
    from . import nn as nn
    from . import optimizers as optimizers
    from . import random as random
    from . import summary as summary
    from . import train as train
    from .core.context import ReplicaContext as ReplicaContext
    from .core.context import experimental_set_strategy as experimental_set_strategy
    from .core.context import get_array_module as get_array_module
    from .core.context import get_replica_context as get_replica_context
    from .core.context import get_strategy as get_strategy
    from .core.context import has_strategy as has_strategy
    from .core.context import in_cross_replica_context as in_cross_replica_context
    from .core.devices.placement import convert_to_tensor as convert_to_tensor
    from .core.devices.placement import device as device
    from .core.options import CommunicationImplementation as CommunicationImplementation
    from .core.options import CommunicationOptions as CommunicationOptions
    from .core.options import InputOptions as InputOptions
    from .core.options import InputReplicationMode as InputReplicationMode
    from .core.options import RunOptions as RunOptions
    from .core.options import ValueContext as ValueContext
    from .core.spans import span as span
    from .core.tensors.operations import add as add
    from .core.tensors.operations import constant as constant
    from .core.tensors.operations import identity as identity
    from .core.tensors.operations import range as range  # noqa: A004  (TensorFlow's name)
    from .core.tensors.operations import reshape as reshape
    from .core.tensors.tensor import Tensor as Tensor
    from .core.values import DistributedValues as DistributedValues
    from .core.values import IndexedSlices as IndexedSlices
    from .core.values import Mirrored as Mirrored
    from .core.values import PerReplica as PerReplica
    from .core.values import ReduceOp as ReduceOp
    from .core.values import VariableAggregation as VariableAggregation
    from .core.values import VariableSynchronization as VariableSynchronization
    from .data.distributed import DistributedDataset as DistributedDataset
    from .data.distributed import DistributedIterator as DistributedIterator
    from .data.element_spec import TensorSpec as TensorSpec
    from .data.input_context import InputContext as InputContext
    from .observer.blocking import connect as connect
    from .pickling.function import function as function
    from .strategy.extended import StrategyExtended as StrategyExtended
    from .strategy.progress import progress as progress
    from .strategy.service_strategy import CentralStorageStrategy as CentralStorageStrategy
    from .strategy.service_strategy import running_strategies as running_strategies
    from .variables.gradient_buffers import gradient_buffers as gradient_buffers
    from .variables.variable import Variable as Variable

# Packages for a framework, which are imported only when they are asked for, and so is the framework. They are not among
# the names of `__all__`: whoever imports these need not have the framework.
if TYPE_CHECKING:
    from . import jax as jax
    from . import torch as torch

_FRAMEWORKS = {"jax", "torch"}

if _sys.platform != "linux":
    raise ImportError(
        f"central_storage runs on Linux only, and this system is {_sys.platform!r}; use a Linux machine, a container "
        "(see the Dockerfile) or WSL 2"
    )


@_functools.cache
def _imports() -> dict[str, tuple[str, bool]]:
    """By public name, the module to import, and whether the name is one of that module's and not the module itself."""
    import ast
    from pathlib import Path

    read = ast.parse(Path(__file__).read_bytes())
    block = next(statement for statement in read.body if isinstance(statement, ast.If))
    return {
        alias.name: ("." * each.level + (each.module or alias.name), each.module is not None)
        for each in block.body
        if isinstance(each, ast.ImportFrom)
        for alias in each.names
    }


def __getattr__(name: str) -> _Any:
    if name == "__all__":
        return sorted(_imports())
    if name in _FRAMEWORKS:
        return _import_module(f".{name}", __name__)
    if name.startswith("_") or name not in _imports():
        from .diagnostics.tensorflow_names import refuse  # late, as everything here

        refuse(__name__, "tf", name, _imports())
    module, _ = _imports()[name]
    collects = _gc.isenabled()
    _gc.disable()  # what is imported stays: to look through it for garbage is a fifth of what the imports take
    try:
        _import_module(module, __name__)
    finally:
        if collects:
            _gc.enable()
    _present()
    return globals()[name]


def _present() -> None:
    """Make every public name that was imported ready for users, whoever imported it."""
    from .core.public_objects import present  # late, as everything here

    for name, (module, is_in_module) in _imports().items():
        imported = _modules.get(_resolve_name(module, __name__))
        found = vars(imported).get(name) if is_in_module and imported is not None else imported
        if found is not None and name not in _presented:
            _presented.add(name)
            globals()[name] = present(found)


_presented: set[str] = set()


def _open_service(*args: _Any, **kwargs: _Any) -> _Any:
    from .strategy.open_service import open_service  # late, as everything here

    return open_service(*args, **kwargs)


def _default_replica() -> _Any:
    from .strategy.service_strategy import DefaultStrategy

    return DefaultStrategy().replica_context


_opening.open_service = _open_service
_opening.default_replica = _default_replica


def __dir__() -> list[str]:
    return sorted(_imports())
