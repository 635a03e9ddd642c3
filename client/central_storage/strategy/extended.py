"""``strategy.extended``: what TensorFlow's optimizers, metrics and libraries ask of a strategy.

Results of reductions are arrays in host memory, wherever the destination: it decides between one array and one for
each replica. Every variable lies on the parameter device, so there is nothing to colocate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from central_storage import nest
from central_storage.core import context
from central_storage.core.backends import Strategy
from central_storage.core.deprecated import warn_deprecated
from central_storage.core.devices import existing
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
from central_storage.variables.variable import Variable
from cs_proto.errors import ContextError, InvalidArgumentError

__all__ = ["StrategyExtended"]


class StrategyExtended:
    """The less common half of a strategy. Got by ``strategy.extended``."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    # --- running ------------------------------------------------------------------------------------------------

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As ``strategy.run``, with ``args`` of any iterable type."""
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

        A Mirrored among the arguments is replaced by its first component. Returns what ``fn`` returns; with ``group``
        False every leaf of it in a tuple of one. Raises InvalidArgumentError (a ValueError) where ``var`` is no
        variable and for a PerReplica argument, ContextError inside a replica or another strategy's scope.
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
        """Call ``fn(*args, **kwargs)`` once, here, as :meth:`update` does; ``colocate_with`` is what
        :meth:`non_slot_devices` returned."""
        self._require_cross_replica("extended.update_non_slot")
        return self._update(tuple(args), fn, kwargs, group)

    def _update(
        self, args: tuple[Any, ...], fn: Callable[..., Any], kwargs: Mapping[str, Any] | None, group: bool
    ) -> Any:
        positional, keywords = nest.map_structure(_not_per_replica, (args, dict(kwargs or {})))
        with context.enter_cross_replica(self._strategy):
            result = fn(*positional, **keywords)
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

        ``destinations``: a device string, an array or a variable (which is not written) for one array; a PerReplica or
        Mirrored for a Mirrored with a copy per replica, bare for one replica. ``options`` changes nothing;
        ``experimental_hints`` is its older name.

        Raises AssertionError for a list of destinations, ValueError for none and for what is no destination,
        ContextError inside a replica or another strategy's scope, else as ``reduce``.
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
        """:meth:`reduce_to` of each (value, destinations) pair, in order. A value that is not distributed counts as
        one component here. Raises IndexError without pairs, else as :meth:`reduce_to`."""
        if experimental_hints is not None:
            warn_deprecated(self._strategy, "experimental_hints", "options")
        self._require_cross_replica("extended.batch_reduce_to")
        pairs = list(value_destination_pairs)
        if not pairs:
            raise IndexError("batch_reduce_to of no pairs: there is nothing to combine")
        for _, destinations in pairs:
            _check_destination(destinations)
        op = asserted_reduce_op(reduce_op)
        return [
            _deliver(reduce_components(op, value.values if isinstance(value, DistributedValues) else [value]), where)
            for value, where in pairs
        ]

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """``tensor`` as an array or, where ``destinations`` is a PerReplica or Mirrored, a Mirrored with a copy per
        replica, bare for one replica. Python numbers come back as they are.

        Raises AssertionError for a list of destinations or None, ValueError for what is no destination, ContextError
        inside a replica or another strategy's scope.
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
        """The value of a variable as an array that never changes; anything else as an array."""
        return var.read_value() if isinstance(var, Variable) else convert_to_tensor(var)

    def value_container(self, val: Any) -> Any:
        """``val``: a variable is its own container here."""
        return val

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether ``v`` is a variable that was made under this strategy."""
        return isinstance(v, Variable) and v.strategy is self._strategy and not v.is_ordinary

    def colocate_vars_with(self, colocate_with_variable: Variable) -> AbstractContextManager[None]:
        """A context in which variables are made on the device of ``colocate_with_variable``, where all are.

        Raises ContextError (a RuntimeError) outside the strategy's scope, InvalidArgumentError (a ValueError) for
        what is no variable of this strategy.
        """
        if context.get_strategy() is not self._strategy:
            raise ContextError("extended.colocate_vars_with is used inside `with strategy.scope():`")
        if not self.variable_created_in_scope(colocate_with_variable):
            raise InvalidArgumentError(
                f"colocate_vars_with needs a variable made under this strategy, not {colocate_with_variable!r:.200}"
            )
        return _nothing()

    def non_slot_devices(self, var_list: Iterable[Variable]) -> Variable:
        """The variable with the smallest name, beside which an optimizer's own state lies. Raises InvalidArgumentError
        (a ValueError) for no variables."""
        variables = list(var_list)
        if not variables:
            raise InvalidArgumentError("extended.non_slot_devices needs at least one variable")
        return min(variables, key=lambda var: var.name)

    # --- data sets and devices ----------------------------------------------------------------------------------

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: object = None) -> Dataset:
        """One element per row of the arrays in the nest ``numpy_input``; a list is stacked into one array first.

        ``session`` changes nothing. Raises InvalidArgumentError (a ValueError) for scalars and for arrays of different
        length, NotADatasetError (an AttributeError) for what is no array, ContextError inside a replica or another
        strategy's scope.
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
        """True, as TensorFlow's."""
        return True

    @property
    def experimental_should_init(self) -> bool:
        """True: this process makes the variables."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """True: this process saves."""
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
            "extended.update with a PerReplica argument: which component is meant? Reduce it first, with reduce_to"
        )
    return leaf


def _check_destination(destinations: Any) -> None:
    if isinstance(destinations, list | tuple):
        raise AssertionError("destinations is one device, array, variable or PerReplica, not a list of them")
    if isinstance(destinations, str):
        existing(destinations)
    elif not isinstance(destinations, DistributedValues | IndexedSlices) and not hasattr(destinations, "__array__"):
        raise InvalidArgumentError(
            f"destinations is a device, array, variable or PerReplica, not {destinations!r:.200}"
        )


def _deliver(value: Any, destinations: Any) -> Any:
    if not isinstance(destinations, DistributedValues) or len(destinations.values) == 1:
        return value
    return Mirrored([value, *(_copy(value) for _ in destinations.values[1:])])


def _copy(value: Any) -> Any:
    if isinstance(value, IndexedSlices):
        return IndexedSlices(np.array(value.values), np.array(value.indices), value.dense_shape)
    return np.array(value)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
