"""The API that every strategy has: contexts, checks, regrouping and reducing.

A subclass defines how functions are called on replicas, and on which devices the replicas are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn, Self
from weakref import ref

from central_storage.core import between_steps, context
from central_storage.core.backends import Carriage, ControllerBackend
from central_storage.core.handles import Handle, handle_id, weakly
from central_storage.core.options import InputOptions, RunOptions, ValueContext
from central_storage.core.values import ReduceOp, gather_values, local_results, reduce_values, regroup, select_replicas
from central_storage.core.variable_sets import VariableSets
from central_storage.data.dataset import Dataset
from central_storage.data.distributed import DistributedDataset, DistributedFromFunction, DistributedIterator
from central_storage.data.input_context import InputContext
from central_storage.data.places import refuse_in_replica
from central_storage.diagnostics.callers import warn_deprecated
from central_storage.optimizers.optimizer import Optimizer
from central_storage.variables.variable import Variable
from cs_proto.errors import ContextError

from .cluster_resolver import ClusterResolver, resolver_of
from .extended import StrategyExtended
from .rates import Rates
from .replica_devices import ReplicaDevices
from .run_steps import LOOKAHEAD, Steps, StepSeries, check, keeps_per_replica, steps_of
from .step_bar import checked, known, step_bar

__all__ = ["StrategyBase"]


class StrategyBase(ReplicaDevices):
    """The methods that users call on a strategy."""

    _extended: Callable[[], StrategyExtended | None] = staticmethod(lambda: None)

    # --- defined by a subclass ----------------------------------------------------------------------------------

    @property
    def variable_sets(self) -> VariableSets:
        """The table of variable sets, by the identity of their variables. Raises if there is no service."""
        raise NotImplementedError

    @property
    def controller(self) -> ControllerBackend:
        """The backend of the cross-replica context. Raises ShutdownError if there is no service."""
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

    def claim(self, owner: object, name: str) -> None:
        """Have :meth:`settle_owners` give the owner, by its ``rename``, a name that no other moving average and no
        other accumulator of this strategy has: ``name``, or one like it."""

    def settle_owners(self) -> None:
        """Give names to those that have claimed one. They get it late: in a notebook, the name that a cell binds anew
        holds the old object until the new one is made."""

    def remember(self, handle: Handle) -> None:
        """Keep ``handle`` as the only object for its number in this process."""
        raise NotImplementedError

    def call(
        self, function: Callable[..., Any], arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> list[Any]:
        """Call ``function`` once per replica with that replica's (args, kwargs); the results in replica order."""
        raise NotImplementedError

    def series(self, lookahead: int) -> StepSeries:
        """A series of steps, of which ``lookahead`` may be sent ahead of their turn. Raises ContextError in a
        merge_call."""
        raise NotImplementedError

    def take_along(self, optimizer: Optimizer) -> None:
        """Let an optimizer that belongs to no strategy yet belong to this one. Raises ContextError."""
        raise NotImplementedError

    def evaluate_schedules(self) -> None:
        """Set the learning rates that only the client can compute. Called before every run."""

    def carrier(self) -> Carriage:
        """An object that copies arrays to memory that the replicas read; by default plain memory."""
        return Carriage()

    # --- properties ---------------------------------------------------------------------------------------------

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return len(self.devices_by_replica)

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """Where the processes run, under TensorFlow's names: ``cluster_spec().as_dict()`` has the addresses of the jobs
        ``chief`` (the script), ``worker`` (the replicas) and ``ps`` (the variables). None if all are on this machine.

        Raises:
            ContextError: Asked inside a replica while workers run on other machines (a RuntimeError).
        """
        return resolver_of(self.controller) if isinstance(self, Handle) else None  # the default strategy has no service

    @property
    def extended(self) -> StrategyExtended:
        """The operations for authors of optimizers, metrics and libraries."""
        self._extended = ref(found := self._extended() or StrategyExtended(self))  # which holds this strategy
        return found

    def scope(self) -> AbstractContextManager[Self]:
        """The context in which variables are made. It yields the strategy.

        Raises:
            ContextError: Entered inside a replica, inside another strategy's scope, or again after it was left (a
                RuntimeError).

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
            ...     w = cs.Variable(1.0)
            ...     w.strategy is strategy
            True
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
        """Call ``fn(*args, **kwargs)`` once per replica and regroup the results.

        A PerReplica anywhere in ``args`` or ``kwargs`` is replaced by the replica's component. ``fn`` is sent by value,
        so captured values are those of this call.

        Args:
            fn: The replica function.
            args: Its positional arguments, as a list or tuple.
            kwargs: Its keyword arguments.
            options: With ``cs.RunOptions(keep_per_replica=True)`` every result is a PerReplica. Anything else is
                accepted without effect, as in TensorFlow's class.

        Returns:
            The results of the replicas. Arrays and floats come back as PerReplica; None and equal ints, bools and
            strings come back bare. With one replica everything comes back bare.

        Raises:
            ReplicaError: ``fn`` raised in a replica. The class also derives from the original type, so ``except`` of
                that type catches it; the replica's traceback is a note.
            ValueError: ``args`` is not a list or tuple.
            TypeError: ``kwargs`` is not a mapping, or ``fn`` cannot be called.
            ShippingError: The function or an argument cannot be pickled.
            ResultError: A result is not data.
            MergeMismatchError: The replicas disagree at a merge point.
            ReplicaLostError: A process died, and the run could not be repeated.
            ContextError: Called inside a replica or another strategy's scope (a RuntimeError).
            ShutdownError: Called after ``shutdown()`` (a RuntimeError).

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
            ...     strategy.run(lambda x: x + 1, args=(cs.PerReplica([1.0, 2.0]),))
            PerReplica:{
              0: 2.0,
              1: 3.0
            }
        """
        context.require_cross_replica(self, "run")
        if not isinstance(args, (list, tuple)):
            raise ValueError(f"args must be a list or tuple, not {type(args).__name__}; for one, pass args=(x,)")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(f"kwargs must be a mapping, not {type(kwargs).__name__}")
        if not callable(fn):
            raise TypeError(f"fn must be callable, not {fn!r}")
        keep = options is not None and isinstance(options, RunOptions) and options.keep_per_replica
        arguments = _by_replica(self.num_replicas_in_sync, tuple(args), kwargs)
        results = regroup(context.in_cross_replica(self, self.call, fn, arguments), keep)
        if between_steps.after_step:
            between_steps.passed(self)
        return results

    def run_changing(
        self, changes: Sequence[tuple[Optimizer, Mapping[str, float]]], fn: Callable[..., Any], args: tuple[Any, ...]
    ) -> Any:
        """As :meth:`run`, where ``changes`` of hyperparameters hold from this run on, whose message carries them. Every
        result is a PerReplica."""
        context.require_cross_replica(self, "run")
        arguments = _by_replica(self.num_replicas_in_sync, args, None)

        def changed() -> Any:
            self.evaluate_schedules()
            alone = self.series(0)
            alone.send(fn, arguments, [(handle_id(optimizer)[1], numbers) for optimizer, numbers in changes])
            return regroup(alone.take(), True)

        results = context.in_cross_replica(self, changed)
        for optimizer, numbers in changes:
            optimizer.took(numbers)
        between_steps.passed(self)
        return results

    def run_steps(
        self,
        fn: Callable[..., Any],
        dataset: DistributedDataset | DistributedFromFunction | DistributedIterator,
        steps: int | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        lookahead: int = LOOKAHEAD,
        options: RunOptions | None = None,
        rates: Mapping[Any, Iterable[Any]] | None = None,
        progress: bool | str = False,
    ) -> Steps:
        """Iterate over the results of ``run(fn, (element,), kwargs)`` for each element, and send steps ahead.

        When the loop gets the result of step k, exactly the steps up to k + ``lookahead`` have been sent. Any other
        call on the strategy (a learning rate, a variable, a save, ``run``) first waits for the steps in flight, so it
        always falls between the same two steps. A captured value that the loop changes is seen by the step after them.

        If step k fails, no later step begins. The iterator raises the error that ``run`` would raise, and ends. Left
        early, it waits for the steps in flight; its ``steps`` counts all that were sent. Ctrl-C cancels this step and
        all later ones. An exception of the data set comes in place of that element's result. The default strategy
        runs each step when the loop asks for its result.

        Args:
            fn: The replica function of one element.
            dataset: A distributed data set, iterated from its beginning, or an iterator, which gets unused ones back.
            steps: The largest number of elements; None: all.
            kwargs: Keyword arguments of every call.
            lookahead: The number of steps sent ahead, at most 64. 0 sends each step when its result is wanted.
            options: As for :meth:`run`.
            rates: By optimizer, an iterable of learning rates or of mappings: item i is as if assigned before step i.
            progress: Whether a bar shows the steps and their loss, as that of ``cs.progress``; a text stands before it.

        Returns:
            An iterator over the results, in order; ``len()`` is the number of steps, where it is known.

        Raises:
            TypeError: An argument has the wrong type.
            InvalidArgumentError: An argument, or an item of ``rates``, is out of range or missing (a ValueError).
            ContextError: Called inside a replica, a merge_call or another strategy's scope (a RuntimeError).
            Exception: While it is iterated, as :meth:`run`.

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
            ...     data = strategy.experimental_distribute_dataset(cs.data.Dataset.range(6).batch(2))
            ...     for losses in strategy.run_steps(lambda rows: rows.sum(), data):
            ...         print(strategy.reduce("SUM", losses, axis=None))
            1
            5
            9
        """
        context.require_cross_replica(self, "run_steps")
        series = self.series(lookahead)
        check(fn, dataset, self.num_replicas_in_sync, steps, kwargs, lookahead)
        ahead, length = None if rates is None else Rates(rates, self.take_along), steps_of(dataset, steps)
        send = partial(self._send_step, self.num_replicas_in_sync, series, fn, dict(kwargs or {}), ahead)
        is_own, keep = not isinstance(dataset, DistributedIterator), keeps_per_replica(options)
        bar, elements = step_bar(checked(progress), known(length, steps)), iter(dataset)
        return Steps(series, elements, is_own, steps, send, keep, ahead, length, bar, self._passed)

    def _passed(self) -> None:
        between_steps.passed(self)

    def _send_step(
        self,
        replicas: int,
        series: StepSeries,
        fn: Callable[..., Any],
        kwargs: dict[str, Any],
        rates: Rates | None,
        element: Any,
    ) -> None:
        """Send the step of one element."""
        context.require_cross_replica(self, "run_steps")
        arguments = _by_replica(replicas, (element,), kwargs)

        def sent() -> None:
            self.evaluate_schedules()
            if series.has_failed:  # a step failed meanwhile; the iterator raises that step's error instead of this one
                raise ContextError("an earlier step has failed")
            if rates is None:
                series.send(fn, arguments)
            else:
                rates.send(partial(series.send, fn, arguments))

        context.in_cross_replica(self, sent)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | tuple[int, ...] | None) -> Any:
        """Combine the components of a PerReplica over replicas and, with ``axis``, over that axis of each.

        SUM adds in replica order and keeps the dtype. MEAN divides by the number of components or, with ``axis``, by
        the summed length of that axis, so it is right for uneven shares.

        Args:
            reduce_op: ``ReduceOp.SUM``, ``ReduceOp.MEAN``, or the name in any case.
            value: A PerReplica. MEAN also takes a value that is not distributed.
            axis: An axis, or several, of every component; None reduces over replicas only.

        Returns:
            One array.

        Raises:
            ValueError: The op is unknown, the value is a nest, or SUM gets a value that is not distributed.
            InvalidArgumentError: The components do not fit each other (a ValueError).
            ContextError: Called inside a replica or another strategy's scope (a RuntimeError).

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
            ...     float(strategy.reduce("MEAN", cs.PerReplica([[1.0, 2.0], [6.0]]), axis=0))
            3.0
        """
        context.require_cross_replica(self, "reduce")
        return reduce_values(reduce_op, value, axis, self.num_replicas_in_sync)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate the components of a PerReplica along ``axis``, in replica order.

        Args:
            value: A PerReplica of arrays, whose lengths along ``axis`` may differ, also 0. A value that is not
                distributed comes back as it is.
            axis: The axis, an int.

        Returns:
            One array.

        Raises:
            InvalidArgumentError: Rank, dtype or another axis differs, the components have no axes, or the axis is None
                or out of range (a ValueError).
            TypeError: The axis has another type.
            NotImplementedError: The components are IndexedSlices.
            ContextError: Called inside a replica or another strategy's scope (a RuntimeError).

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
            ...     strategy.gather(cs.PerReplica([[1, 2], [3]]), axis=0).tolist()
            [1, 2, 3]
        """
        context.require_cross_replica(self, "gather")
        return gather_values(value, axis, self.num_replicas_in_sync)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The components of a distributed value as a tuple. Works in every context.

        Args:
            value: A distributed value, a nest, or anything else.

        Returns:
            The components; for a nest one nest per replica; for anything else a tuple of it alone.

        Raises:
            IndexError: A distributed value in a nest has fewer components than there are replicas.

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
            ...     strategy.experimental_local_results(cs.PerReplica([1, 2]))
            (1, 2)
        """
        return local_results(value, self.num_replicas_in_sync)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Make a distributed value from one value per replica. Works in every context.

        Args:
            value_fn: A function of a ValueContext. It is called here, once per replica, in replica order; its
                exceptions come out unchanged.

        Returns:
            A nest like the results, with a PerReplica at every leaf, under one replica too.

        Raises:
            AssertionError: Replicas get nests of different structure.

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
            ...     tens = lambda context: 10 * context.replica_id_in_sync_group
            ...     strategy.experimental_distribute_values_from_function(tens).values
            (0, 10)
        """
        n = self.num_replicas_in_sync
        return regroup([value_fn(ValueContext(replica, n)) for replica in range(n)], always_wrap=True)

    # --- data sets ----------------------------------------------------------------------------------------------

    def experimental_distribute_dataset(
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Split each element (a global batch) of ``dataset`` over the replicas along axis 0.

        Of B rows each replica gets ceil(B / N) until they are used up; trailing shares may be shorter or empty.

        From the second element on, a thread reads ``options.experimental_per_replica_buffer_size`` elements ahead while
        the replicas compute. Elements of a list or tuple of small arrays are read when they are asked for. So is every
        element with ``experimental_fetch_to_device=False``, which is for a source that shares state with the script,
        such as the global random generators.

        Args:
            dataset: A ``data.Dataset``, or anything that can be iterated again and again and yields nests of arrays.
            options: How far to read ahead.

        Returns:
            A data set of PerReplica elements.

        Raises:
            NotADatasetError: ``dataset`` is not a data set (a TypeError and AttributeError).
            DatasetContextError: Called inside a replica (a RuntimeError and ValueError).
            ContextError: Called inside another strategy's scope (a RuntimeError).
            UnbatchedDatasetError: At the first element: the elements are scalars (a ValueError and IndexError).

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
            ...     data = strategy.experimental_distribute_dataset(cs.data.Dataset.range(5).batch(3))
            ...     for rows in data:
            ...         print([share.tolist() for share in strategy.experimental_local_results(rows)])
            [[0, 1], [2]]
            [[3], [4]]
        """
        refuse_in_replica("made")
        context.require_cross_replica(self, "experimental_distribute_dataset")
        return DistributedDataset(dataset, self.num_replicas_in_sync, options, weakly(self.carrier, Carriage))

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedFromFunction:
        """Give out the elements of ``dataset_fn(InputContext)`` in turn: each replica takes the next one.

        ``for`` drops a last round in which not every replica gets an element; ``get_next_as_optional`` keeps it.

        Args:
            dataset_fn: A function of an InputContext that returns a data set, batched by the size for one replica. It
                is called once, now, in the context of the caller. With ``InputReplicationMode.PER_REPLICA`` it is
                called once for each replica, which then keeps to that data set.
            options: How far to read ahead, and how often ``dataset_fn`` is called.

        Returns:
            A data set of PerReplica elements.

        Raises:
            TypeError: ``dataset_fn`` cannot be called.
            Exception: As :meth:`experimental_distribute_dataset`, and whatever ``dataset_fn`` raises.

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
            ...     data = strategy.distribute_datasets_from_function(lambda context: cs.data.Dataset.range(4).batch(1))
            ...     for rows in data:
            ...         print([share.tolist() for share in strategy.experimental_local_results(rows)])
            [[0], [1]]
            [[2], [3]]
        """
        refuse_in_replica("made")
        context.require_cross_replica(self, "distribute_datasets_from_function")
        return DistributedFromFunction(dataset_fn, self.num_replicas_in_sync, options, weakly(self.carrier, Carriage))

    # --- older names --------------------------------------------------------------------------------------------

    def experimental_run_v2(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Deprecated: use :meth:`run`.

        Args:
            fn: As for :meth:`run`.
            args: As for :meth:`run`.
            kwargs: As for :meth:`run`.
            options: As for :meth:`run`.

        Raises:
            Exception: As :meth:`run`.

        Examples:
            >>> import warnings
            >>> import central_storage as cs
            >>> with warnings.catch_warnings(), cs.CentralStorageStrategy(in_process=True) as strategy:
            ...     warnings.simplefilter("ignore")
            ...     strategy.experimental_run_v2(lambda: 1)
            1
        """
        warn_deprecated(self, "experimental_run_v2", "run")
        return self.run(fn, args, kwargs, options)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedFromFunction:
        """Deprecated: use :meth:`distribute_datasets_from_function`.

        Args:
            dataset_fn: As for :meth:`distribute_datasets_from_function`.
            options: As for :meth:`distribute_datasets_from_function`.

        Raises:
            Exception: As :meth:`distribute_datasets_from_function`.

        Examples:
            >>> import warnings
            >>> import central_storage as cs
            >>> with warnings.catch_warnings(), cs.CentralStorageStrategy(in_process=True) as strategy:
            ...     warnings.simplefilter("ignore")
            ...     make = lambda context: cs.data.Dataset.range(2)
            ...     data = strategy.experimental_distribute_datasets_from_function(make)
        """
        warn_deprecated(self, "experimental_distribute_datasets_from_function", "distribute_datasets_from_function")
        return self.distribute_datasets_from_function(dataset_fn, options)

    def experimental_make_numpy_dataset(self, numpy_input: Any) -> Dataset:
        """Deprecated: use ``data.Dataset.from_tensor_slices``.

        Args:
            numpy_input: As for :meth:`StrategyExtended.experimental_make_numpy_dataset`.

        Raises:
            Exception: As :meth:`StrategyExtended.experimental_make_numpy_dataset`.

        Examples:
            >>> import warnings
            >>> import numpy as np
            >>> import central_storage as cs
            >>> with warnings.catch_warnings(), cs.CentralStorageStrategy(in_process=True) as strategy:
            ...     warnings.simplefilter("ignore")
            ...     len(strategy.experimental_make_numpy_dataset(np.zeros((3, 2))))
            3
        """
        warn_deprecated(self, "experimental_make_numpy_dataset", "data.Dataset.from_tensor_slices")
        return self.extended.experimental_make_numpy_dataset(numpy_input)

    # --- copies -------------------------------------------------------------------------------------------------

    def __copy__(self) -> NoReturn:
        raise RuntimeError("a strategy cannot be copied, because it has one service")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def _by_replica(
    n: int, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """(args, kwargs) of each of ``n`` replicas."""
    given = select_replicas(n, args)
    return list(zip(given, select_replicas(n, dict(kwargs)) if kwargs else ({},) * n, strict=True))
