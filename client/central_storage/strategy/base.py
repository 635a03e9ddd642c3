"""The API that every strategy has, whatever runs its replicas.

Contexts, checks, regrouping and reducing; a subclass says how functions are called on replicas, and on which devices
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, NoReturn, Self

from central_storage.core import context, logical_devices
from central_storage.core.backends import Carriage, ControllerBackend
from central_storage.core.deprecated import warn_deprecated
from central_storage.core.handles import Handle
from central_storage.core.options import InputOptions, RunOptions, ValueContext
from central_storage.core.values import ReduceOp, gather_values, local_results, reduce_values, regroup, select_replicas
from central_storage.core.variable_sets import VariableSets
from central_storage.data.dataset import Dataset
from central_storage.data.distributed import (
    DistributedDataset,
    DistributedFromFunction,
    DistributedIterator,
    InputContext,
    refuse_in_replica,
)
from central_storage.variables.variable import Variable
from cs_proto.errors import ContextError

from .extended import StrategyExtended
from .run_steps import LOOKAHEAD, Steps, StepSeries, check

__all__ = ["StrategyBase"]


class StrategyBase:
    """What users call on a strategy."""

    # --- what a subclass says -----------------------------------------------------------------------------------

    @property
    def variable_sets(self) -> VariableSets:
        """Sets of variables that are known by identity. Raises where there is no service."""
        raise NotImplementedError

    @property
    def controller(self) -> ControllerBackend:
        """The seam to the service. Raises ShutdownError where there is none."""
        raise NotImplementedError

    @property
    def devices_by_replica(self) -> list[list[str]]:
        """The devices of each replica, as full names."""
        raise NotImplementedError

    @property
    def extended_parameter_device(self) -> str:
        """The parameter device as a full name."""
        raise NotImplementedError

    @property
    def variables(self) -> tuple[Variable, ...]:
        """Every variable of the strategy; the default strategy has none."""
        return ()

    def claim(self, average: object, name: str) -> str:
        """A name that no other moving average of this strategy has or had."""
        return name

    def remember(self, handle: Handle) -> None:
        """Let ``handle`` be the one object for its number in this process."""
        raise NotImplementedError

    def call(
        self, function: Callable[..., Any], arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> list[Any]:
        """Call ``function`` once per replica with that replica's (args, kwargs); the results in replica order."""
        raise NotImplementedError

    def series(self, lookahead: int) -> StepSeries:
        """What carries out steps, of which it may be told ``lookahead`` before their turn. Raises ContextError in a
        merge_call."""
        raise NotImplementedError

    def evaluate_schedules(self) -> None:
        """Before every run: learning rates that only the client can work out."""

    def carrier(self) -> Carriage:
        """What copies an array to where the replicas read it; here plain memory."""
        return Carriage()

    def logical_devices_here(self) -> tuple[Sequence[str], logical_devices.Place]:
        """The devices of the current replica, as full names, and what brings an array to one of them."""
        replica = context.current_replica(self)
        return (self.devices_by_replica[0], _nowhere) if replica is None else (replica.devices, replica.place)

    # --- what it is ---------------------------------------------------------------------------------------------

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return len(self.devices_by_replica)

    @property
    def cluster_resolver(self) -> None:
        """None: there is one machine."""
        return None

    @property
    def extended(self) -> StrategyExtended:
        """The operations for those who write optimizers, metrics and the like."""
        return self._extended

    @cached_property
    def _extended(self) -> StrategyExtended:
        return StrategyExtended(self)

    def scope(self) -> AbstractContextManager[Self]:
        """The context in which variables are made; yields the strategy.

        Raises ContextError (a RuntimeError) inside a replica, inside another strategy's scope, and where the manager
        is entered again after it was left.
        """
        return context.Scope(self)

    # --- running and combining ----------------------------------------------------------------------------------

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Call ``fn(*args, **kwargs)`` once per replica; what they return, regrouped.

        A PerReplica anywhere in ``args`` or ``kwargs`` is replaced by the replica's component. Arrays come back as
        PerReplica, what is equal on all replicas bare; with one replica everything comes back bare. ``fn`` is sent by
        value, so captured values are those of this call. An exception in a replica is raised here as a class that
        ``except`` of its type catches, with the replica's traceback as a note. ``options`` changes nothing.

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
        arguments = self._arguments(tuple(args), kwargs)
        with context.enter_cross_replica(self):
            return regroup(self.call(fn, arguments))

    def _arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """(args, kwargs) of each replica."""
        n = self.num_replicas_in_sync
        given = select_replicas(n, args)
        return list(zip(given, select_replicas(n, dict(kwargs)) if kwargs else ({},) * n, strict=True))

    def run_steps(
        self,
        fn: Callable[..., Any],
        dataset: DistributedDataset | DistributedFromFunction | DistributedIterator,
        steps: int | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        lookahead: int = LOOKAHEAD,
    ) -> Steps:
        """Iterate over what ``run`` would return for ``fn(element, **kwargs)`` of each element of ``dataset``, in
        order, at most ``steps`` of them (None: all), with less waiting between them.

        ``dataset`` is a distributed data set, which is iterated from its beginning, or an iterator of one, to which
        elements that are not used go back. When the loop gets the result of step k, exactly the steps up to k +
        ``lookahead`` have been sent, and workers begin each when the one before it is committed. Whatever else the
        loop asks of the strategy (a learning rate, a variable, a save, ``run``) first waits for those, so it always
        falls between the same two steps; what the loop changes in captured values is seen from the first step after
        them. ``lookahead=0`` sends each step when its result is wanted; it is at most 64.

        Where step k fails, no later one begins; the iterator raises what ``run`` would and ends. One that is left
        early waits for the steps that were sent, at most ``lookahead``; ``steps`` of the iterator counts them. Ctrl-C
        cancels the step at hand and those after it. An exception of the data set comes out where its element would
        have. The default strategy carries out each step when its result is wanted.

        Raises TypeError and InvalidArgumentError (a ValueError) for arguments that make no sense, ContextError inside
        a replica, a merge_call or another strategy's scope, and as :meth:`run` when iterated.
        """
        context.require_cross_replica(self, "run_steps")
        series = self.series(lookahead)
        check(fn, dataset, self.num_replicas_in_sync, steps, kwargs, lookahead)
        given = dict(kwargs or {})

        def send(element: Any) -> None:
            context.require_cross_replica(self, "run_steps")
            arguments = self._arguments((element,), given)
            with context.enter_cross_replica(self):
                self.evaluate_schedules()
                if series.has_failed:  # known only now; its error comes out before this one
                    raise ContextError("a step before this one has failed")
                series.send(fn, arguments)

        return Steps(series, iter(dataset), not isinstance(dataset, DistributedIterator), steps, send)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | tuple[int, ...] | None) -> Any:
        """Combine the components of a PerReplica over replicas and, with ``axis``, over that axis of each.

        SUM adds in replica order and keeps the dtype. MEAN divides by the number of components or, with ``axis``, by
        the summed length of that axis, so it is right for uneven shares.

        Raises ValueError for an unknown op, for a nest and for SUM of a value that is not distributed,
        InvalidArgumentError for components that do not fit each other, ContextError inside a replica or another
        strategy's scope.
        """
        context.require_cross_replica(self, "reduce")
        return reduce_values(reduce_op, value, axis, self.num_replicas_in_sync)

    def gather(self, value: Any, axis: int) -> Any:
        """The components of a PerReplica one after the other along ``axis``, in replica order, as one array.

        Lengths along ``axis`` may differ between replicas, also 0. A value that is not distributed comes back as it
        is. Raises InvalidArgumentError (a ValueError) where rank, dtype or another axis differs, for components
        without axes and for an axis that is None or out of range, TypeError for an axis of another type,
        NotImplementedError for IndexedSlices, ContextError inside a replica or another strategy's scope.
        """
        context.require_cross_replica(self, "gather")
        return gather_values(value, axis, self.num_replicas_in_sync)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The components of a distributed value, N nests of a nest, of anything else a tuple of it. Works in every
        context."""
        return local_results(value, self.num_replicas_in_sync)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """What ``value_fn`` returns for each replica, called here in replica order, as a nest with a PerReplica at
        every leaf, under one replica too. Works in every context; exceptions come out unchanged.

        Raises AssertionError where replicas get nests of different structure.
        """
        n = self.num_replicas_in_sync
        return regroup([value_fn(ValueContext(replica, n)) for replica in range(n)], always_wrap=True)

    # --- data sets ----------------------------------------------------------------------------------------------

    def experimental_distribute_dataset(
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Split each element (a global batch) of ``dataset`` over the replicas along axis 0.

        ``dataset`` is a ``data.Dataset`` or anything that can be iterated again and again and yields nests of arrays.
        Of B rows each replica gets ceil(B / N) until they are used up; trailing shares may be shorter or empty.

        From the second element on a thread reads ``options.experimental_per_replica_buffer_size`` elements ahead while
        the replicas compute; of a list or tuple of small arrays each is read when it is asked for, and so it is with
        ``experimental_fetch_to_device=False``: for a source that shares state with the script, such as the global
        random generators.

        Raises NotADatasetError (a TypeError and AttributeError) for what is no data set, DatasetContextError (a
        RuntimeError and ValueError) inside a replica, ContextError inside another strategy's scope, and at the first
        element UnbatchedDatasetError (a ValueError and IndexError) for a data set of scalars.
        """
        refuse_in_replica("made")
        context.require_cross_replica(self, "experimental_distribute_dataset")
        return DistributedDataset(dataset, self.num_replicas_in_sync, options, self.carrier)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedFromFunction:
        """Hand out the elements of ``dataset_fn(InputContext)`` in turn: each replica takes the next one.

        ``dataset_fn`` is called once, now, in the context of the caller (with ``InputReplicationMode.PER_REPLICA`` once
        for each replica, which then keeps to that data set), and batches by the size for one replica. ``for`` drops a
        last round in which not every replica gets an element; ``get_next_as_optional`` keeps it. Raises as
        :meth:`experimental_distribute_dataset`, and what ``dataset_fn`` raises.
        """
        refuse_in_replica("made")
        context.require_cross_replica(self, "distribute_datasets_from_function")
        return DistributedFromFunction(dataset_fn, self.num_replicas_in_sync, options, self.carrier)

    # --- the devices of one replica -----------------------------------------------------------------------------

    def experimental_assign_to_logical_device(
        self, tensor: Any, logical_device_id: int
    ) -> logical_devices.LogicalTensor:
        """``tensor`` on the replica's device number ``logical_device_id``; read as an array it is unchanged.

        Called inside a replica function. Raises InvalidArgumentError (a ValueError) where the replica has no such
        device, ContextError outside a replica.
        """
        return logical_devices.assign(tensor, logical_device_id, *self.logical_devices_here())

    def experimental_split_to_logical_devices(
        self, tensor: Any, partition_dimensions: Sequence[int]
    ) -> logical_devices.LogicalTensor:
        """``tensor`` in equal pieces on all of the replica's devices; read as an array it is unchanged.

        ``partition_dimensions`` says for each axis into how many parts it is cut; ``result.pieces`` are in row-major
        order. Called inside a replica function.

        Raises InvalidArgumentError (a ValueError) where that is not one int per axis, where their product is not the
        number of the replica's devices and where an axis cannot be cut so, ContextError outside a replica.
        """
        return logical_devices.split(tensor, partition_dimensions, *self.logical_devices_here())

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> logical_devices.LogicalTensor:
        """``tensor`` on each of the replica's devices; read as an array it is unchanged.

        Called inside a replica function. Raises ContextError outside one.
        """
        return logical_devices.replicate(tensor, *self.logical_devices_here())

    # --- older names --------------------------------------------------------------------------------------------

    def experimental_run_v2(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Deprecated: :meth:`run`."""
        warn_deprecated(self, "experimental_run_v2", "run")
        return self.run(fn, args, kwargs, options)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedFromFunction:
        """Deprecated: :meth:`distribute_datasets_from_function`."""
        warn_deprecated(self, "experimental_distribute_datasets_from_function", "distribute_datasets_from_function")
        return self.distribute_datasets_from_function(dataset_fn, options)

    def experimental_make_numpy_dataset(self, numpy_input: Any) -> Dataset:
        """Deprecated: ``data.Dataset.from_tensor_slices``. As
        :meth:`StrategyExtended.experimental_make_numpy_dataset`."""
        warn_deprecated(self, "experimental_make_numpy_dataset", "data.Dataset.from_tensor_slices")
        return self.extended.experimental_make_numpy_dataset(numpy_input)

    # --- copies -------------------------------------------------------------------------------------------------

    def __copy__(self) -> NoReturn:
        raise RuntimeError("a strategy cannot be copied: there is one service behind it")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def _nowhere(array: Any, device: str) -> NoReturn:
    raise ContextError("the devices of a replica are used inside a replica function; call it from there")
