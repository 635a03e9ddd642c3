"""Variables: handles of arrays that live in the server.

A variable holds no value. Inside a replica its array protocols give a read-only view of the server's own memory, which
keeps its bits until the replica function returns, also through updates. Everywhere else, and by
``value()``, ``read_value()`` and ``numpy()``, reading gives a copy that never changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from central_storage.core.backends import service_of
from central_storage.core.context import current_replica, get_strategy, has_strategy, reading
from central_storage.core.devices.device_names import full_name
from central_storage.core.handles import Handle
from central_storage.core.tensors.tensor import as_tensor
from central_storage.core.values import (
    IndexedSlices,
    PerReplica,
    VariableAggregation,
    VariableSynchronization,
    convert_to_tensor,
)
from central_storage.diagnostics.callers import call_site
from cs_proto.arrays import dtype_name
from cs_proto.errors import ContextError, InvalidArgumentError
from cs_proto.messages import AssignOp, VariableSpec, WriteOp
from cs_proto.messages import Variable as VariableRecord
from cs_proto.records import replace
from cs_proto.scatter import write
from cs_runtime.shared_memory.remote_segment import aligned_copy

from .array_protocols import ArrayProtocols
from .checks import (
    check_aggregation,
    check_fits,
    check_options,
    check_sparse,
    initial_array,
    row_numbers,
    say_foreign,
    warn_on_read,
)

if TYPE_CHECKING:
    from central_storage.core.backends import ControllerBackend, Strategy

__all__ = ["Variable"]

#: The epoch of a variable that has kept no view, in which no thread reads.
_NEVER = object()
#: For the two attributes that a step sets once for each variable: without a look at their names.
_set = object.__setattr__


class _Local:
    """The value of a variable that no strategy has adopted yet, and how often it was written. ``is_foreign``: the
    copy of another strategy's variable, which a replica may only read."""

    def __init__(self, value: np.ndarray, is_foreign: bool = False) -> None:
        self.value = np.array(value)
        self.version = 0
        self.is_foreign = is_foreign


class Variable(Handle, ArrayProtocols):
    """An array held once, by the server, and changed only there.

    Make it under ``strategy.scope()`` or inside a replica function.

    In a replica ``np.asarray``, operators, indexing and DLPack read the server's memory without a copy. Such a view
    keeps its bits until the replica function returns, and must not be kept longer; ``numpy()``, ``value()`` and
    ``read_value()`` give copies that may be kept. A view that is held through an update is copied at that update.

    A variable that is made outside every scope is *local*: this process holds the value until a strategy's ``run``
    takes the variable along; from then on it belongs to that strategy. Assigning to it in replicas needs no aggregation
    and no agreement: each replica's assignment takes effect, in replica order. A replica may read another strategy's
    variable, as it was when the function was sent, but may not write it.

    This class is a facade: it checks what it is given, and the server does the rest. When the script holds a variable
    no longer, the server frees it, and what optimizers keep beside it, before the strategy's next operation. A variable
    that was made inside a replica stays.

    Args:
        initial_value: An array, a number, a nest of numbers, or a callable that returns one. Python numbers become
            float32, int32, bool or complex128.
        trainable: Whether the variable is trained. None: yes, but for the synchronization ON_READ.
        name: The name; a name that the strategy has already gets a number. When a variable is freed, those that asked
            for the same name after it get the names that they would have without it.
        dtype: Converts the value, integers to floating point too, but not the reverse.
        shape: The shape that the value must have; None: any.
        synchronization: Stored, and without effect on values: there is one value, not one per replica. A variable with
            ON_READ is not trainable, and warns under several replicas.
        aggregation: How assignments by several replicas become one; None is NONE.
        constraint: A function of the value, an array, that returns a value of its shape and dtype. Every
            ``apply_gradients`` applies it after its update.
        sparse: Whether it is a trained table that gets gradients of rows only (:class:`IndexedSlices`). It has no
            gradient buffers. Its slots, and a value of zeros, take memory only where rows are updated.

    Raises:
        InvalidArgumentError: The value does not fit, ``synchronization`` is not one, or it is ON_READ with
            ``trainable``, or ``sparse`` with a constraint, without training or for what has no rows (a ValueError).
        TypeError: The name, aggregation or constraint is not one, or ``dtype`` cannot hold the value.
        MemoryPlanError: The memory does not suffice.

    Examples:
        >>> import numpy as np
        >>> import central_storage as cs
        >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        ...     with strategy.scope():
        ...         total = cs.Variable(np.zeros(2, np.float32), name="total", aggregation=cs.VariableAggregation.SUM)
        ...     _ = strategy.run(lambda row: total.assign_add(row, read_value=False), (np.float32([1, 2]),))
        ...     print(total.numpy(), total.shape, total.dtype)
        [2. 4.] (2,) float32
    """

    _is_said_to_be_foreign = False

    def __init__(
        self,
        initial_value: Any,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        shape: tuple[int, ...] | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | None = VariableAggregation.NONE,
        constraint: Callable[[np.ndarray], np.ndarray] | None = None,
        *,
        sparse: bool = False,
    ) -> None:
        if aggregation is None:
            aggregation = VariableAggregation.NONE
        check_options(name, trainable, aggregation, synchronization, constraint)
        if synchronization is VariableSynchronization.ON_READ and has_strategy():
            warn_on_read(get_strategy().num_replicas_in_sync, aggregation)
        if trainable is None:
            trainable = synchronization is not VariableSynchronization.ON_READ
        value = initial_array(initial_value, dtype, shape)
        if sparse:
            check_sparse(name or "Variable", value, trainable, constraint)
        spec = VariableSpec(
            name or "Variable",
            dtype_name(value.dtype),
            value.shape,
            bool(trainable),
            aggregation.value,
            synchronization.value,
            not has_strategy(),
            bool(sparse),
        )
        self._make(get_strategy() if has_strategy() else None, spec, value, constraint)

    def _make(
        self,
        strategy: Strategy | None,
        spec: VariableSpec,
        value: np.ndarray,
        constraint: Any,
        is_foreign: bool = False,
    ) -> None:
        self._constraint: Callable[[np.ndarray], np.ndarray] | None = constraint
        if strategy is not None:
            replica = current_replica(strategy)
            self._become(strategy, (replica or strategy.controller).create(spec, value, call_site()))
            if replica is None:
                self._cs_keep(strategy.controller.forget)
            return  # one made in a replica has handles in other replicas, and in what functions keep in them
        self._strategy = None
        self._number = 0
        self._local: _Local | None = _Local(value, is_foreign)
        self._describe(spec)

    @classmethod
    def from_record(cls, strategy: Strategy, record: VariableRecord) -> Variable:
        """The handle of a variable that the server already has."""
        self = cls.__new__(cls)
        self._constraint = None
        self._become(strategy, record)
        return self

    def adopt(self, strategy: Strategy, *, shared: bool = False) -> None:
        """Move a local variable into the server of ``strategy``. With ``shared`` it becomes one that was made under the
        strategy's scope."""
        if self._local is not None and not self._local.is_foreign:
            spec = replace(self._spec, ordinary=False) if shared else self._spec
            self._become(strategy, strategy.controller.create(spec, self._local.value, call_site()))
            self._cs_keep(strategy.controller.forget)

    def _cs_parts(self) -> tuple[Callable[..., Variable], tuple[VariableSpec, np.ndarray]]:
        if not self._is_said_to_be_foreign:
            self._is_said_to_be_foreign = True
            say_foreign(self.name)
        return _foreign, (self._spec, self.numpy())

    def _become(self, strategy: Strategy, record: VariableRecord) -> None:
        self._strategy = strategy
        self._number = record.number
        self._local = None
        self._describe(record.spec)
        strategy.remember(self)

    def _describe(self, spec: VariableSpec) -> None:
        self._spec = spec
        self._dtype = np.dtype(spec.dtype)
        self._epoch = _NEVER

    def _cs_handle(self) -> tuple[str, int]:
        return ("variable", self._number if self._local is None else -id(self))

    def _cs_code(self) -> object:
        return self._constraint

    def _cs_take_code(self, code: Any) -> None:
        if self._constraint is None and self._strategy is not None:
            self._strategy.variable_sets.forget()
        self._constraint = code

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        """A new variable of the same strategy, with the same value."""
        made = memo[id(self)] = Variable.__new__(Variable)
        constraint = copy.deepcopy(self._constraint, memo)
        made._make(self._strategy, self._spec, self.numpy(), constraint)  # noqa: SLF001  (a constructor)
        return made

    # --- what it is -------------------------------------------------------------------------------------------

    @property
    def is_ordinary(self) -> bool:
        """Whether it was made outside every scope."""
        return self._spec.ordinary

    @property
    def strategy(self) -> Strategy | None:
        """The strategy whose variable this is; None for a local one, which none has taken along yet."""
        return self._strategy

    @property
    def number(self) -> int:
        """Its number in the server, from 1; 0 for a local one."""
        return self._number

    @property
    def name(self) -> str:
        """Unique in its strategy: a second ``w`` is ``w_1``, and ``w`` when the first one is freed."""
        if self._strategy is not None:
            self._strategy.controller.settle_names()
        return self._spec.name

    def rename(self, name: str) -> None:
        """Take over the name that the server gives it now."""
        self._spec = replace(self._spec, name=name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, fixed."""
        return self._spec.shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self._spec.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self._spec.shape, dtype=np.int64))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype, fixed."""
        return self._dtype

    @property
    def trainable(self) -> bool:
        """As given at creation."""
        return self._spec.trainable

    @property
    def sparse(self) -> bool:
        """Whether its gradients are always IndexedSlices, so that it has no gradient buffers."""
        return self._spec.sparse

    @property
    def aggregation(self) -> VariableAggregation:
        """How assigns made by several replicas become one."""
        return VariableAggregation(self._spec.aggregation)

    @property
    def synchronization(self) -> VariableSynchronization:
        """The value given at creation. It has no effect, since there is one copy."""
        return VariableSynchronization(self._spec.synchronization)

    @property
    def constraint(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """The function that ``apply_gradients`` applies to the value after its update, or None."""
        return self._constraint

    @property
    def device(self) -> str:
        """The parameter device; the CPU for a local one."""
        return full_name("cpu:0") if self._strategy is None else self._strategy.extended_parameter_device

    @property
    def version(self) -> int:
        """How many commits have changed it."""
        if self._local is not None:
            return self._local.version
        return (self._replica or self._controller).variable(self._number).version

    @property
    def T(self) -> np.ndarray:  # noqa: N802  (NumPy's name)
        """The transpose of the value."""
        return np.asarray(self).T

    # --- reading ----------------------------------------------------------------------------------------------

    def value(self) -> np.ndarray:
        """A copy of the current value, which never changes: NumPy's, or CuPy's in a replica on a GPU.

        Examples:
            >>> import central_storage as cs
            >>> w = cs.Variable([1.0, 2.0])
            >>> w.value().tolist() == w.read_value().tolist() == [1.0, 2.0]
            True
        """
        value = self.current()
        return as_tensor(value if self._replica is None else value.copy())  # type: ignore[no-any-return]

    read_value = value

    def numpy(self) -> np.ndarray:
        """A copy of the current value as a NumPy array, which never changes."""
        return np.array(convert_to_tensor(self.current()))

    def current(self) -> np.ndarray:
        """The value for the array protocols: a read-only view inside a replica, valid until its function returns, and a
        copy elsewhere.

        Raises MemoryPlanError if views that are held through an update need more memory than there is.
        """
        if self._epoch is reading.epoch:
            return self._view
        if self._local is not None:
            return aligned_copy(self._local.value)
        replica = current_replica(self._strategy)
        if replica is None:
            return self._controller.read(self._number)
        value = replica.view(self._number)
        if reading.epoch is not None:
            _set(self, "_view", value)  # first: Ctrl-C may come in between
            _set(self, "_epoch", reading.epoch)
        return value

    def forget_view(self) -> None:
        """Drop the view that was read last: the next read asks for a new one."""
        if self._epoch is not _NEVER:
            _set(self, "_epoch", _NEVER)  # first: Ctrl-C may come in between
            del self._view

    def sparse_read(self, indices: Any, name: str | None = None) -> np.ndarray:
        """A copy of some rows. Only these rows move.

        Args:
            indices: The numbers of the rows: integers of any shape.
            name: Accepted; it changes nothing.

        Returns:
            An array of the shape of ``indices`` followed by the shape of a row, in the variable's dtype.

        Raises:
            InvalidArgumentError: The variable has no axes, the indices are no integers, or a row does not exist (a
                ValueError).

        Examples:
            >>> import central_storage as cs
            >>> cs.Variable([[1, 2], [3, 4], [5, 6]]).sparse_read([2, 0]).tolist()
            [[5, 6], [1, 2]]
        """
        return self._read_rows("sparse_read", indices)

    def _read_rows(self, what: str, indices: Any) -> np.ndarray:
        """As :meth:`sparse_read`; errors speak of ``what``."""
        rows = row_numbers(self._spec, what, indices)
        if self._local is not None:
            copied = self._local.value[rows]
        else:
            copied = (self._replica or self._controller).read_rows(self._number, rows)
        return as_tensor(copied)  # type: ignore[no-any-return]

    # --- writing ----------------------------------------------------------------------------------------------

    def assign(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        """Set the value. In a replica all replicas must do so, and ``aggregation`` makes one value of theirs.

        Args:
            value: The new value, of the variable's shape and dtype, or Python numbers.
            use_locking: Accepted; it changes nothing.
            name: Accepted; it changes nothing.
            read_value: Whether the variable is returned.

        Returns:
            The variable; None with ``read_value=False``.

        Raises:
            InvalidArgumentError: The shape or dtype differs, the value is a PerReplica, or ``aggregation`` is NONE in
                one of several replicas (a ValueError).
            TypeError: The dtype cannot hold the Python numbers.
            ContextError: Called inside another strategy's scope (a RuntimeError).

        Examples:
            >>> import central_storage as cs
            >>> w = cs.Variable([1.0, 2.0])
            >>> w.assign([3.0, 4.0]).numpy().tolist()
            [3.0, 4.0]
        """
        return self._assign("assign", value, read_value)

    def assign_add(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Add to the value. In a replica all replicas must do so, and ``aggregation`` makes one value of theirs.

        Args:
            delta: The value to add, of the variable's shape and dtype, or Python numbers.
            use_locking: Accepted; it changes nothing.
            name: Accepted; it changes nothing.
            read_value: Whether the variable is returned.

        Returns:
            The variable; None with ``read_value=False``.

        Raises:
            Exception: As :meth:`assign`.

        Examples:
            >>> import central_storage as cs
            >>> cs.Variable([1.0, 2.0]).assign_add([1.0, 1.0]).numpy().tolist()
            [2.0, 3.0]
        """
        return self._assign("assign_add", delta, read_value)

    def assign_sub(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Subtract from the value. In a replica all replicas must do so, and ``aggregation`` makes one value of theirs.

        Args:
            delta: The value to subtract, of the variable's shape and dtype, or Python numbers.
            use_locking: Accepted; it changes nothing.
            name: Accepted; it changes nothing.
            read_value: Whether the variable is returned.

        Returns:
            The variable; None with ``read_value=False``.

        Raises:
            Exception: As :meth:`assign`.

        Examples:
            >>> import central_storage as cs
            >>> cs.Variable([1.0, 2.0]).assign_sub([1.0, 1.0]).numpy().tolist()
            [0.0, 1.0]
        """
        return self._assign("assign_sub", delta, read_value)

    def scatter_add(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Add to rows; a row that is named twice gets both values.

        In a replica each replica writes on its own, without agreement: this replica reads its write at once, the others
        after the next commit.

        Args:
            sparse_delta: The rows and their numbers, in the variable's dtype.
            use_locking: Accepted; it changes nothing.
            name: Accepted; it changes nothing.

        Returns:
            The variable.

        Raises:
            TypeError: ``sparse_delta`` is not an IndexedSlices.
            InvalidArgumentError: The dtype or the shape of the rows differs, or a row does not exist (a ValueError).

        Examples:
            >>> import central_storage as cs
            >>> w = cs.Variable([1.0, 2.0, 3.0])
            >>> w.scatter_add(cs.IndexedSlices([10.0, 20.0], [0, 2])).numpy().tolist()
            [11.0, 2.0, 23.0]
        """
        return self._scatter("scatter_add", sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Subtract from rows; otherwise as :meth:`scatter_add`.

        Args:
            sparse_delta: The rows and their numbers, in the variable's dtype.
            use_locking: Accepted; it changes nothing.
            name: Accepted; it changes nothing.

        Returns:
            The variable.

        Raises:
            Exception: As :meth:`scatter_add`.

        Examples:
            >>> import central_storage as cs
            >>> cs.Variable([1.0, 2.0]).scatter_sub(cs.IndexedSlices([1.0], [1])).numpy().tolist()
            [1.0, 1.0]
        """
        return self._scatter("scatter_sub", sparse_delta)

    def scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Set rows; of a row that is named twice the last value counts. Otherwise as :meth:`scatter_add`.

        Args:
            sparse_delta: The rows and their numbers, in the variable's dtype.
            use_locking: Accepted; it changes nothing.
            name: Accepted; it changes nothing.

        Returns:
            The variable.

        Raises:
            Exception: As :meth:`scatter_add`.

        Examples:
            >>> import central_storage as cs
            >>> cs.Variable([1.0, 2.0]).scatter_update(cs.IndexedSlices([5.0], [1])).numpy().tolist()
            [1.0, 5.0]
        """
        return self._scatter("scatter_update", sparse_delta)

    def _assign(self, op: AssignOp, value: Any, read_value: bool) -> Variable | None:
        replica = self._replica
        self._check_may_write(op, value)
        is_python = not isinstance(value, np.generic | Variable) and not hasattr(value, "__array__")
        is_aggregated = replica is not None and replica.replicas > 1 and not self._spec.ordinary
        if is_aggregated:
            check_aggregation(self._spec, op, value)
        array = convert_to_tensor(value, self._dtype if is_python else None)
        check_fits(self._spec, self._dtype, op, array, self.shape)
        if replica is None or self._spec.ordinary:
            self._write(op, array, None)
        else:
            replica.assign(self._number, op, array, call_site(), scalar=is_python)
        return self if read_value else None

    def _scatter(self, op: WriteOp, delta: IndexedSlices) -> Variable:
        self._check_may_write(op, delta)
        if not isinstance(delta, IndexedSlices):
            raise TypeError(f"{self.name}.{op} takes an IndexedSlices, not {type(delta).__name__}")
        rows = row_numbers(self._spec, op, delta.indices)
        values = convert_to_tensor(delta.values)
        check_fits(self._spec, self._dtype, op, values, (*rows.shape, *self.shape[1:]))
        self._write(op, values, rows)
        return self

    def _write(self, op: WriteOp, value: np.ndarray, rows: np.ndarray | None) -> None:
        """Write without aggregation: here, by the controller, or as a note of this replica's."""
        if self._dtype == np.bool_ and op not in ("assign", "scatter_update"):
            raise InvalidArgumentError(f"{self.name}.{op}: bool cannot be added")
        if self._local is not None:
            write(self._local.value, op, value, rows)
            self._local.version += 1
        else:
            (self._replica or self._controller).write(self._number, op, value, rows, call_site())

    def _check_may_write(self, op: str, value: Any) -> None:
        if isinstance(value, PerReplica):
            raise InvalidArgumentError(
                f"{self.name}.{op} cannot take a PerReplica, which has a value for each replica; reduce it first"
            )
        if self._local is not None and self._local.is_foreign:
            raise ContextError(
                f"variable {self.name} belongs to another strategy: a replica of this one may only read it"
            )
        if self._strategy is not None and has_strategy() and get_strategy() is not self._strategy:
            raise ContextError(f"variable {self.name} of one strategy cannot be written inside the scope of another")

    # --- ways to the server -----------------------------------------------------------------------------------

    @property
    def _controller(self) -> ControllerBackend:
        assert self._strategy is not None
        return service_of(self._strategy, f"variable {self.name}")


def _foreign(spec: VariableSpec, value: np.ndarray) -> Variable:
    """What a replica has of another strategy's variable."""
    made = Variable.__new__(Variable)
    made._make(None, spec, value, None, is_foreign=True)  # noqa: SLF001  (a constructor)
    return made
