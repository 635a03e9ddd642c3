"""``cs.distribute``: the names of ``tf.distribute``. All are the names of ``cs`` itself."""

from typing import TYPE_CHECKING

from central_storage.core.context import (
    ReplicaContext,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from central_storage.core.options import InputOptions, InputReplicationMode, RunOptions, ValueContext
from central_storage.core.values import DistributedValues, ReduceOp
from central_storage.data.distributed import DistributedDataset, DistributedIterator
from central_storage.data.input_context import InputContext
from central_storage.diagnostics.tensorflow_names import attributes
from central_storage.strategy.extended import StrategyExtended
from central_storage.strategy.service_strategy import CentralStorageStrategy

from . import experimental

__all__ = [
    "CentralStorageStrategy",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "ReduceOp",
    "ReplicaContext",
    "RunOptions",
    "StrategyExtended",
    "ValueContext",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]

if not TYPE_CHECKING:
    __getattr__ = attributes(__name__, "tf.distribute")
