"""Options of the strategy's methods, and the argument of a value function.

They keep TensorFlow's names, order and defaults. ``InputOptions`` are honoured by distributed data sets; those of
communication, and TensorFlow's of a run, are for machines with several hosts or TPUs and change nothing here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Self

from central_storage.diagnostics.callers import warn_deprecated
from cs_proto.errors import InvalidArgumentError

from .public_objects import Closed

__all__ = [
    "CommunicationImplementation",
    "CommunicationOptions",
    "InputOptions",
    "InputReplicationMode",
    "RunOptions",
    "ValueContext",
]


class InputReplicationMode(Closed, enum.Enum):
    """How often a data set function is called: once for the machine, or once for each replica."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class CommunicationImplementation(Closed, enum.Enum):
    """TensorFlow's ways to communicate between machines; without effect on one machine."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


class _RunFields(NamedTuple):
    experimental_enable_dynamic_batch_size: bool
    experimental_bucketizing_dynamic_shape: bool
    experimental_xla_options: object


class RunOptions(_RunFields):
    """Options of ``run`` and ``run_steps``. Those of TensorFlow are accepted, and without effect, as in its class.

    Args:
        experimental_enable_dynamic_batch_size: Kept.
        experimental_bucketizing_dynamic_shape: Kept.
        experimental_xla_options: Kept.
        keep_per_replica: Whether every result is a PerReplica, also if the replicas return equal ints or None, and
            with one replica. Then the type of a result never depends on the data.

    Examples:
        >>> import central_storage as cs
        >>> cs.RunOptions(keep_per_replica=True).keep_per_replica
        True
    """

    keep_per_replica: bool

    def __new__(
        cls,
        experimental_enable_dynamic_batch_size: bool = True,
        experimental_bucketizing_dynamic_shape: bool = False,
        experimental_xla_options: object = None,
        *,
        keep_per_replica: bool = False,
    ) -> Self:
        self = super().__new__(
            cls,
            experimental_enable_dynamic_batch_size,
            experimental_bucketizing_dynamic_shape,
            experimental_xla_options,
        )
        vars(self)["keep_per_replica"] = bool(keep_per_replica)  # no field: the tuple is TensorFlow's
        return self

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"RunOptions cannot be changed: make new ones with {name}={value!r:.50}")

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other) is True and getattr(other, "keep_per_replica", False) == self.keep_per_replica

    def __ne__(self, other: object) -> bool:  # tuple has its own
        return not self == other

    __hash__ = tuple.__hash__

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, keep_per_replica={self.keep_per_replica})"


class _InputFields(NamedTuple):
    experimental_fetch_to_device: bool
    experimental_replication_mode: InputReplicationMode
    experimental_place_dataset_on_device: bool
    experimental_per_replica_buffer_size: int


class InputOptions(_InputFields):
    """How a distributed data set brings its elements to the replicas.

    Args:
        experimental_fetch_to_device: Whether elements are brought to the replica's device (None: yes).
        experimental_replication_mode: How often a data set function is called.
        experimental_place_dataset_on_device: Whether the data set itself runs on the replica's device.
        experimental_per_replica_buffer_size: The number of elements read ahead for each replica. Elements of a list or
            tuple of small arrays are there already, and none is read ahead.
        experimental_prefetch_to_device: The older name of ``experimental_fetch_to_device``.

    Raises:
        TypeError: The mode is no InputReplicationMode, or both names of one option are given.
        InvalidArgumentError: The buffer size is no int of at least 0 (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> cs.InputOptions(experimental_per_replica_buffer_size=4).experimental_per_replica_buffer_size
        4
    """

    __slots__ = ()

    def __new__(
        cls,
        experimental_fetch_to_device: bool | None = None,
        experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
        experimental_place_dataset_on_device: bool = False,
        experimental_per_replica_buffer_size: int = 1,
        *,
        experimental_prefetch_to_device: bool | None = None,
    ) -> Self:
        if experimental_prefetch_to_device is not None:
            warn_deprecated(InputOptions, "experimental_prefetch_to_device", "experimental_fetch_to_device")
            if experimental_fetch_to_device is not None:
                raise TypeError(
                    "experimental_prefetch_to_device is the older name of experimental_fetch_to_device; give only "
                    "one of them"
                )
            experimental_fetch_to_device = experimental_prefetch_to_device
        if not isinstance(experimental_replication_mode, InputReplicationMode):
            raise TypeError(
                "experimental_replication_mode must be an InputReplicationMode, not "
                f"{experimental_replication_mode!r:.100}"
            )
        size = experimental_per_replica_buffer_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise InvalidArgumentError(
                f"experimental_per_replica_buffer_size must be a number of elements, not {size!r:.100}"
            )
        return super().__new__(
            cls,
            True if experimental_fetch_to_device is None else bool(experimental_fetch_to_device),
            experimental_replication_mode,
            bool(experimental_place_dataset_on_device),
            size,
        )


@dataclass(frozen=True)
class CommunicationOptions:
    """Hints for reductions between machines: accepted, and without effect on one machine.

    Args:
        bytes_per_pack: Bytes (0: chosen).
        timeout_seconds: Seconds, or None.
        implementation: A CommunicationImplementation or its name in any case.

    Raises:
        InvalidArgumentError: The bytes are negative, or the name is unknown (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> cs.CommunicationOptions(implementation="ring").implementation
        <CommunicationImplementation.RING: 'RING'>
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise InvalidArgumentError(f"bytes_per_pack must be at least 0, not {self.bytes_per_pack!r}")
        if isinstance(self.implementation, str):
            try:
                known = CommunicationImplementation(self.implementation.upper())
            except ValueError:
                raise InvalidArgumentError(
                    f"implementation must be 'AUTO', 'RING' or 'NCCL', not {self.implementation!r:.100}"
                ) from None
            object.__setattr__(self, "implementation", known)


@dataclass(frozen=True)
class ValueContext:
    """The replica for which a function of ``experimental_distribute_values_from_function`` makes a value.

    Args:
        replica_id_in_sync_group: The number of the replica, from 0.
        num_replicas_in_sync: The number of replicas.

    Examples:
        >>> import central_storage as cs
        >>> cs.ValueContext(1, 2).replica_id_in_sync_group
        1
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1
