"""Where this thread is: outside everything, in a strategy's cross-replica context, or in a replica.

The state is a stack per thread. ``ReplicaContext`` is the public object of a replica; what it does goes through the
:class:`~central_storage.backend.ReplicaBackend` that was installed with it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from cs_proto.errors import ContextError, InvalidArgumentError
from cs_proto.messages import ReduceOpName

from . import nest
from .values import ReduceOp, as_reduce_op, convert_to_tensor

if TYPE_CHECKING:
    from types import ModuleType

    from .backend import ReplicaBackend, Strategy

S = TypeVar("S", bound="Strategy")

__all__ = [
    "ReplicaContext",
    "call_site",
    "current_replica",
    "enter_cross_replica",
    "enter_replica",
    "get_array_module",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "require_cross_replica",
]

#: Set by a worker at its start: there, no strategy can be made.
in_worker = False

_PACKAGE = str(Path(__file__).parent)


class _Stack(threading.local):
    """(strategy, replica context or None) of every context this thread has entered."""

    def __init__(self) -> None:
        self.entries: list[tuple[Strategy, ReplicaContext | None]] = []


_stack = _Stack()
_default: list[ReplicaContext] = []


def set_default(replica: ReplicaContext) -> None:
    """Let ``replica`` be the context, and its strategy the strategy, of code outside every context."""
    _default[:] = [replica]


def has_strategy() -> bool:
    """Whether this thread is inside a strategy's scope, run or merge function."""
    return bool(_stack.entries)


def get_strategy() -> Strategy:
    """The strategy of the current context; outside every one, the default strategy of one local replica."""
    if _stack.entries:
        return _stack.entries[-1][0]
    return _default[0].strategy


def in_cross_replica_context() -> bool:
    """Whether this thread is in a scope or a merge function rather than in a replica."""
    return bool(_stack.entries) and _stack.entries[-1][1] is None


def get_replica_context() -> ReplicaContext | None:
    """The context of the replica this code runs in; None in a cross-replica context."""
    if not _stack.entries:
        return _default[0]
    return _stack.entries[-1][1]


def current_replica(strategy: object) -> ReplicaBackend | None:
    """The backend to use for ``strategy`` when this thread is in one of its replicas, else None."""
    if _stack.entries:
        entered, replica = _stack.entries[-1]
        if replica is not None and entered is strategy:
            return replica.backend
    return None


def require_cross_replica(strategy: Strategy, what: str) -> None:
    """Raise :class:`ContextError` unless ``strategy`` may do ``what`` here: in its own cross-replica context, or
    outside every context."""
    if not _stack.entries:
        return
    entered, replica = _stack.entries[-1]
    if replica is not None:
        raise ContextError(
            f"{what} cannot be called inside a replica function; use "
            "get_replica_context().merge_call to get into the cross-replica context"
        )
    if entered is not strategy:
        raise ContextError(f"{what} of one strategy inside the scope of another; leave that scope first")


@contextmanager
def enter_cross_replica(strategy: Strategy) -> Iterator[Strategy]:
    """The cross-replica context of ``strategy`` for the length of the block."""
    _stack.entries.append((strategy, None))
    try:
        yield strategy
    finally:
        _stack.entries.pop()


@contextmanager
def scope_of(strategy: S) -> Iterator[S]:
    """What ``strategy.scope()`` returns: the cross-replica context, refused where it makes no sense."""
    if _stack.entries:
        entered, replica = _stack.entries[-1]
        if replica is not None:
            raise ContextError("a scope cannot be entered inside a replica function; the replica is already in one")
        if entered is not strategy:
            raise ContextError("the scope of one strategy cannot be entered inside the scope of another")
    with enter_cross_replica(strategy):
        yield strategy


@contextmanager
def enter_replica(strategy: Strategy, backend: ReplicaBackend) -> Iterator[ReplicaContext]:
    """The context of one replica for the length of the block; the context object is dead afterwards."""
    context = ReplicaContext(strategy, backend)
    _stack.entries.append((strategy, context))
    try:
        yield context
    finally:
        _stack.entries.pop()
        context.end()


class ReplicaContext:
    """What a replica function can ask and do as one of ``num_replicas_in_sync`` replicas.

    Got by ``get_replica_context()``. Using one after its run has ended is a :class:`ContextError`.
    """

    def __init__(self, strategy: Strategy, backend: ReplicaBackend | None) -> None:
        self._strategy = strategy
        self._backend = backend
        self._ended = False

    @property
    def backend(self) -> ReplicaBackend:
        """The seam to the process that runs this replica."""
        if self._ended:
            raise ContextError("this replica context belongs to a run that has ended")
        if self._backend is None:
            raise ContextError("the default context has one local replica and no service behind it")
        return self._backend

    def end(self) -> None:
        """Mark the run as over."""
        self._ended = True

    @property
    def strategy(self) -> Strategy:
        """The strategy whose replica this is."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """0 … num_replicas_in_sync - 1."""
        return 0 if self._backend is None else self.backend.replica

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return 1 if self._backend is None else self.backend.replicas

    @property
    def devices(self) -> tuple[str, ...]:
        """The replica's devices, as full names."""
        return ("/job:localhost/replica:0/task:0/device:CPU:0" if self._backend is None else self.backend.device,)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``merge_fn(strategy, *args, **kwargs)`` once, in the cross-replica context, when all replicas are here.

        Arguments arrive regrouped: arrays as PerReplica, what is the same on all replicas bare. Returns this replica's
        share of the result. Every replica must make the same number of calls, else MergeMismatchError.
        """
        if self._backend is None:
            return merge_fn(self._strategy, *args, **(kwargs or {}))
        return self.backend.merge_call(merge_fn, tuple(args), dict(kwargs or {}), call_site())

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: object = None) -> Any:
        """``value`` combined over the replicas, on every one: an array or a nest of arrays, leaf by leaf.

        SUM keeps the dtype; MEAN of integers is float32 or float64. Shapes that differ between replicas are an
        InvalidArgumentError; a Python number or an empty nest is refused.
        """
        op: ReduceOpName = as_reduce_op(reduce_op).value
        leaves = nest.flatten(value)
        if not leaves:
            raise IndexError("all_reduce of an empty nest: there is nothing to combine")
        arrays = [_tensor(leaf, "all_reduce") for leaf in leaves]
        if self._backend is None or self.num_replicas_in_sync == 1:
            return value
        return nest.pack_sequence_as(value, self.backend.all_reduce(op, arrays, call_site()))

    def all_gather(self, value: Any, axis: int, options: object = None) -> Any:
        """``value`` concatenated along ``axis`` over the replicas in replica order, on every one; nests leaf by leaf.

        Lengths along ``axis`` may differ between replicas; anything else that differs is an InvalidArgumentError.
        """
        if not isinstance(axis, (int, np.integer)):
            raise TypeError(f"axis must be an int, not {axis!r}")
        leaves = [_tensor(leaf, "all_gather") for leaf in nest.flatten(value)]
        for leaf in leaves:
            if not -leaf.ndim <= axis < leaf.ndim:
                raise InvalidArgumentError(f"axis {axis} of an array of rank {leaf.ndim}")
        if self._backend is None or self.num_replicas_in_sync == 1:
            return value
        return nest.pack_sequence_as(value, self.backend.all_gather(int(axis), leaves, call_site()))

    def __repr__(self) -> str:
        if self._ended:
            return "<ReplicaContext of a run that has ended>"
        return f"<ReplicaContext replica {self.replica_id_in_sync_group} of {self.num_replicas_in_sync}>"


def _tensor(leaf: object, what: str) -> np.ndarray:
    is_python = isinstance(leaf, (bool, int, float, complex, str, bytes)) and not isinstance(leaf, np.generic)
    if is_python or leaf is None:
        raise InvalidArgumentError(f"{what} takes arrays, not the Python value {leaf!r}; wrap it with numpy.asarray")
    return convert_to_tensor(leaf)


def get_array_module() -> ModuleType:
    """NumPy, or CuPy in a replica on a GPU."""
    if _stack.entries and (replica := _stack.entries[-1][1]) is not None:
        return replica.backend.array_module()
    return np


def call_site() -> str:
    """``file:line`` of the nearest caller outside this package, for messages."""
    frame = sys._getframe(1)  # noqa: SLF001  (the one way to a caller's line without building a whole stack)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
