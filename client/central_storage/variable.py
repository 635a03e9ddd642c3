"""Variables: handles of arrays that live in the server.

A variable holds no value. Inside a replica its array protocols give a read-only view of the server's own memory;
everywhere else, and by ``value()``, ``read_value()`` and ``numpy()``, reading gives a copy that never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from cs_proto.arrays import dtype_name, is_wire_dtype
from cs_proto.errors import ContextError, InvalidArgumentError
from cs_proto.messages import AssignOp, VariableSpec
from cs_proto.messages import Variable as VariableRecord

from .context import call_site, current_replica, get_strategy, has_strategy
from .handles import Handle
from .values import DistributedValues, VariableAggregation, VariableSynchronization, convert_to_tensor

if TYPE_CHECKING:
    from .backend import ControllerBackend, ReplicaBackend, Strategy

__all__ = ["Variable"]


class Variable(Handle, np.lib.mixins.NDArrayOperatorsMixin):
    """An array held once, by the server, and changed only there.

    Make it under ``strategy.scope()`` or inside a replica function. ``initial_value`` is an array, a number, a nest of
    numbers or a callable that returns one; ``dtype`` converts Python numbers (an array of another dtype is refused);
    ``shape``, where given, must be the value's. ``aggregation`` says how assigns made by several replicas become one.

    Raises InvalidArgumentError (a ValueError) for a value that does not fit, TypeError for an aggregation that is not
    one, ContextError (a RuntimeError) outside every scope, MemoryPlanError where the memory does not suffice.
    """

    def __init__(
        self,
        initial_value: Any,
        trainable: bool = True,
        name: str | None = None,
        dtype: Any = None,
        shape: tuple[int, ...] | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        constraint: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        if not isinstance(aggregation, VariableAggregation):
            raise TypeError(f"aggregation must be a VariableAggregation, not {aggregation!r}")
        if not isinstance(synchronization, VariableSynchronization):
            raise TypeError(f"synchronization must be a VariableSynchronization, not {synchronization!r}")
        if constraint is not None:
            raise NotImplementedError("constraints are not served by this version; apply them with assign after a step")
        if not has_strategy():
            raise ContextError(
                "a variable must be made under `with strategy.scope():` or inside a replica function; "
                "variables outside every scope are not served by this version"
            )
        value = _initial(initial_value, dtype)
        if shape is not None and tuple(shape) != value.shape:
            raise InvalidArgumentError(f"shape {tuple(shape)} was asked for, but the initial value has {value.shape}")
        spec = VariableSpec(
            name or "Variable",
            dtype_name(value.dtype),
            value.shape,
            bool(trainable),
            aggregation.value,
            synchronization.value,
        )
        strategy = get_strategy()
        self._adopt(strategy, _backend_of(strategy).create(spec, value, call_site()))

    @classmethod
    def from_record(cls, strategy: Strategy, record: VariableRecord) -> Variable:
        """The handle of a variable that the server already has."""
        self = cls.__new__(cls)
        self._adopt(strategy, record)
        return self

    def _adopt(self, strategy: Strategy, record: VariableRecord) -> None:
        self._strategy = strategy
        self._number = record.number
        self._spec = record.spec
        self._dtype = np.dtype(record.spec.dtype)
        strategy.remember(self)

    def _cs_handle(self) -> tuple[str, int]:
        return ("variable", self._number)

    # --- what it is -------------------------------------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        """The strategy whose variable this is."""
        return self._strategy

    @property
    def number(self) -> int:
        """Its number in the server."""
        return self._number

    @property
    def name(self) -> str:
        """Unique in its strategy: a second ``w`` is ``w_1``."""
        return self._spec.name

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
    def aggregation(self) -> VariableAggregation:
        """How assigns made by several replicas become one."""
        return VariableAggregation(self._spec.aggregation)

    @property
    def synchronization(self) -> VariableSynchronization:
        """As given at creation; it changes nothing, since there is one copy."""
        return VariableSynchronization(self._spec.synchronization)

    @property
    def device(self) -> str:
        """The parameter device."""
        return self._strategy.extended_parameter_device

    @property
    def version(self) -> int:
        """How many commits have changed it."""
        return self._backend.variable(self._number).version

    @property
    def T(self) -> np.ndarray:  # noqa: N802  (NumPy's name)
        """The transpose of the value."""
        return np.asarray(self).T

    # --- reading ----------------------------------------------------------------------------------------------

    def value(self) -> np.ndarray:
        """A copy of the current value, which never changes."""
        replica = current_replica(self._strategy)
        return (
            self._controller.read(self._number)
            if replica is None
            else np.array(convert_to_tensor(replica.view(self._number)))
        )

    read_value = value
    numpy = value

    def current(self) -> np.ndarray:
        """What the array protocols give: a read-only view inside a replica, a copy elsewhere."""
        replica = current_replica(self._strategy)
        return self._controller.read(self._number) if replica is None else replica.view(self._number)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """A read-only view inside a replica, a copy elsewhere."""
        value = convert_to_tensor(self.current())  # from a GPU, where the replica is on one
        return np.array(value, dtype) if copy else np.asarray(value, dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """NumPy's operators and ufuncs act on the value; a variable is never their output."""
        if any(isinstance(out, Variable) for out in kwargs.get("out", ())):
            _refuse_in_place()
        arrays = [x.current() if isinstance(x, Variable) else x for x in inputs]
        if any(isinstance(x, DistributedValues) for x in arrays):
            return NotImplemented
        return getattr(ufunc, method)(*arrays, **kwargs)

    def __dlpack__(self, **kwargs: Any) -> Any:
        """The value for torch, JAX and others: the read-only view is handed out where the consumer asks for no
        writable memory (``max_version`` of 1.0 or later), else a copy."""
        value = self.current()
        if kwargs.get("max_version") is None and not value.flags.writeable:
            value = np.array(value)
        return value.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.current().__dlpack_device__()

    def __getitem__(self, key: Any) -> Any:
        return self.current()[key]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a variable without axes")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.current())

    def __float__(self) -> float:
        return float(self.current())

    def __int__(self) -> int:
        return int(self.current())

    def __index__(self) -> int:
        return self.current().__index__()

    def __bool__(self) -> bool:
        return bool(self.current())

    __hash__ = object.__hash__  # the operators compare values; as a key a variable is itself

    def __iadd__(self, other: object) -> NoReturn:  # type: ignore[misc]
        _refuse_in_place()

    __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = __iadd__

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        return f"<Variable {self.name!r} {self._spec.dtype}[{shape}] on {self.device}>"

    # --- writing ----------------------------------------------------------------------------------------------

    def assign(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        """Set the value. In a replica all replicas must do it, and ``aggregation`` makes one value of theirs.

        Raises InvalidArgumentError (a ValueError) for another shape or dtype, for a PerReplica outside a replica, and
        in a replica of several when ``aggregation`` is NONE. Returns the variable (None with ``read_value=False``).
        """
        return self._write("assign", value, read_value)

    def assign_add(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Add to the value; otherwise as :meth:`assign`."""
        return self._write("assign_add", delta, read_value)

    def assign_sub(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Subtract from the value; otherwise as :meth:`assign`."""
        return self._write("assign_sub", delta, read_value)

    def _write(self, op: AssignOp, value: Any, read_value: bool) -> Variable | None:
        replica = current_replica(self._strategy)
        if replica is None:
            if isinstance(value, DistributedValues):
                raise InvalidArgumentError(
                    f"{self.name}.{op} of a PerReplica outside a replica: which component is meant? Reduce it first"
                )
            if has_strategy() and get_strategy() is not self._strategy:
                raise ContextError(f"variable {self.name} of one strategy is written inside the scope of another")
        elif replica.replicas > 1 and self.aggregation is VariableAggregation.NONE:
            raise InvalidArgumentError(
                f"{self.name}.{op} in a replica: its aggregation is NONE, so {replica.replicas} replicas "
                "cannot agree on a value; make the variable with aggregation=SUM, MEAN or ONLY_FIRST_REPLICA"
            )
        scalar = not isinstance(value, (np.ndarray, np.generic, Variable)) and not hasattr(value, "__array__")
        array = self._fitting(op, value, scalar)
        backend = self._controller if replica is None else replica
        backend.assign(self._number, op, array, call_site(), scalar=scalar)
        return self if read_value else None

    def _fitting(self, op: str, value: Any, scalar: bool) -> np.ndarray:
        array = np.asarray(value, self._dtype) if scalar else np.asarray(value)
        if array.dtype != self._dtype:
            raise InvalidArgumentError(
                f"{self.name}.{op}: the variable has dtype {self._dtype}, the value {array.dtype}; convert it with "
                f"astype('{self._dtype}')"
            )
        if array.shape != self.shape:
            raise InvalidArgumentError(
                f"{self.name}.{op}: the variable has shape {self.shape}, the value {array.shape}; "
                "there is no broadcasting"
            )
        return array

    # --- ways to the server -----------------------------------------------------------------------------------

    @property
    def _controller(self) -> ControllerBackend:
        return self._strategy.controller

    @property
    def _backend(self) -> ReplicaBackend | ControllerBackend:
        return current_replica(self._strategy) or self._controller


def _backend_of(strategy: Strategy) -> ReplicaBackend | ControllerBackend:
    return current_replica(strategy) or strategy.controller


def _initial(initial_value: Any, dtype: Any) -> np.ndarray:
    value = initial_value() if callable(initial_value) else initial_value
    if isinstance(value, DistributedValues):
        raise InvalidArgumentError("the initial value of a variable is one value, not one per replica")
    wanted = None if dtype is None else np.dtype(dtype)
    has_own_dtype = isinstance(value, (np.ndarray, np.generic)) or hasattr(value, "__array__")
    array = convert_to_tensor(value) if wanted is None or has_own_dtype else np.asarray(value, wanted)
    if wanted is not None and array.dtype != wanted:
        raise InvalidArgumentError(f"dtype {wanted} was asked for, but the initial value has {array.dtype}")
    if not is_wire_dtype(dtype_name(array.dtype)) or array.dtype.kind in "US":
        raise InvalidArgumentError(f"a variable cannot have dtype {array.dtype}")
    return array


def _refuse_in_place() -> NoReturn:
    raise RuntimeError("`variable += value` looks like an update and is not one; use variable.assign_add(value)")
