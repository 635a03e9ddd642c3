"""The strategy: contexts, checks, regrouping and reducing over a backend that does the work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NoReturn, Self

from cs_proto.errors import ConfigurationError, ContextError, ShutdownError
from cs_proto.messages import Counters

from . import context, devices
from .backend import ControllerBackend, ReplicaBackend
from .composites import Composite
from .dataset import Dataset, numpy_dataset
from .distribute import DistributedDataset, DistributedFromFunction, InputContext, refuse_in_replica
from .handles import Handle, HandleTable, handle_id
from .optimizers import Optimizer, optimizer_of
from .options import InputOptions
from .values import ReduceOp, local_results, reduce_values, regroup, select_replica
from .variable import Variable

__all__ = ["CentralStorageStrategy", "DefaultStrategy"]


class CentralStorageStrategy(Handle):
    """Synchronous data-parallel training on one machine; every variable exists once, in the parameter process.

    ``compute_devices`` lists one device per replica (``"cpu:0"``, ``"/gpu:1"``, full names); None means the
    launcher's devices under ``cs-launch``, else every GPU, else one CPU. ``parameter_device`` holds the variables;
    None means the only compute device, or CPU 0. Without a launcher the constructor starts the service and
    ``shutdown()``, the end of the script or its death stops it.

    ``seed`` seeds Python's and NumPy's random state in each replica of each run. ``start_timeout`` (seconds) limits
    the start.

    Raises DeviceError (a ValueError) for a device that does not exist, ConfigurationError for a seed or timeout that
    makes no sense, LaunchError where the service does not come up, ContextError inside a replica.
    """

    def __init__(
        self,
        compute_devices: Sequence[str] | None = None,
        parameter_device: str | None = None,
        *,
        seed: int = 0,
        start_timeout: float = 60.0,
    ) -> None:
        if context.in_worker:
            raise ContextError(
                "a strategy cannot be made inside a worker; make it in your script and let the function capture it"
            )
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 63:
            raise ConfigurationError(f"seed must be an int from 0 to 2**63 - 1, not {seed!r}")
        if (
            isinstance(start_timeout, bool)
            or not isinstance(start_timeout, (int, float))
            or not 0 < start_timeout < 1e6
        ):
            raise ConfigurationError(
                f"start_timeout must be seconds, more than 0 and less than 1e6, not {start_timeout!r}"
            )
        from .service import open_service

        backend = open_service(compute_devices, parameter_device, seed=seed, start_timeout=start_timeout)
        self._init(backend, backend.compute_devices, backend.parameter_device)
        backend.resolve_handles(self.object_for, self.adopt)

    @classmethod
    def from_backend(
        cls, backend: ControllerBackend, compute_devices: Sequence[str], parameter_device: str
    ) -> CentralStorageStrategy:
        """The handle of a strategy whose service runs elsewhere; what a worker holds."""
        self = cls.__new__(cls)
        self._init(backend, compute_devices, parameter_device)
        return self

    def _init(self, backend: ControllerBackend, compute_devices: Sequence[str], parameter_device: str) -> None:
        self._backend = backend
        self._compute_devices = tuple(compute_devices)
        self._parameter_device = parameter_device
        self._handles = HandleTable(
            {
                "strategy": lambda number: self,
                "variable": lambda number: Variable.from_record(self, self._catalogue.variable(number)),
                "optimizer": lambda number: optimizer_of(self, self._catalogue.optimizer(number)),
            }
        )

    def _cs_handle(self) -> tuple[str, int]:
        return ("strategy", 0)

    # --- what the rest of the package needs ---------------------------------------------------------------------

    @property
    def controller(self) -> ControllerBackend:
        """The seam to the service."""
        return self._backend

    @property
    def handles(self) -> HandleTable:
        """The objects that stand for things in the server."""
        return self._handles

    @property
    def extended_parameter_device(self) -> str:
        """The parameter device as a full name."""
        return devices.full_name(self._parameter_device)

    def object_for(self, kind: str, number: int) -> Handle:
        """The one object of this process for a handle that came from another process."""
        return self._handles.resolve(kind, number)

    def adopt(self, handle: Any) -> tuple[str, int]:
        """What stands for ``handle`` on its way to a replica. Raises ContextError for another strategy's."""
        if isinstance(handle, Composite):
            handle.adopt(self)
            return ("composite", 0)
        if isinstance(handle, Optimizer):
            handle.adopt(self)
        elif (handle if isinstance(handle, CentralStorageStrategy) else handle.strategy) is not self:
            raise ContextError(f"{handle!r} belongs to another strategy and cannot be used in a replica of this one")
        return handle_id(handle)

    @property
    def _catalogue(self) -> ControllerBackend | ReplicaBackend:
        return context.current_replica(self) or self._backend

    def remember(self, handle: Handle) -> None:
        """Let ``handle`` be the one object for its number in this process."""
        self._handles.add(handle)

    # --- the API ------------------------------------------------------------------------------------------------

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas: one per compute device."""
        return len(self._compute_devices)

    def scope(self) -> AbstractContextManager[CentralStorageStrategy]:
        """The context in which variables are made; yields the strategy.

        Raises ContextError (a RuntimeError) inside a replica and inside another strategy's scope.
        """
        return context.scope_of(self)

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: object = None,
    ) -> Any:
        """Call ``fn(*args, **kwargs)`` once per replica; what they return, regrouped.

        A PerReplica anywhere in ``args`` or ``kwargs`` is replaced by the replica's component. Arrays come back as
        PerReplica, what is equal on all replicas bare; with one replica everything comes back bare. ``fn`` is sent by
        value, so captured values are those of this call. An exception in a replica is raised here as a class that
        ``except`` of its type catches, with the replica's traceback as a note.

        Raises ValueError where ``args`` is no list or tuple, ShippingError for what cannot be sent, ResultError for a
        result that is not data, MergeMismatchError where replicas disagree, ReplicaLostError where a process died,
        ContextError inside a replica or another strategy's scope, ShutdownError after ``shutdown()``.
        """
        context.require_cross_replica(self, "run")
        if not isinstance(args, (list, tuple)):
            raise ValueError(f"args must be a list or tuple, not {type(args).__name__}; for one: args=(x,)")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(f"kwargs must be a mapping, not {type(kwargs).__name__}")
        if not callable(fn):
            raise TypeError(f"fn must be callable, not {fn!r}")
        given = (tuple(args), dict(kwargs or {}))
        arguments = [select_replica(replica, given) for replica in range(self.num_replicas_in_sync)]
        with context.enter_cross_replica(self):
            return regroup(self._backend.run(fn, arguments))

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | tuple[int, ...] | None) -> Any:
        """Combine the components of a PerReplica over replicas and, with ``axis``, over that axis of each.

        SUM adds in replica order and keeps the dtype. MEAN divides by the number of components or, with ``axis``, by
        the summed length of that axis, so it is right for uneven shares.

        Raises ValueError for an unknown op and for SUM of a value that is not distributed, InvalidArgumentError for
        components that do not fit each other, ContextError inside a replica.
        """
        context.require_cross_replica(self, "reduce")
        return reduce_values(reduce_op, value, axis, self.num_replicas_in_sync)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The components of a distributed value; of anything else a tuple of it. Works in every context."""
        return local_results(value, self.num_replicas_in_sync)

    def experimental_distribute_dataset(
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Split each element (a global batch) of ``dataset`` over the replicas along axis 0.

        ``dataset`` is a ``data.Dataset`` or anything that can be iterated again and again and yields nests of arrays.
        Of B rows each replica gets ceil(B / N) until they are used up; trailing shares may be shorter or empty.
        A thread reads ``options.experimental_per_replica_buffer_size`` elements ahead while the replicas compute;
        ``experimental_fetch_to_device=False`` has every element read when it is asked for.

        Raises NotADatasetError (a TypeError and AttributeError) for what is no data set, DatasetContextError (a
        RuntimeError and ValueError) inside a replica, and at the first element UnbatchedDatasetError (a ValueError and
        IndexError) for a data set of scalars.
        """
        refuse_in_replica("made")
        context.require_cross_replica(self, "experimental_distribute_dataset")
        return DistributedDataset(dataset, self.num_replicas_in_sync, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[Any]], options: InputOptions | None = None
    ) -> DistributedFromFunction:
        """Hand out the elements of ``dataset_fn(InputContext)`` in turn: each replica takes the next one.

        ``dataset_fn`` is called once, here (with ``InputReplicationMode.PER_REPLICA`` once for each replica, which then
        keeps to that data set), and batches by the size for one replica. ``for`` drops a last round in which not every
        replica gets an element; ``get_next_as_optional`` keeps it. Raises as :meth:`experimental_distribute_dataset`,
        and what ``dataset_fn`` raises.
        """
        refuse_in_replica("made")
        context.require_cross_replica(self, "distribute_datasets_from_function")
        return DistributedFromFunction(dataset_fn, self.num_replicas_in_sync, options)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[Any]], options: InputOptions | None = None
    ) -> DistributedFromFunction:
        """The older name of :meth:`distribute_datasets_from_function`."""
        return self.distribute_datasets_from_function(dataset_fn, options)

    def experimental_make_numpy_dataset(self, numpy_input: Any) -> Dataset:
        """The rows along axis 0 of the NumPy arrays in a nest; a list is stacked into one array first.

        Raises NotADatasetError (an AttributeError) for what is no array, InvalidArgumentError for scalars and for
        arrays of different length, ContextError inside a replica.
        """
        context.require_cross_replica(self, "experimental_make_numpy_dataset")
        return numpy_dataset(numpy_input)

    # --- ours ---------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """The run directory of the service: what ``connect`` takes, in any process of the same user."""
        return self._backend.address

    def statistics(self) -> Counters:
        """A snapshot of the server's counters, with what each replica brought. Sizes are bytes, times seconds."""
        return self._backend.statistics()

    def shutdown(self) -> None:
        """Stop the service that this strategy started, or leave the launcher's. Idempotent; also done at exit."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def __copy__(self) -> NoReturn:
        raise RuntimeError("a strategy cannot be copied: there is one service behind it")

    def __deepcopy__(self, memo: dict[int, Any]) -> CentralStorageStrategy:
        return self

    def __repr__(self) -> str:
        return (
            f"<CentralStorageStrategy of {self.num_replicas_in_sync} replicas ({', '.join(self._compute_devices)}), "
            f"parameters on {self._parameter_device}>"
        )


class DefaultStrategy:
    """What ``get_strategy()`` gives outside every scope: one local replica, no process, no variables of its own."""

    num_replicas_in_sync = 1

    def __init__(self) -> None:
        self.replica_context = context.ReplicaContext(self, None)

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: object = None,
    ) -> Any:
        """Call ``fn`` here."""
        return fn(*args, **(kwargs or {}))

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | tuple[int, ...] | None) -> Any:
        """As :meth:`CentralStorageStrategy.reduce`, with one replica."""
        return reduce_values(reduce_op, value, axis, 1)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """As :meth:`CentralStorageStrategy.experimental_local_results`."""
        return local_results(value, 1)

    def experimental_distribute_dataset(
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """The data set as it is: one replica gets everything."""
        return DistributedDataset(dataset, 1, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[Any]], options: InputOptions | None = None
    ) -> DistributedFromFunction:
        """As :meth:`CentralStorageStrategy.distribute_datasets_from_function`, with one replica."""
        return DistributedFromFunction(dataset_fn, 1, options)

    @property
    def controller(self) -> NoReturn:
        """There is no service behind the default strategy."""
        _no_service()

    @property
    def extended_parameter_device(self) -> str:
        """The CPU."""
        return devices.full_name("cpu:0")

    def remember(self, handle: Handle) -> NoReturn:
        """There is nothing that a handle could stand for."""
        _no_service()


def _no_service() -> NoReturn:
    raise ShutdownError("the default strategy has no service; make a CentralStorageStrategy and enter its scope")


context.set_default(DefaultStrategy().replica_context)
