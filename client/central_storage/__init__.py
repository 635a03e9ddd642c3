"""Synchronous data-parallel training on one machine, with every variable held once.

    >>> import central_storage as cs

The Strategy API of ``tf.distribute.experimental.CentralStorageStrategy`` as a service: one server process owns the
variables, one worker process per device runs the replica function.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

from cs_proto.messages import Counters

from . import data, errors, metrics, nest, nn, optimizers, train
from .buffers import gradient_buffers
from .context import (
    ReplicaContext,
    experimental_set_strategy,
    get_array_module,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from .distribute import DistributedDataset, DistributedIterator, InputContext
from .extended import StrategyExtended
from .function import function
from .observer import connect
from .options import (
    CommunicationImplementation,
    CommunicationOptions,
    InputOptions,
    InputReplicationMode,
    RunOptions,
    ValueContext,
)
from .placement import convert_to_tensor, device
from .strategy import CentralStorageStrategy
from .values import (
    DistributedValues,
    IndexedSlices,
    Mirrored,
    PerReplica,
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
)
from .variable import Variable

if TYPE_CHECKING:
    from . import aio

__all__ = [
    "CentralStorageStrategy",
    "CommunicationImplementation",
    "CommunicationOptions",
    "Counters",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Mirrored",
    "PerReplica",
    "ReduceOp",
    "ReplicaContext",
    "RunOptions",
    "StrategyExtended",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "aio",
    "connect",
    "convert_to_tensor",
    "data",
    "device",
    "errors",
    "experimental_set_strategy",
    "function",
    "get_array_module",
    "get_replica_context",
    "get_strategy",
    "gradient_buffers",
    "has_strategy",
    "in_cross_replica_context",
    "metrics",
    "nest",
    "nn",
    "optimizers",
    "train",
]


def __getattr__(name: str) -> _Any:
    if name == "aio":  # asyncio is a seventh of what a process needs to start, and few programs use it
        return _import_module(".aio", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
