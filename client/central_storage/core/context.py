"""The context of this thread: outside every context, in a strategy's cross-replica context, or in a replica.

The state is a stack per thread. ``ReplicaContext`` is the public object of a replica; its methods use the
:class:`~central_storage.core.backends.ReplicaBackend` that was installed with it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import numpy as np

from central_storage import nest
from central_storage.diagnostics.callers import call_site, warn_deprecated
from cs_proto.arithmetic import reduction
from cs_proto.errors import ContextError, InvalidArgumentError, NotATensorError, UsedScopeError
from cs_proto.printable import counted

from . import opening
from .devices.device_names import full_name
from .public_objects import Closed
from .tensors.tensor import Tensor, as_tensor
from .values import IndexedSlices, ReduceOp, as_reduce_op, convert_to_tensor

if TYPE_CHECKING:
    from types import ModuleType

    from .backends import ReplicaBackend, Strategy
    from .random_streams import Streams

S = TypeVar("S", bound="Strategy")
T = TypeVar("T")
P = ParamSpec("P")

__all__ = [
    "ReplicaContext",
    "Scope",
    "become_worker",
    "current_replica",
    "enter_replica",
    "experimental_set_strategy",
    "get_array_module",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica",
    "in_cross_replica_context",
    "is_in_replica",
    "is_worker",
    "reading",
    "refuse_in_replica",
    "replica_here",
    "require_cross_replica",
    "streams_here",
]


class _Stack(threading.local):
    """(strategy, replica context or None) of every context that this thread has entered; whether it is a worker's."""

    is_worker = False

    def __init__(self) -> None:
        self.entries: list[tuple[Strategy, ReplicaContext | None]] = []
        #: Whether experimental_set_strategy has made the lowest entry.
        self.is_set = False

    def push(self, entry: tuple[Strategy, ReplicaContext | None]) -> None:
        reading.epoch = None
        self.entries.append(entry)

    def pop(self) -> None:
        reading.epoch = None
        self.entries.pop()


class _Reading(threading.local):
    """How this thread reads variables. If a variable has cached a view together with the object ``epoch``, the view is
    still its value; with None every value must be asked for. A backend sets ``epoch`` while its views stay valid, and
    resets it when they no longer do; every change of context resets it, too."""

    epoch: object = None


_stack = _Stack()
reading = _Reading()


@functools.cache
def _default() -> ReplicaContext:
    """The context of code outside every context."""
    made: ReplicaContext = opening.default_replica()
    return made


def become_worker(*, whole_process: bool) -> None:
    """This thread, or every thread of this process, is a worker's from now on: no strategy can be made there."""
    if whole_process:
        _Stack.is_worker = True
    else:
        _stack.is_worker = True


def is_worker() -> bool:
    """Whether this thread is a worker's."""
    return _stack.is_worker


def has_strategy() -> bool:
    """Whether this thread is inside a strategy's scope, run or merge function.

    Examples:
        >>> import central_storage as cs
        >>> cs.has_strategy()
        False
    """
    return bool(_stack.entries) and _stack.entries[-1][0] is not _default().strategy


def get_strategy() -> Strategy:
    """The strategy of the current context; outside every context, the default strategy of one local replica.

    Examples:
        >>> import central_storage as cs
        >>> cs.get_strategy()
        <the default strategy: one local replica>
    """
    if _stack.entries:
        return _stack.entries[-1][0]
    return _default().strategy


def in_cross_replica_context() -> bool:
    """Whether this thread is in a scope or a merge function rather than in a replica.

    Examples:
        >>> import central_storage as cs
        >>> cs.in_cross_replica_context()
        False
    """
    return bool(_stack.entries) and _stack.entries[-1][1] is None


def get_replica_context() -> ReplicaContext | None:
    """The context of the replica that runs this code; None in a cross-replica context.

    Examples:
        >>> import central_storage as cs
        >>> cs.get_replica_context().num_replicas_in_sync
        1
    """
    if not _stack.entries:
        return _default()
    return _stack.entries[-1][1]


def current_replica(strategy: object) -> ReplicaBackend | None:
    """The backend to use for ``strategy`` when this thread is in one of its replicas, else None."""
    entries = _stack.entries
    if entries:
        entered, replica = entries[-1]
        if replica is not None and entered is strategy:
            return replica._backend  # noqa: SLF001  (at every read of a variable; one on the stack has not ended)
    return None


def replica_here() -> ReplicaBackend | None:
    """The backend of the replica that this thread runs, for any strategy; None elsewhere."""
    replica = _stack.entries[-1][1] if _stack.entries else None
    return None if replica is None or replica.is_local else replica.backend


def streams_here() -> Streams | None:
    """The random streams of the run in which this thread is; None outside of a replica function."""
    replica = _stack.entries[-1][1] if _stack.entries else None
    return None if replica is None else replica._streams  # noqa: SLF001  (one on the stack has not ended)


def refuse_in_replica(what: str) -> None:
    """Raise :class:`ContextError` inside a replica function, where no object like ``what`` can be made."""
    if is_in_replica():
        raise ContextError(f"{what} cannot be made in a replica; make it in the script and let the function capture it")


def is_in_replica() -> bool:
    """Whether this thread is in a replica function of a strategy."""
    if not _stack.entries:
        return False
    entered, replica = _stack.entries[-1]
    return replica is not None and entered is not _default().strategy


def require_cross_replica(strategy: Strategy, what: str) -> None:
    """Raise :class:`ContextError` unless ``strategy`` may do ``what`` here: in its own cross-replica context, or
    outside every context."""
    if not _stack.entries:
        return
    entered, replica = _stack.entries[-1]
    if replica is _default():
        return
    if replica is not None:
        raise ContextError(
            f"{what} cannot be called inside a replica function; use "
            "get_replica_context().merge_call to get into the cross-replica context"
        )
    if entered is not strategy:
        raise ContextError(
            f"{what} cannot be called on one strategy inside the scope of another; leave that scope first"
        )


def in_cross_replica(strategy: Strategy, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What ``call`` returns for these arguments, in the cross-replica context of ``strategy``. The context is left also
    where Ctrl-C comes at its very begin or end: Python looks for signals when a function is called, and nothing is
    called while the entries change."""
    before = _stack.entries
    try:
        reading.epoch, _stack.entries = None, [*before, (strategy, None)]
        result = call(*args, **kwargs)
    finally:
        reading.epoch, _stack.entries = None, before
    return result


class Scope(Closed, AbstractContextManager[S], Generic[S]):
    """The result of ``strategy.scope()``: the cross-replica context. Entering raises ContextError where it is not
    allowed. For the default strategy it is the default context, as outside every scope.

    It may be entered again while it is entered, but not after it was left.
    """

    def __init__(self, strategy: S) -> None:
        self._strategy = strategy
        self._entry = (strategy, _default() if strategy is _default().strategy else None)
        self._depth = 0
        self._is_left = False

    def __enter__(self) -> S:
        if self._is_left:
            raise UsedScopeError("this scope object has been used already; call strategy.scope() for a new one")
        if _stack.entries:
            entered, replica = _stack.entries[-1]
            if replica is not None and replica is not _default():
                raise ContextError("a scope cannot be entered inside a replica function; the replica is already in one")
            if replica is None and entered is not self._strategy:
                raise ContextError("the scope of one strategy cannot be entered inside the scope of another")
        _stack.push(self._entry)
        self._depth += 1
        return self._strategy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._depth or not _stack.entries or _stack.entries[-1] != self._entry:
            raise ContextError("only the innermost scope of this thread can be left")
        _stack.pop()
        self._depth -= 1
        self._is_left = not self._depth


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Enter the scope of ``strategy`` for the rest of this thread, in place of the strategy set before.

    Args:
        strategy: A strategy; None leaves the scope.

    Raises:
        ContextError: Called inside a scope or a replica (a RuntimeError).
        TypeError: ``strategy`` is not a strategy.

    Examples:
        >>> import central_storage as cs
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy:
        ...     cs.experimental_set_strategy(strategy)
        ...     print(cs.get_strategy() is strategy)
        ...     cs.experimental_set_strategy(None)
        True
    """
    if strategy is not None and not hasattr(strategy, "num_replicas_in_sync"):
        raise TypeError(f"experimental_set_strategy takes a strategy or None, not {strategy!r:.100}")
    if len(_stack.entries) > _stack.is_set:
        raise ContextError("experimental_set_strategy cannot be called inside a scope or a replica; leave that first")
    _stack.entries[:] = [] if strategy is None else [(strategy, None)]
    _stack.is_set = strategy is not None


class enter_replica:  # noqa: N801  (a function to its callers; entered at every run, where a generator costs)
    """The context of one replica for the length of the block; the context object is dead afterwards. Without a
    ``backend`` it is the one local replica of the default strategy. ``streams`` are those of the run."""

    __slots__ = ("_entry",)

    def __init__(self, strategy: Strategy, backend: ReplicaBackend | None, streams: Streams | None = None) -> None:
        self._entry = strategy, ReplicaContext(strategy, backend, streams)

    def __enter__(self) -> ReplicaContext:
        reading.epoch = None
        _stack.entries.append(self._entry)
        return self._entry[1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        reading.epoch = None
        _stack.entries.pop()
        self._entry[1].__dict__["_ended"] = True


class ReplicaContext(Closed):
    """The place of a replica function among ``num_replicas_in_sync`` replicas, and its operations over all of them.

    ``get_replica_context()`` returns it. Its use after the end of the run raises :class:`ContextError`.

    Examples:
        >>> import central_storage as cs
        >>> def step():
        ...     context = cs.get_replica_context()
        ...     return context.all_reduce("SUM", context.replica_id_in_sync_group)
        >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        ...     sums = strategy.run(step)
        ...     [int(each) for each in strategy.experimental_local_results(sums)]
        [1, 1]
    """

    _strategy: Strategy
    _backend: ReplicaBackend | None
    _streams: Streams | None
    # enter_replica sets it.
    _ended = False

    def __init__(self, strategy: Strategy, backend: ReplicaBackend | None, streams: Streams | None = None) -> None:
        own = self.__dict__  # Closed looks at the name of each attribute, and every run makes a context
        own["_strategy"], own["_backend"], own["_streams"] = strategy, backend, streams

    @property
    def backend(self) -> ReplicaBackend:
        """The backend in the process that runs this replica."""
        if self._ended:
            raise ContextError("this replica context belongs to a run that has ended")
        if self._backend is None:
            raise ContextError(
                "the default context has one local replica and no service; enter the scope of a strategy"
            )
        return self._backend

    @property
    def strategy(self) -> Strategy:
        """The strategy whose replica this is."""
        return self._strategy

    @property
    def is_local(self) -> bool:
        """Whether this is the one replica of the default strategy, with no service behind it."""
        return self._backend is None

    @property
    def replica_id_in_sync_group(self) -> Tensor | int:
        """0 … num_replicas_in_sync - 1: a read-only int32 tensor without axes, which can be an index or the key of a
        dict; the int 0 in the default context."""
        if self._backend is None:
            return 0
        number: Tensor = as_tensor(np.int32(self.backend.replica))
        return number

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return 1 if self._backend is None else self.backend.replicas

    @property
    def devices(self) -> tuple[str, ...]:
        """The replica's devices, as full names. Deprecated: use ``strategy.extended.worker_devices_by_replica``."""
        warn_deprecated(self._strategy, "ReplicaContext.devices", "strategy.extended.worker_devices_by_replica")
        return (full_name("cpu:0"),) if self._backend is None else self.backend.devices

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``merge_fn(strategy, *args, **kwargs)`` once, in the cross-replica context, when all replicas have
        called.

        Arguments arrive regrouped: arrays as PerReplica, a value that is the same on all replicas bare. Every replica
        must make the same number of calls. In the default context ``merge_fn`` gets the arguments as they are.

        Args:
            merge_fn: The function.
            args: Its positional arguments after the strategy, as a list or tuple.
            kwargs: Its keyword arguments.

        Returns:
            This replica's share of the result.

        Raises:
            MergeMismatchError: Replicas make different numbers of calls.
            ContextError: This context is not the current one of this thread (a RuntimeError).
            TypeError: ``merge_fn`` cannot be called, or ``args`` is not a list or tuple.

        Examples:
            >>> import numpy as np
            >>> import central_storage as cs
            >>> def step(x):
            ...     mean = lambda strategy, value: strategy.reduce("MEAN", value, axis=None)
            ...     return cs.get_replica_context().merge_call(mean, (x,))
            >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
            ...     float(strategy.run(step, (cs.PerReplica([np.float32(1), np.float32(3)]),)))
            2.0
        """
        self._check_current("merge_call")
        if not callable(merge_fn):
            raise TypeError(f"merge_fn must be callable, not {merge_fn!r:.100}")
        if not isinstance(args, list | tuple):
            raise TypeError(
                f"args must be a list or tuple, not {type(args).__name__}; for one argument, pass args=(x,)"
            )
        if self._backend is None:
            return in_cross_replica(self._strategy, lambda: merge_fn(self._strategy, *args, **(kwargs or {})))
        return self.backend.merge_call(merge_fn, tuple(args), dict(kwargs or {}), call_site())

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: Any, options: object = None, *, experimental_hints: object = None
    ) -> Any:
        """Combine ``value`` over the replicas; every replica gets the result.

        SUM keeps the dtype; MEAN of integers is float32 or float64. IndexedSlices become the IndexedSlices of all their
        rows in replica order (MEAN divides the values by the number of replicas). A leaf is sparse on all replicas or
        on none. With one replica ``value`` is returned unchanged.

        Args:
            reduce_op: ``ReduceOp.SUM``, ``ReduceOp.MEAN``, or the name in any case.
            value: An array or a nest of arrays, which is combined leaf by leaf.
            options: Accepted; it changes nothing.
            experimental_hints: The older name of ``options``.

        Returns:
            A nest like ``value``.

        Raises:
            InvalidArgumentError: The op is unknown, or shapes or dtypes differ between replicas (a ValueError).
            StructureMismatchError: Nests differ between replicas (a RuntimeError and AssertionError).
            NotATensorError: A leaf is a Python value (a ValueError and AttributeError).
            IndexError: The nest is empty.
            ContextError: This context is not the current one of this thread (a RuntimeError).

        Examples:
            >>> import numpy as np
            >>> import central_storage as cs
            >>> float(cs.get_replica_context().all_reduce("SUM", np.float32(2)))
            2.0
        """
        if experimental_hints is not None:
            warn_deprecated(self._strategy, "experimental_hints", "options")
        self._check_current("all_reduce")
        if not isinstance(reduce_op, ReduceOp | str):
            raise InvalidArgumentError(f"reduce_op must be ReduceOp.SUM or ReduceOp.MEAN, not {reduce_op!r}")
        op = as_reduce_op(reduce_op)
        leaves = nest.flatten(value)
        if not leaves:
            raise IndexError("all_reduce needs at least one value, not an empty nest")
        places = [isinstance(leaf, IndexedSlices) for leaf in leaves]
        sparse = [leaf for leaf in leaves if isinstance(leaf, IndexedSlices)]
        dense = [_tensor(leaf, "all_reduce") for leaf in leaves if not isinstance(leaf, IndexedSlices)]
        if self.num_replicas_in_sync == 1:
            return nest.map_structure(as_tensor, value)
        arrays = map(as_tensor, self.backend.all_reduce(op.value, dense, call_site()) if dense else ())
        slices = iter(self._all_reduce_sparse(op, sparse) if sparse else ())
        return nest.pack_sequence_as(value, [next(slices) if is_sparse else next(arrays) for is_sparse in places])

    def _all_reduce_sparse(self, op: ReduceOp, leaves: list[IndexedSlices]) -> list[IndexedSlices]:
        pieces = []
        for leaf in leaves:
            shape = np.array([leaf.dense_shape or ()], np.int64)
            pieces += [_tensor(leaf.values, "all_reduce"), _tensor(leaf.indices, "all_reduce"), shape]
        gathered = self.backend.all_gather(0, pieces, call_site())
        results = []
        for place, leaf in enumerate(leaves):
            values, indices, shapes = gathered[3 * place : 3 * place + 3]
            if (shapes != shapes[0]).any():
                raise InvalidArgumentError(f"all_reduce needs IndexedSlices of one dense shape, not {shapes.tolist()}")
            if op is ReduceOp.MEAN:
                values = reduction.divide(convert_to_tensor(values), self.num_replicas_in_sync)
            results.append(IndexedSlices(values, indices, leaf.dense_shape))
        return results

    def all_gather(self, value: Any, axis: int, options: object = None) -> Any:
        """Concatenate ``value`` along ``axis`` over the replicas, in replica order; every replica gets the result.

        With one replica ``value`` is returned unchanged.

        Args:
            value: An array or a nest of arrays, leaf by leaf. Lengths along ``axis`` may differ between replicas, also
                0.
            axis: The axis, an int.
            options: Accepted; it changes nothing.

        Returns:
            A nest like ``value``.

        Raises:
            InvalidArgumentError: Anything else differs, an array has no axes, or the axis is None or out of range (a
                ValueError).
            TypeError: The axis has another type.
            NotATensorError: A leaf is a Python value (a ValueError and AttributeError).
            NotImplementedError: A leaf is IndexedSlices.
            ContextError: This context is not the current one of this thread (a RuntimeError).

        Examples:
            >>> import numpy as np
            >>> import central_storage as cs
            >>> gather = lambda rows: cs.get_replica_context().all_gather(rows, axis=0)
            >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
            ...     gathered = strategy.run(gather, (cs.PerReplica([np.arange(2), np.arange(1)]),))
            ...     strategy.experimental_local_results(gathered)[0].tolist()
            [0, 1, 0]
        """
        self._check_current("all_gather")
        leaves = nest.flatten(value)
        if any(isinstance(leaf, IndexedSlices) for leaf in leaves):
            raise NotImplementedError("all_gather does not take IndexedSlices; gather their values and indices")
        arrays = [_tensor(leaf, "all_gather") for leaf in leaves]
        if self.num_replicas_in_sync == 1 or not arrays:
            return nest.map_structure(as_tensor, value)
        number = reduction.gather_axis(axis)
        for array in arrays:
            if not -array.ndim <= number < array.ndim:
                raise InvalidArgumentError(
                    f"all_gather cannot join along axis {number}: the array has {counted(array.ndim, 'axis', 'axes')}"
                )
        return nest.pack_sequence_as(value, list(map(as_tensor, self.backend.all_gather(number, arrays, call_site()))))

    def _check_current(self, what: str) -> None:
        if self._ended:
            raise ContextError("this replica context belongs to a run that has ended")
        if get_replica_context() is not self:
            raise ContextError(
                f"{what}: a replica context can be used only in the thread of its replica function, while it is the "
                "current context; call get_replica_context() where you need it"
            )

    def __repr__(self) -> str:
        if self._ended:
            return "<ReplicaContext of a run that has ended>"
        return f"<ReplicaContext replica {self.replica_id_in_sync_group} of {self.num_replicas_in_sync}>"


def _tensor(leaf: object, what: str) -> np.ndarray:
    is_python = isinstance(leaf, (bool, int, float, complex, str, bytes)) and not isinstance(leaf, np.generic)
    if is_python or leaf is None:
        raise NotATensorError(f"{what} takes arrays, not the Python value {leaf!r}; wrap it with numpy.asarray")
    return convert_to_tensor(leaf)


def get_array_module() -> ModuleType:
    """NumPy, or CuPy in a replica on a GPU.

    Examples:
        >>> import central_storage as cs
        >>> cs.get_array_module().__name__
        'numpy'
    """
    replica = replica_here()
    return np if replica is None else replica.array_module()
