"""Synchronous data-parallel training on one machine, with every variable held once.

    >>> import central_storage as cs

The Strategy API of ``tf.distribute.experimental.CentralStorageStrategy`` as a service: one server process owns the
variables, one worker process per device runs the replica function.
"""

import gc as _gc
from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:
    from cs_proto.messages import Counters

    from . import aio, data, errors, metrics, nest, nn, optimizers, train
    from .core.context import (
        ReplicaContext,
        experimental_set_strategy,
        get_array_module,
        get_replica_context,
        get_strategy,
        has_strategy,
        in_cross_replica_context,
    )
    from .core.options import (
        CommunicationImplementation,
        CommunicationOptions,
        InputOptions,
        InputReplicationMode,
        RunOptions,
        ValueContext,
    )
    from .core.placement import convert_to_tensor, device
    from .core.values import (
        DistributedValues,
        IndexedSlices,
        Mirrored,
        PerReplica,
        ReduceOp,
        VariableAggregation,
        VariableSynchronization,
    )
    from .data.distributed import DistributedDataset, DistributedIterator, InputContext
    from .observer.blocking import connect
    from .pickling.function import function
    from .strategy.extended import StrategyExtended
    from .strategy.service_strategy import CentralStorageStrategy
    from .variables.gradient_buffers import gradient_buffers
    from .variables.variable import Variable

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

# Each of the names above is imported when it is first asked for. The supervisor, which runs ``central_storage.launch``,
# asks for none: it would take three times as long to start, and NumPy's memory, with them.
_MODULES = {
    "cs_proto.messages": ["Counters"],
    ".variables.gradient_buffers": ["gradient_buffers"],
    ".core.context": [
        "ReplicaContext",
        "experimental_set_strategy",
        "get_array_module",
        "get_replica_context",
        "get_strategy",
        "has_strategy",
        "in_cross_replica_context",
    ],
    ".data.distributed": ["DistributedDataset", "DistributedIterator", "InputContext"],
    ".strategy.extended": ["StrategyExtended"],
    ".pickling.function": ["function"],
    ".observer.blocking": ["connect"],
    ".core.options": [
        "CommunicationImplementation",
        "CommunicationOptions",
        "InputOptions",
        "InputReplicationMode",
        "RunOptions",
        "ValueContext",
    ],
    ".core.placement": ["convert_to_tensor", "device"],
    ".strategy.service_strategy": ["CentralStorageStrategy"],
    ".core.values": [
        "DistributedValues",
        "IndexedSlices",
        "Mirrored",
        "PerReplica",
        "ReduceOp",
        "VariableAggregation",
        "VariableSynchronization",
    ],
    ".variables.variable": ["Variable"],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> _Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULE_OF.get(name)
    collects = _gc.isenabled()
    _gc.disable()  # what is imported stays: to look through it for garbage is a fifth of what the imports take
    try:
        imported = _import_module(f".{name}" if module is None else module, __name__)
    finally:
        if collects:
            _gc.enable()
    globals()[name] = found = imported if module is None else getattr(imported, name)
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
