"""Arrays of device memory: NumPy computes, and what it gives lies in device memory when the stream comes to it.

Like CuPy's they are no NumPy arrays, become none implicitly, do not mix with any, and live on one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from . import _machine, cuda

#: What takes device arrays alone, where other functions take whatever shows device memory in CUDA's way.
_OWN_ARRAYS = {"concatenate", "dot", "matmul", "stack"}
#: What says something of arrays without looking at what they hold.
_SAYS = {"can_cast", "ndim", "result_type", "shape", "size", "may_share_memory", "shares_memory", "dtype"}


class Flags:
    """As CuPy's: no ``writeable``."""

    def __init__(self, flags: Any, owndata: bool) -> None:
        self.c_contiguous, self.f_contiguous, self.owndata = flags.c_contiguous, flags.f_contiguous, owndata

    def __getitem__(self, name: str) -> bool:
        return bool(getattr(self, name.lower()))


class ndarray(NDArrayOperatorsMixin):  # noqa: N801
    """An array in device memory."""

    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        shape: Any,
        dtype: Any = float,
        memptr: cuda.MemoryPointer | None = None,
        strides: tuple[int, ...] | None = None,
        order: str = "C",
    ) -> None:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.data = cuda.alloc(nbytes) if memptr is None else memptr
        self.base: ndarray | None = None
        flat = self._bytes(self.data, nbytes)
        self._array = np.ndarray(shape, dtype, flat, 0, strides, order)

    @staticmethod
    def _bytes(memptr: cuda.MemoryPointer, nbytes: int) -> np.ndarray:
        if _machine.block_at(memptr.ptr, nbytes) or _machine.locked_at(memptr.ptr, nbytes):
            return _machine.memory_at(memptr.ptr, nbytes)
        return _machine.host_at(memptr.ptr, nbytes, writable=False)  # any use of it is refused

    # --- what it is

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._array.dtype

    ndim = property(lambda self: self._array.ndim)
    size = property(lambda self: self._array.size)
    nbytes = property(lambda self: self._array.nbytes)
    itemsize = property(lambda self: self._array.itemsize)
    strides = property(lambda self: self._array.strides)
    flags = property(lambda self: Flags(self._array.flags, self.base is None))
    device = property(lambda self: cuda.Device(self.data.device_id))

    def __len__(self) -> int:
        return len(self._array)

    def __repr__(self) -> str:
        return repr(self.get())

    # --- to the host and from it

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Use `.get()` to construct one explicitly."
        )

    def get(
        self, stream: Any = None, order: str = "C", out: np.ndarray | None = None, blocking: bool = True
    ) -> np.ndarray:
        """A copy in host memory, or ``out``; on a stream without ``blocking`` it is there when that is waited for."""
        with cuda.Device(self.data.device_id):
            queue = _machine.current() if stream is None else stream.queue
            source = self if self._array.flags.c_contiguous else self._contiguous()
        if source.nbytes:
            _machine.memory_at(source.data.ptr, source.nbytes)  # refuses what is none of the device's any more
        target = np.empty(self.shape, self.dtype) if out is None else out
        if target.shape != self.shape or target.dtype != self.dtype or not target.flags.c_contiguous:
            raise ValueError("out does not fit")
        if out is None and not blocking:
            raise ValueError("the stand-in gets asynchronously into an array of the caller's alone")
        _machine.copy(target.ctypes.data, source.data.ptr, source.nbytes, queue)
        if blocking:
            queue.run()
        return target

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        """Copy a host array into this one, asynchronously where that is page-locked."""
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if arr.dtype != self.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if arr.shape != self.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not self._array.flags.c_contiguous:
            raise RuntimeError("Cannot set to non-contiguous array")
        arr = np.ascontiguousarray(arr)
        with cuda.Device(self.data.device_id):
            queue = _machine.current() if stream is None else stream.queue
        _machine.copy(self.data.ptr, arr.ctypes.data, arr.nbytes, queue)

    def item(self, *args: Any) -> Any:
        return self.get().item(*args)

    def tolist(self) -> Any:
        return self.get().tolist()

    def tobytes(self, order: str = "C") -> bytes:
        return self.get().tobytes()

    def __float__(self) -> float:
        return float(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __complex__(self) -> complex:
        return complex(self.get())

    def __bool__(self) -> bool:
        return bool(self.get())

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.data.ptr, False),
            "strides": None if self._array.flags.c_contiguous else self.strides,
            "version": 3,
            "stream": 1,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.data.device_id

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise BufferError("device memory of the stand-in is no memory that another library could take over")

    # --- computing

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        for other in inputs:
            if not isinstance(other, ndarray) and hasattr(other, "__array_ufunc__") and not _is_scalar(other):
                if isinstance(other, np.ndarray):
                    raise TypeError(f"Unsupported type {type(other)}")
                if not hasattr(other, "__cuda_array_interface__"):
                    return NotImplemented
        if ufunc.__name__ in _OWN_ARRAYS:
            _check_own(inputs)
        return compute(getattr(ufunc, method), *inputs, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return function(func.__name__, func)(*args, **kwargs)

    def __getitem__(self, key: Any) -> ndarray:
        return compute(lambda array, key: array[key], self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        stream = _settled(self)
        key, value = _bare(key), _bare(value)
        target = self._array
        probe = np.array(target)
        probe[key] = value  # raises what there is to raise, now
        key, value = _kept(key), _kept(value)
        stream.add(lambda: target.__setitem__(key, value))

    def __iter__(self) -> Any:
        return (self[index] for index in range(len(self)))

    def fill(self, value: Any) -> None:
        self[...] = value

    def copy(self, order: str = "C") -> ndarray:
        return compute(np.array, self, copy=True)

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True
    ) -> ndarray:
        if not copy and self.dtype == dtype:
            return self
        return compute(lambda array: array.astype(dtype), self)

    def view(self, dtype: Any = None) -> ndarray:
        return compute(lambda array: array.view() if dtype is None else array.view(dtype), self)

    @property
    def T(self) -> ndarray:  # noqa: N802
        return compute(np.transpose, self)

    def __copy__(self) -> ndarray:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> ndarray:
        return self.copy()

    def __reduce__(self) -> Any:
        return array, (self.get(),)

    def _contiguous(self) -> ndarray:
        return compute(np.ascontiguousarray, self)


def _method(name: str) -> Callable[..., Any]:
    def method(self: ndarray, *args: Any, **kwargs: Any) -> Any:
        return compute(lambda array, *args, **kwargs: getattr(array, name)(*args, **kwargs), self, *args, **kwargs)

    return method


for _name in [
    "all",
    "any",
    "argmax",
    "argmin",
    "argsort",
    "clip",
    "conj",
    "cumprod",
    "cumsum",
    "diagonal",
    "dot",
    "flatten",
    "max",
    "mean",
    "min",
    "nonzero",
    "prod",
    "ravel",
    "repeat",
    "reshape",
    "round",
    "squeeze",
    "std",
    "sum",
    "swapaxes",
    "take",
    "trace",
    "transpose",
    "var",
]:
    setattr(ndarray, _name, _method(_name))
for _name in ("real", "imag"):
    setattr(ndarray, _name, property(lambda self, name=_name: compute(lambda array: getattr(array, name), self)))


# --- functions ------------------------------------------------------------------------------------------------------


def compute(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``call`` gives of arrays, as arrays of the current device."""
    arrays = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, ndarray)]
    stream = _settled(*arrays)
    out = kwargs.get("out")
    outs = out if isinstance(out, tuple) else () if out is None else (out,)
    if outs:
        if not all(isinstance(each, ndarray) for each in outs):
            raise TypeError("out must be a device array")
        temporary = tuple(np.array(each._array) for each in outs)
        call(*_bare(args), **_bare({**kwargs, "out": temporary if isinstance(out, tuple) else temporary[0]}))
        for each, value in zip(outs, temporary, strict=True):
            stream.add(functools.partial(np.copyto, each._array, value))
        return outs if len(outs) > 1 else outs[0]
    return _wrapped(call(*_bare(args), **_bare(kwargs)), stream, arrays)


def function(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """NumPy's function over device arrays."""

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("blocking", None)
        if name in _SAYS:
            return call(*_bare(args), **_bare(kwargs))
        if name in _OWN_ARRAYS:
            _check_own(args)
        return compute(call, *args, **kwargs)

    return wrapped


def _check_own(args: tuple[Any, ...]) -> None:
    for leaf in _leaves(args):
        if not isinstance(leaf, ndarray) and hasattr(leaf, "__cuda_array_interface__"):
            raise TypeError(
                f"Argument 'b' has incorrect type (expected cupy._core.core._ndarray_base, got {type(leaf).__name__})"
            )


def array(
    obj: Any, dtype: Any = None, copy: bool = True, order: str = "K", ndmin: int = 0, *, blocking: bool = False
) -> ndarray:
    """A device array of a host array, numbers, or a device array of any device."""
    obj = _foreign(obj)
    if isinstance(obj, (list, tuple)) and any(isinstance(leaf, ndarray) for leaf in _leaves(obj)):
        found = compute(np.array, obj)
        return found if dtype is None else found.astype(dtype)
    if isinstance(obj, ndarray):
        here = _machine.gpu().number
        if obj.data.device_id == here:
            if not copy and (dtype is None or obj.dtype == dtype):
                return obj
            return compute(np.array, obj, dtype=dtype)
        with cuda.Device(obj.data.device_id):
            source = obj._contiguous()
            _machine.settle()
        made = ndarray(source.shape, source.dtype)
        _machine.copy(made.data.ptr, source.data.ptr, source.nbytes, _machine.current())
        return made if dtype is None else made.astype(dtype)
    host = np.array(obj, dtype, copy=True, ndmin=ndmin, order="C")
    if host.dtype.kind not in "biufc":
        raise ValueError(f"Unsupported dtype {host.dtype}")
    made = ndarray(host.shape, host.dtype)
    _machine.copy(made.data.ptr, host.ctypes.data, host.nbytes, _machine.current())  # host memory of its own: pageable
    return made


def asarray(
    a: Any, dtype: Any = None, order: Any = None, *, copy: bool | None = None, blocking: bool = False
) -> ndarray:
    """``a`` on the current device; itself where it is there."""
    return array(a, dtype, copy=bool(copy), blocking=blocking)


def asnumpy(a: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True) -> np.ndarray:
    """``a`` as a host array."""
    a = _foreign(a)
    return a.get(stream, order, out, blocking) if isinstance(a, ndarray) else np.asarray(a)


def _foreign(obj: Any) -> Any:
    """A device array over what shows device memory in CUDA's way; anything else as it is."""
    if isinstance(obj, (ndarray, type)):
        return obj
    interface = getattr(obj, "__cuda_array_interface__", None)
    if interface is None:
        return obj
    shape, dtype = interface["shape"], np.dtype(interface["typestr"])
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = cuda.UnownedMemory(interface["data"][0], nbytes, obj)
    return ndarray(shape, dtype, cuda.MemoryPointer(memory, 0), interface.get("strides"))


def _settled(*arrays: ndarray) -> _machine.Queue:
    """The current stream with its work done. Refuses arrays of other devices and memory that is none of a device's."""
    here = _machine.gpu().number
    for each in arrays:
        if each.data.device_id != here:
            raise ValueError(
                f"Array device must be same as the current device: array device = {each.data.device_id} while "
                f"current = {here}"
            )
        if each.size:
            low, high = np.lib.array_utils.byte_bounds(each._array)
            _machine.memory_at(low, high - low)
    return _machine.settle()


def _wrapped(result: Any, stream: _machine.Queue, arrays: list[ndarray]) -> Any:
    if isinstance(result, (list, tuple)):
        made = [_wrapped(each, stream, arrays) for each in result]
        return type(result)(*made) if hasattr(result, "_fields") else type(result)(made)
    if not isinstance(result, (np.ndarray, np.generic)):
        return result
    if isinstance(result, np.ndarray):
        for base in arrays:
            if _is_view(result, base._array):
                return _view_of(base, result)
    host_reads = sum(not _machine.block_at(base.data.ptr) for base in arrays)
    if host_reads:
        _machine.account.add("host_reads_nbytes", result.nbytes)
    value = np.array(result, order="C")
    made = ndarray(value.shape, value.dtype)
    target = made._array
    stream.add(lambda: np.copyto(target, value))
    return made


def _is_view(result: np.ndarray, of: np.ndarray) -> bool:
    return result.size > 0 and result.base is not None and np.may_share_memory(result, of)


def _view_of(base: ndarray, result: np.ndarray) -> ndarray:
    made = ndarray.__new__(ndarray)
    made.data = base.data + (result.ctypes.data - base.data.ptr)
    made.base = base
    made._array = result
    return made


def _bare(value: Any) -> Any:
    """The NumPy arrays behind device arrays; host arrays are refused."""
    value = _foreign(value)
    if isinstance(value, ndarray):
        return value._array
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}")
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_bare, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(_bare, value))
    if isinstance(value, dict):
        return {key: each if key == "out" else _bare(each) for key, each in value.items()}
    return value


def _kept(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, tuple):
        return tuple(map(_kept, value))
    return value


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in _leaves(each)]
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in _leaves(each)]
    return [value]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (np.generic, int, float, complex))
