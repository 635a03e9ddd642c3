"""What NumPy, Python's operators, DLPack and CUDA see of a variable: its value, and never a place to write to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from central_storage import nest
from central_storage.core.backends import every
from central_storage.core.context import current_replica, get_array_module, reading
from central_storage.core.devices.device_names import full_name
from central_storage.core.tensors.tensor import array_text, as_tensor
from central_storage.core.values import DistributedValues, convert_to_tensor
from cs_runtime.shared_memory.remote_segment import aligned_copy

if TYPE_CHECKING:
    from central_storage.core.backends import ReplicaBackend, Strategy
    from cs_proto.messages import VariableSpec

__all__ = ["ArrayProtocols"]

#: By kind of dtype: a Python number, whose dtype NumPy lets the other operand decide.
_WEAK = {"i": 0, "f": 0.0, "c": 0j}

#: The text of a variable shows its value up to this size.
_SHOWN_NBYTES = 64 << 20

#: The remedy where the other operand is one of JAX that is being traced.
_TRACED = (
    "JAX traces a function in which a variable is an operand. Pass the array of the variable to the function: "
    "csj.read(variable), with `import central_storage.jax as csj`."
)

#: DLPack's name of the machine's own memory.
_DLPACK_CPU = (1, 0)


class _ArrayUfunc:
    """The method ``__array_ufunc__``; None on a variable whose value lies on a GPU.

    NumPy asks the class, CuPy the object. By None (NEP 13) CuPy's operators leave the operation to the variable. CuPy's
    own ``array @ variable`` raises a TypeError, because its matmul takes arrays of CuPy alone.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __get__(self, variable: ArrayProtocols | None, owner: type) -> Any:
        if variable is None:
            return self._method
        return None if variable._is_on_gpu else MethodType(self._method, variable)  # noqa: SLF001


def _both(ufunc: np.ufunc) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """An operator and its reflection. Those of ``NDArrayOperatorsMixin`` refuse two variables on a GPU, whose
    ``__array_ufunc__`` is None."""

    def forward(self: ArrayProtocols, other: Any) -> Any:
        if not isinstance(other, ArrayProtocols) and getattr(other, "__array_ufunc__", ()) is None:
            return NotImplemented
        return ufunc(self, other)

    def reflected(self: ArrayProtocols, other: Any) -> Any:
        if getattr(other, "__array_ufunc__", ()) is None:
            return NotImplemented
        return ufunc(other, self.current() if hasattr(other, "__cuda_array_interface__") else self)

    return forward, reflected


class ArrayProtocols(np.lib.mixins.NDArrayOperatorsMixin):
    """Base of the variable. It reads by :meth:`current`, or from the view that was read last."""

    _strategy: Strategy | None
    _number: int
    _spec: VariableSpec
    _dtype: np.dtype[Any]
    _view: np.ndarray
    #: The epoch of ``reading`` in which ``_view`` was taken and is valid.
    _epoch: object

    @property
    def _replica(self) -> ReplicaBackend | None:
        """The replica of the variable's strategy whose function this thread runs."""
        return None if self._strategy is None else current_replica(self._strategy)

    @property
    def _is_on_gpu(self) -> bool:
        """Whether this thread runs a replica function on a GPU."""
        replica = self._replica
        return replica is not None and replica.array_module() is not np

    def current(self) -> np.ndarray:
        """The value: a read-only view inside a replica, a copy elsewhere."""
        raise NotImplementedError

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """A read-only view inside a replica, valid until its function returns: after that it shows whatever the server
        writes. A copy elsewhere."""
        if self._epoch is reading.epoch and dtype is None and not copy:  # most reads, and a step has a thousand
            return self._view
        value = self.current()
        if type(value) is not np.ndarray:  # of a GPU, where the replica is on one
            value = convert_to_tensor(value)
        if dtype is None and not copy:
            return value
        return np.array(value, dtype) if copy else np.asarray(value, dtype)

    @_ArrayUfunc
    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """NumPy's operators and ufuncs act on the value; a variable is never their output."""
        written = inputs[:1] if method == "at" else kwargs.get("out", ()) if kwargs else ()
        if written and any(isinstance(each, ArrayProtocols) for each in written):
            _refuse_in_place()
        arrays = []
        for x in inputs:
            if isinstance(x, DistributedValues):
                return NotImplemented
            arrays.append(x.current() if isinstance(x, ArrayProtocols) else self._like(x))
        try:
            return ufunc(*arrays, **kwargs) if method == "__call__" else getattr(ufunc, method)(*arrays, **kwargs)
        except Exception as error:
            if type(error).__name__ == "TracerArrayConversionError":
                error.add_note(_TRACED)
            raise

    __add__, __radd__ = _both(np.add)
    __sub__, __rsub__ = _both(np.subtract)
    __mul__, __rmul__ = _both(np.multiply)
    __matmul__, __rmatmul__ = _both(np.matmul)
    __truediv__, __rtruediv__ = _both(np.true_divide)
    __floordiv__, __rfloordiv__ = _both(np.floor_divide)
    __mod__, __rmod__ = _both(np.remainder)
    __divmod__, __rdivmod__ = _both(np.divmod)
    __pow__, __rpow__ = _both(np.power)
    __lshift__, __rlshift__ = _both(np.left_shift)
    __rshift__, __rrshift__ = _both(np.right_shift)
    __and__, __rand__ = _both(np.bitwise_and)
    __xor__, __rxor__ = _both(np.bitwise_xor)
    __or__, __ror__ = _both(np.bitwise_or)
    __lt__, __gt__ = _both(np.less)[0], _both(np.greater)[0]
    __le__, __ge__ = _both(np.less_equal)[0], _both(np.greater_equal)[0]
    __eq__, __ne__ = _both(np.equal)[0], _both(np.not_equal)[0]

    def _like(self, other: Any) -> Any:
        """``other`` as an operand: a list of Python numbers has no dtype of its own, as a Python number has none."""
        if not isinstance(other, (list, tuple)):  # as a union it would be made at every operator
            return other
        array = convert_to_tensor(other)
        weak = array.dtype.kind in "ifc" and all(map(_is_python_number, nest.flatten(other)))
        array = array.astype(np.result_type(self._dtype, _WEAK[array.dtype.kind])) if weak else array
        return get_array_module().asarray(array)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """The value for torch, JAX and others.

        In a replica on a CPU a consumer that knows read-only memory (``max_version`` of (1, 0) or later) gets the
        read-only view; any other gets a copy of its own. torch is of the first kind, and ignores that the memory is
        read-only: a write in place stays in the replica's process, and the run fails with VariableWrittenError. JAX is
        of the second kind: ``jax.device_put(np.asarray(variable))`` takes the view without a copy, so for 100 MB it
        takes 0.1 ms where ``jax.numpy.from_dlpack(variable)`` takes 34 ms.

        Elsewhere the value is a copy already. A view and a copy begin at a multiple of 64 bytes, so that JAX need not
        make another. Raises BufferError if ``copy`` is False and a copy is needed, or if the value does not lie on
        ``dl_device``.
        """
        value = self.current()
        options = {"stream": stream, "max_version": max_version, "dl_device": dl_device}
        if not isinstance(value, np.ndarray):  # of a GPU
            return value.__dlpack__(**_given(options | {"copy": copy}))
        knows_read_only = max_version is not None and max_version[0] >= 1
        is_view = not value.flags.writeable
        if copy is False and not (is_view and knows_read_only):
            why = (
                "its memory is read-only, and only a consumer that asks for max_version (1, 0) or later can know that"
                if is_view
                else "outside a replica function the value is always a copy"
            )
            raise BufferError(f"copy=False: variable {self._spec.name!r} cannot be shared here: {why}; leave copy out")
        if is_view and (copy or not knows_read_only):
            value = aligned_copy(value)
        return value.__dlpack__(**_given(options))

    def __dlpack_device__(self) -> tuple[int, int]:
        """The device of the value, as (DLPack's type of device, index). On a CPU nothing is read."""
        replica = self._replica
        if replica is None or replica.array_module() is np:
            return _DLPACK_CPU
        return replica.view(self._number).__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Only where the value lies on a GPU: in a replica there."""
        replica = self._replica
        if replica is None or replica.array_module() is np:
            raise AttributeError(f"variable {self._spec.name} is not on a GPU here: no __cuda_array_interface__")
        value: Any = replica.view(self._number)
        replica.hold(value)
        interface: dict[str, Any] = value.__cuda_array_interface__
        return interface

    def __repr__(self) -> str:
        return (
            f"<cs.Variable {self._spec.name!r} shape={self._spec.shape} dtype={self._spec.dtype}, {self._value_text()}>"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows. It waits for no run, and raises nothing."""
        from .shown import MOST_SAMPLED, shown  # late: no step needs it

        found, why_not = None, "not shown, because a run is under way; show the variable again when it is over"
        try:
            if self._strategy is None or self._replica is not None:
                found = every(convert_to_tensor(self.current()), MOST_SAMPLED)
            else:
                found = self._strategy.controller.sample(self._number, MOST_SAMPLED)
        except Exception as error:  # noqa: BLE001  (whatever keeps it from being read)
            why_not = f"not readable here: {error}"
        device = full_name("cpu:0") if self._strategy is None else self._strategy.extended_parameter_device
        return shown(self._spec, device, found, why_not)

    def _value_text(self) -> str:
        """The value as text. A debugger asks for that of every variable that it meets, so nothing is raised, and no
        large value is read."""
        nbytes = math.prod(self._spec.shape) * self._dtype.itemsize
        if nbytes > _SHOWN_NBYTES:
            return f"{nbytes / 2**20:.0f} MiB that numpy() reads"
        try:
            return array_text(convert_to_tensor(self.current()))
        except Exception as error:  # noqa: BLE001  (whatever keeps it from being read)
            return f"not readable here: {error}"

    def __getitem__(self, key: Any) -> Any:
        return as_tensor(self.current()[key])

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise TypeError(
            f"variable {self._spec.name!r} has no items to set; assign the whole value, or rows with scatter_update"
        )

    def __len__(self) -> int:
        if not self._spec.shape:
            raise TypeError("len() of a variable without axes")
        return self._spec.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.current())

    def __float__(self) -> float:
        return float(self.current())

    def __int__(self) -> int:
        return int(self.current())

    def __index__(self) -> int:
        return convert_to_tensor(self.current()).__index__()

    def __bool__(self) -> bool:
        return bool(self.current())

    __hash__ = object.__hash__  # the operators compare values; as a key a variable is itself

    def __iadd__(self, other: object) -> NoReturn:  # type: ignore[misc]
        _refuse_in_place()

    __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = __iadd__


def _is_python_number(value: object) -> bool:
    return isinstance(value, int | float | complex) and not isinstance(value, np.generic)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that are not None: older versions of NumPy and CuPy know fewer options."""
    return {name: value for name, value in options.items() if value is not None}


def _refuse_in_place() -> NoReturn:
    raise RuntimeError(
        "`variable += value`, `out=variable` and `np.add.at(variable, …)` look like updates, but would change only a "
        "copy; use variable.assign_add(value), and for rows scatter_add"
    )
