"""``strategy.extended``: the operations that TensorFlow's optimizers, metrics and libraries use.

Results of reductions are arrays in host memory, whatever the destination: it only chooses between one array and one
for each replica. Every variable lies on the parameter device, so there is nothing to colocate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from central_storage import nest
from central_storage.core import context
from central_storage.core.backends import Strategy
from central_storage.core.devices.device_names import existing
from central_storage.core.public_objects import Closed
from central_storage.core.tensors.tensor import as_tensor, tensors_in
from central_storage.core.values import (
    DistributedValues,
    IndexedSlices,
    Mirrored,
    ReduceOp,
    asserted_reduce_op,
    convert_to_tensor,
    reduce_components,
    reduce_values,
)
from central_storage.data.dataset import Dataset, numpy_dataset
from central_storage.diagnostics.callers import warn_deprecated
from central_storage.variables.variable import Variable
from cs_proto.errors import ContextError, InvalidArgumentError

__all__ = ["StrategyExtended"]


class StrategyExtended(Closed):
    """The less common operations of a strategy, as ``strategy.extended``.

    Examples:
        >>> import central_storage as cs
        >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        ...     print(strategy.extended.worker_devices[1])
        /job:localhost/replica:0/task:0/device:CPU:1
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    # --- running ------------------------------------------------------------------------------------------------

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As ``strategy.run``, with ``args`` of any iterable type.

        Args:
            fn: The replica function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Raises:
            Exception: As ``strategy.run``.

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(in_process=True) as strategy:
            ...     strategy.extended.call_for_each_replica(lambda x: x + 1, iter([1]))
            2
        """
        return self._strategy.run(fn, tuple(args), kwargs)

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(var, *args, **kwargs)`` once, here, in the cross-replica context; assignments in it are direct.

        A Mirrored among the arguments is replaced by its first component.

        Args:
            var: The variable.
            fn: The function.
            args: Its positional arguments after the variable.
            kwargs: Its keyword arguments.
            group: True returns the result as it is; False wraps every leaf of it in a tuple of one.

        Returns:
            The result of ``fn``.

        Raises:
            InvalidArgumentError: ``var`` is not a variable, or an argument is a PerReplica (a ValueError).
            ContextError: Called inside a replica or another strategy's scope (a RuntimeError).

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(in_process=True) as strategy:
            ...     with strategy.scope():
            ...         w = cs.Variable(1.0)
            ...     float(strategy.extended.update(w, lambda var, x: var.assign_add(x), args=(2.0,)))
            3.0
        """
        self._require_cross_replica("extended.update")
        if not isinstance(var, Variable):
            raise InvalidArgumentError(f"extended.update needs a variable, not {var!r:.200}")
        return self._update((var, *args), fn, kwargs, group)

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(*args, **kwargs)`` once, here, as :meth:`update` does.

        Args:
            colocate_with: The result of :meth:`non_slot_devices`.
            fn: The function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            group: As for :meth:`update`.

        Raises:
            InvalidArgumentError: An argument is a PerReplica (a ValueError).
            ContextError: Called inside a replica or another strategy's scope (a RuntimeError).

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(in_process=True) as strategy:
            ...     strategy.extended.update_non_slot(None, lambda x: x + 1, args=(1,))
            2
        """
        self._require_cross_replica("extended.update_non_slot")
        return self._update(tuple(args), fn, kwargs, group)

    def _update(
        self, args: tuple[Any, ...], fn: Callable[..., Any], kwargs: Mapping[str, Any] | None, group: bool
    ) -> Any:
        positional, keywords = nest.map_structure(_not_per_replica, (args, dict(kwargs or {})))
        result = context.in_cross_replica(self._strategy, lambda: tensors_in(fn(*positional, **keywords)))
        return result if group else nest.map_structure(lambda leaf: (leaf,), result)

    # --- combining ----------------------------------------------------------------------------------------------

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: object = None,
        *,
        experimental_hints: object = None,
    ) -> Any:
        """Combine the components of ``value`` as ``strategy.reduce`` with ``axis=None``.

        Args:
            reduce_op: ``ReduceOp.SUM``, ``ReduceOp.MEAN``, or the name in any case.
            value: A PerReplica.
            destinations: A device string, an array or a variable (which is not written) for one array; a PerReplica or
                Mirrored for a Mirrored with a copy per replica, bare for one replica.
            options: Accepted; it changes nothing.
            experimental_hints: The older name of ``options``.

        Raises:
            AssertionError: ``destinations`` is a list.
            ValueError: ``destinations`` is None, or is not a destination.
            ContextError: Called inside a replica or another strategy's scope (a RuntimeError).

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
            ...     float(strategy.extended.reduce_to("SUM", cs.PerReplica([1.0, 2.0]), "cpu:0"))
            3.0
        """
        if experimental_hints is not None:
            warn_deprecated(self._strategy, "experimental_hints", "options")
        self._require_cross_replica("extended.reduce_to")
        _check_destination(destinations)
        op = asserted_reduce_op(reduce_op)
        reduced = reduce_values(op, value, None, self._strategy.num_replicas_in_sync)
        is_mean_of_plain = op is ReduceOp.MEAN and not isinstance(value, DistributedValues)
        return reduced if is_mean_of_plain else _deliver(reduced, destinations)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: object = None,
        *,
        experimental_hints: object = None,
    ) -> list[Any]:
        """:meth:`reduce_to` of each (value, destinations) pair, in order.

        A value that is not distributed counts as one component here.

        Args:
            reduce_op: As for :meth:`reduce_to`.
            value_destination_pairs: The pairs.
            options: Accepted; it changes nothing.
            experimental_hints: The older name of ``options``.

        Raises:
            IndexError: There are no pairs.
            Exception: As :meth:`reduce_to`.

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
            ...     pairs = [(cs.PerReplica([1.0, 2.0]), "cpu:0"), (cs.PerReplica([3.0, 4.0]), "cpu:0")]
            ...     [float(each) for each in strategy.extended.batch_reduce_to("SUM", pairs)]
            [3.0, 7.0]
        """
        if experimental_hints is not None:
            warn_deprecated(self._strategy, "experimental_hints", "options")
        self._require_cross_replica("extended.batch_reduce_to")
        pairs = list(value_destination_pairs)
        if not pairs:
            raise IndexError("batch_reduce_to needs at least one pair")
        for _, destinations in pairs:
            _check_destination(destinations)
        op = asserted_reduce_op(reduce_op)
        return [
            _deliver(reduce_components(op, value.values if isinstance(value, DistributedValues) else [value]), where)
            for value, where in pairs
        ]

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """``tensor`` as an array, or as a Mirrored with a copy per replica.

        Args:
            tensor: An array. Python numbers come back as they are.
            destinations: A PerReplica or Mirrored for a Mirrored, bare for one replica; any other destination for an
                array.

        Raises:
            AssertionError: ``destinations`` is a list or None.
            ValueError: ``destinations`` is not a destination.
            ContextError: Called inside a replica or another strategy's scope (a RuntimeError).

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
            ...     strategy.extended.broadcast_to([1, 2], "cpu:0").tolist()
            [1, 2]
        """
        self._require_cross_replica("extended.broadcast_to")
        if destinations is None:
            raise AssertionError("broadcast_to needs a destination, not None")
        _check_destination(destinations)
        if isinstance(tensor, int | float) and not isinstance(tensor, np.generic):
            return tensor
        return _deliver(tensor if isinstance(tensor, IndexedSlices) else convert_to_tensor(tensor), destinations)

    # --- variables ----------------------------------------------------------------------------------------------

    def read_var(self, var: Any) -> Any:
        """The value of a variable as an array that never changes.

        Args:
            var: A variable; anything else becomes an array.

        Raises:
            InvalidArgumentError: ``var`` cannot become an array (a ValueError).

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(in_process=True) as strategy:
            ...     strategy.extended.read_var(cs.Variable([1, 2])).tolist()
            [1, 2]
        """
        return var.read_value() if isinstance(var, Variable) else as_tensor(convert_to_tensor(var))

    def value_container(self, val: Any) -> Any:
        """``val``: a variable is its own container here.

        Args:
            val: A variable.

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(in_process=True) as strategy:
            ...     w = cs.Variable(1.0)
            ...     strategy.extended.value_container(w) is w
            True
        """
        return val

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether ``v`` is a variable that was made under this strategy.

        Args:
            v: Anything.

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(in_process=True) as strategy:
            ...     strategy.extended.variable_created_in_scope(cs.Variable(1.0))
            False
        """
        return isinstance(v, Variable) and v.strategy is self._strategy and not v.is_ordinary

    def colocate_vars_with(self, colocate_with_variable: Variable) -> AbstractContextManager[None]:
        """A context in which variables are made on the device of ``colocate_with_variable``, where all variables are.

        Args:
            colocate_with_variable: A variable of this strategy.

        Raises:
            ContextError: Called outside the strategy's scope (a RuntimeError).
            InvalidArgumentError: The argument is not a variable of this strategy (a ValueError).

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
            ...     with strategy.extended.colocate_vars_with(cs.Variable(1.0)):
            ...         w = cs.Variable(2.0)
        """
        if context.get_strategy() is not self._strategy:
            raise ContextError("extended.colocate_vars_with must be called inside `with strategy.scope():`")
        if not self.variable_created_in_scope(colocate_with_variable):
            raise InvalidArgumentError(
                f"colocate_vars_with needs a variable made under this strategy, not {colocate_with_variable!r:.200}"
            )
        return _nothing()

    def non_slot_devices(self, var_list: Iterable[Variable]) -> Variable:
        """The variable with the first name in alphabetical order, with which an optimizer keeps its own state.

        Args:
            var_list: Variables.

        Raises:
            InvalidArgumentError: There are no variables (a ValueError).

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
            ...     strategy.extended.non_slot_devices([cs.Variable(1.0, name="b"), cs.Variable(1.0, name="a")]).name
            'a'
        """
        variables = list(var_list)
        if not variables:
            raise InvalidArgumentError("extended.non_slot_devices needs at least one variable")
        return min(variables, key=lambda var: var.name)

    # --- data sets and devices ----------------------------------------------------------------------------------

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: object = None) -> Dataset:
        """One element per row of the arrays in a nest.

        Args:
            numpy_input: A nest of arrays; a list is stacked into one array first.
            session: Accepted; it changes nothing.

        Raises:
            InvalidArgumentError: An array is a scalar, or the lengths differ (a ValueError).
            NotADatasetError: A leaf is not an array (an AttributeError).
            ContextError: Called inside a replica or another strategy's scope (a RuntimeError).

        Examples:
            >>> import numpy as np
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(in_process=True) as strategy:
            ...     len(strategy.extended.experimental_make_numpy_dataset(np.zeros((3, 2))))
            3
        """
        self._require_cross_replica("experimental_make_numpy_dataset")
        return numpy_dataset(numpy_input)

    @property
    def worker_devices(self) -> list[str]:
        """The compute devices as full names, in replica order."""
        return [device for devices in self._strategy.devices_by_replica for device in devices]

    @property
    def worker_devices_by_replica(self) -> list[list[str]]:
        """The compute devices of each replica, as full names."""
        return self._strategy.devices_by_replica

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The one device of the variables, as a full name."""
        return (self._strategy.extended_parameter_device,)

    @property
    def experimental_require_static_shapes(self) -> bool:
        """False: shapes may differ from step to step."""
        return False

    @property
    def experimental_between_graph(self) -> bool:
        """True, as in TensorFlow."""
        return True

    @property
    def experimental_should_init(self) -> bool:
        """True: this process initializes the variables."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """True: this process saves checkpoints."""
        return True

    @property
    def should_save_summary(self) -> bool:
        """True: this process writes summaries."""
        return True

    def _require_cross_replica(self, what: str) -> None:
        context.require_cross_replica(self._strategy, what)


def _not_per_replica(leaf: Any) -> Any:
    if isinstance(leaf, Mirrored):
        return leaf.values[0]
    if isinstance(leaf, DistributedValues):
        raise InvalidArgumentError(
            "extended.update cannot take a PerReplica argument, which has a value for each replica; reduce it first, "
            "with reduce_to"
        )
    return leaf


def _check_destination(destinations: Any) -> None:
    if isinstance(destinations, list | tuple):
        raise AssertionError("destinations must be one device, array, variable or PerReplica, not a list of them")
    if isinstance(destinations, str):
        existing(destinations)
    elif not isinstance(destinations, DistributedValues | IndexedSlices) and not hasattr(destinations, "__array__"):
        raise InvalidArgumentError(
            f"destinations must be a device, array, variable or PerReplica, not {destinations!r:.200}"
        )


def _deliver(value: Any, destinations: Any) -> Any:
    value = as_tensor(value)
    if not isinstance(destinations, DistributedValues) or len(destinations.values) == 1:
        return value
    return Mirrored([value, *(_copy(value) for _ in destinations.values[1:])])


def _copy(value: Any) -> Any:
    if isinstance(value, IndexedSlices):
        return IndexedSlices(np.array(value.values), np.array(value.indices), value.dense_shape)
    return as_tensor(np.array(value))


@contextmanager
def _nothing() -> Iterator[None]:
    yield
