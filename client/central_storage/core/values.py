"""Values with one component per replica: how they are made and taken apart.

This module owns the enums of reductions and variables, PerReplica, Mirrored and IndexedSlices. :func:`regroup` makes
one value of the values of all replicas, and :func:`select_replica` returns the component of one replica. The module
also converts Python values to arrays, and computes the results of ``reduce``, ``gather`` and
``experimental_local_results`` of a strategy, with the arithmetic of ``cs_proto.arithmetic.reduction``. It knows no
contexts, devices or processes: the strategy calls it after it has checked the context.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import optree
from numpy.lib.mixins import NDArrayOperatorsMixin

from cs_proto.arithmetic import reduction
from cs_proto.errors import InvalidArgumentError, StructureMismatchError

from .handles import Handle
from .public_objects import Closed
from .tensors.tensor import Tensor, as_tensor

__all__ = [
    "DistributedValues",
    "IndexedSlices",
    "Mirrored",
    "PerReplica",
    "ReduceOp",
    "Shared",
    "VariableAggregation",
    "VariableSynchronization",
    "as_reduce_op",
    "asserted_reduce_op",
    "convert_to_tensor",
    "gather_values",
    "local_results",
    "per_replica",
    "reduce_components",
    "reduce_values",
    "regroup",
    "select_replica",
    "select_replicas",
    "shared_parts",
    "unshared",
]

_ARRAYS = (np.ndarray, Tensor)
#: Types of most results; no container and no Shared has one of these.
_LEAVES = frozenset({type(None), bool, int, float, str, bytes, np.ndarray, Tensor})
_NOTHING, _UNCOMMON = frozenset({type(None)}), frozenset({float, np.ndarray, Tensor})
_HINTS = {"object": "; if its objects are texts, use astype(str)", "bfloat16": "; use astype('float32')"}


class ReduceOp(Closed, enum.Enum):
    """How values of replicas are combined."""

    SUM = "SUM"
    MEAN = "MEAN"


class VariableAggregation(Closed, enum.Enum):
    """How the values that replicas assign to one variable become one."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class VariableSynchronization(Closed, enum.Enum):
    """Stored with a variable; without effect here, where every variable is held once."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class DistributedValues(Closed):
    """A value with one component per replica, in replica order: :class:`PerReplica` or :class:`Mirrored`.

    Args:
        values: The components, at least one.

    Raises:
        InvalidArgumentError: There is no component (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> isinstance(cs.PerReplica([1, 2]), cs.DistributedValues)
        True
    """

    _values: tuple[Any, ...]

    def __init__(self, values: Iterable[Any]) -> None:
        components = tuple(values)
        if not components:
            raise InvalidArgumentError(f"{type(self).__name__} needs at least one component")
        object.__setattr__(self, "_values", components)  # made in every step, and Closed looks at what is set

    @property
    def values(self) -> tuple[Any, ...]:
        """The components in replica order."""
        return self._values

    def __repr__(self) -> str:
        lines = ",\n".join(f"  {replica}: {value!r}" for replica, value in enumerate(self._values))
        return f"{type(self).__name__}:{{\n{lines}\n}}"


class PerReplica(DistributedValues):
    """Different values on different replicas.

    It is passed on whole: to ``run``, ``reduce``, ``gather`` or ``experimental_local_results``. Arithmetic and
    iteration are a TypeError, and conversion to an array is a ValueError, since they do not say which component is
    meant.

    Args:
        values: The components in replica order, at least one.

    Raises:
        InvalidArgumentError: There is no component (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> cs.PerReplica([1.0, 2.0]).values
        (1.0, 2.0)
    """

    __array_ufunc__ = None  # makes `array + per_replica` a TypeError like `per_replica + array`

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise InvalidArgumentError(
            f"a PerReplica of {len(self._values)} components is not an array; pass it to run, reduce or gather, or "
            "take experimental_local_results of it"
        )

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        raise TypeError(
            f"a PerReplica of {len(self._values)} components is not a number to write as {spec!r}; reduce it, or take "
            "experimental_local_results of it"
        )


class Mirrored(DistributedValues, NDArrayOperatorsMixin):
    """The same value on every replica.

    Arithmetic, indexing, attributes (``shape``, ``dtype`` …) and conversion to an array are those of component 0.

    Args:
        values: The components in replica order, at least one.

    Raises:
        InvalidArgumentError: There is no component (a ValueError).

    Examples:
        >>> import numpy as np
        >>> import central_storage as cs
        >>> np.asarray(cs.Mirrored([np.float32([1, 2]), np.float32([1, 2])]) + 1).tolist()
        [2.0, 3.0]
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._values[0], name)

    def __getitem__(self, key: Any) -> Any:
        return self._values[0][key]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._values[0], dtype=dtype) if copy else np.asarray(self._values[0], dtype=dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [x.values[0] if isinstance(x, Mirrored) else x for x in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)


def per_replica(components: Iterable[Any]) -> PerReplica:
    """A PerReplica of at least one component. Costs less than a call of the class, which users may misuse."""
    made = object.__new__(PerReplica)
    object.__setattr__(made, "_values", tuple(components))
    return made


@dataclass(frozen=True, eq=False)
class IndexedSlices:
    """Some rows of a larger array: ``values[i]`` belongs to row ``indices[i]``. Rows that are named twice add up.

    Args:
        values: An array ``[k, …]``. Lists become arrays.
        indices: An integer array ``[k]``. Lists become arrays.
        dense_shape: The shape of the whole, along whose first axis the indices count.

    Raises:
        InvalidArgumentError: The arguments do not fit each other (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> cs.IndexedSlices([[1, 2], [3, 4]], [2, 2], dense_shape=(3, 2)).to_dense().tolist()
        [[0, 0], [0, 0], [4, 6]]
    """

    values: Any
    indices: Any
    dense_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.values, "shape"):  # arrays on a device stay there
            object.__setattr__(self, "values", convert_to_tensor(self.values))
        if not hasattr(self.indices, "shape"):
            indices = convert_to_tensor(self.indices)
            object.__setattr__(self, "indices", indices if indices.size else indices.astype(np.int32))
        if self.dense_shape is not None:
            object.__setattr__(self, "dense_shape", tuple(map(operator.index, self.dense_shape)))
        rows, count = tuple(self.values.shape), tuple(self.indices.shape)
        if len(count) != 1 or rows[:1] != count:
            raise InvalidArgumentError(f"values {list(rows)} need one index a row, not indices {list(count)}")
        if getattr(self.indices.dtype, "kind", "i") not in "iu":
            raise InvalidArgumentError(f"indices must be integers, not {self.indices.dtype}")
        if self.dense_shape is not None and self.dense_shape[1:] != rows[1:]:
            raise InvalidArgumentError(f"rows {list(rows[1:])} do not fit dense_shape {list(self.dense_shape)}")

    @property
    def dtype(self) -> Any:
        """The dtype of ``values``."""
        return self.values.dtype

    def to_dense(self) -> np.ndarray:
        """The whole as a new array, zero where no row is named, of the dtype of ``values``.

        Raises InvalidArgumentError (a ValueError) without ``dense_shape`` and for an index outside it.
        """
        if self.dense_shape is None:
            raise InvalidArgumentError(
                "IndexedSlices without dense_shape cannot become a whole array; pass dense_shape"
            )
        values, indices = convert_to_tensor(self.values), convert_to_tensor(self.indices).astype(np.int64)
        wrong = indices[(indices < 0) | (indices >= self.dense_shape[0])]
        if wrong.size:
            raise InvalidArgumentError(f"index {wrong[0]} of IndexedSlices is outside [0, {self.dense_shape[0]})")
        dense = np.zeros(self.dense_shape, values.dtype)
        np.add.at(dense, indices, values)
        return dense


@dataclass(frozen=True, eq=False)
class Shared:
    """A part of a merge function's result that is the same for all replicas, on its way to them and back.

    If every replica returns it unchanged, :func:`regroup` returns it bare, as the one object that it was. ``key`` names
    it in its run: the number of the merge point and the number of the part.
    """

    key: tuple[int, int]
    value: Any


def shared_parts(point: int, result: Any) -> dict[int, tuple[int, int]]:
    """The numbers and arrays in the result of merge point ``point`` that are the same for all replicas: the ``id()`` of
    each part, and its key."""
    leaves = optree.tree_leaves(result, none_is_leaf=True)
    return {
        id(leaf): (point, part)
        for part, leaf in enumerate(leaves)
        if not isinstance(leaf, DistributedValues) and not _is_common(leaf, leaf)
    }


def regroup(values: Sequence[Any], always_wrap: bool = False) -> Any:
    """One value made of one value per replica: containers are kept, and leaves that may differ become PerReplica.

    These leaves stay bare: None, equal str, bytes, bool and int of one type, enum members, dtypes, handles of the same
    object, and parts that one merge function gave to all. Other floats and everything like an array become PerReplica
    even if they are equal. With one value everything is bare. With ``always_wrap`` every leaf is wrapped. Replica 0
    decides what is a container; StructureMismatchError (an AssertionError) if another replica has another kind, length
    or keys there.
    """
    if not values:
        raise InvalidArgumentError("regroup needs the value of at least one replica")
    if not (values[1:] or always_wrap):
        return values[0]
    kinds = frozenset(map(type, values))
    if not always_wrap and kinds <= _LEAVES:
        if kinds == _NOTHING:  # the usual case of steps that return nothing
            return None
        # The usual result; such values are never common.
        return per_replica(values) if type(values[0]) in _UNCOMMON else _merged(tuple(values))
    leaves, treespec = optree.tree_flatten(values[0], none_is_leaf=True)
    columns = [leaves]
    for replica, value in enumerate(values[1:], start=1):
        try:
            columns.append(treespec.flatten_up_to(value))
        except ValueError as error:
            what = str(error).rstrip(".")
            raise StructureMismatchError(
                f"replica {replica} does not have the structure of replica 0: {what}; give the same keys and lengths "
                "on every replica, or put what differs into an array"
            ) from None
    together = zip(*columns, strict=True)
    return treespec.unflatten(PerReplica(map(unshared, leaf)) if always_wrap else _merged(leaf) for leaf in together)


def select_replica(replica: int, structure: Any) -> Any:
    """``structure`` as ``replica`` sees it: its own component of every PerReplica and Mirrored, everything else
    unchanged. Raises IndexError if one has no component for ``replica``."""
    if type(structure) is tuple:  # the usual case of arguments and elements
        return tuple([select_replica(replica, part) for part in structure])
    if isinstance(structure, DistributedValues):
        return _component(replica, structure)
    if type(structure) is dict and not structure:
        return {}
    return optree.tree_map(partial(_component, replica), structure, none_is_leaf=True)


def select_replicas(n: int, structure: Any) -> Sequence[Any]:
    """``structure`` as each of ``n`` replicas sees it: see :func:`select_replica`."""
    if type(structure) is tuple and structure:  # the usual case of arguments and elements
        columns = [
            part._values if type(part) is PerReplica and len(part._values) == n else select_replicas(n, part)  # noqa: SLF001  (a property is a call more)
            for part in structure
        ]
        return list(zip(*columns, strict=True))
    if type(structure) in _LEAVES:
        return (structure,) * n
    return [select_replica(replica, structure) for replica in range(n)]


def _component(replica: int, leaf: Any) -> Any:
    if not isinstance(leaf, DistributedValues):
        return leaf
    values = leaf.values
    if replica >= len(values):
        raise IndexError(f"a value of {len(values)} components has none for replica {replica}")
    return values[replica]


def local_results(value: Any, n: int) -> tuple[Any, ...]:
    """``value`` as a tuple: the components of a PerReplica or Mirrored, ``n`` nests of a nest, else ``(value,)``."""
    if isinstance(value, DistributedValues):
        return value.values
    if optree.tree_is_leaf(value, none_is_leaf=True):
        return (value,)
    return tuple(select_replica(replica, value) for replica in range(n))


def convert_to_tensor(value: Any, dtype: Any = None) -> np.ndarray:
    """``value`` as a NumPy array. Arrays keep their dtype and are not copied, unless their byte order is foreign.

    Python numbers and lists of them: float becomes float32, int int32 (int64 where one does not fit), bool bool,
    complex complex128. With ``dtype``, an int may become a float but not the reverse (TypeError). Raises
    :class:`InvalidArgumentError` for anything but an array of numbers, bools or strings (None, dicts, uneven lists,
    lists of strings and numbers, a PerReplica, a masked array) and for integers that do not fit.
    """
    if dtype is None and type(value) in _ARRAYS and value.dtype.kind in "biufcUS" and value.dtype.isnative:
        return np.asarray(value)
    array = _array_of(value)
    array = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))  # else another dtype
    untyped = _is_untyped(value)
    if not untyped and _has(np.ma.MaskedArray, value):
        raise InvalidArgumentError("a masked array has no value where it is masked; use .filled(...) or .data of it")
    if array.dtype.kind in "US" and isinstance(value, list | tuple) and not _is_text(value):
        raise InvalidArgumentError(f"{value!r:.200} mixes strings and numbers, which no array holds")
    if array.dtype.kind not in "biufcUS":
        hint = _HINTS.get(str(getattr(value, "dtype", "")), "")
        raise InvalidArgumentError(f"{value!r:.200} cannot become an array of numbers, bools or strings{hint}")
    if dtype is not None:
        return _cast(array, np.dtype(dtype), anything=untyped and array.size == 0)
    if not untyped:
        return array
    # Of ints that do not fit int64 NumPy makes uint64, or float64 where others are smaller.
    if array.dtype.kind == "u" or (array.dtype == np.float64 and array.size and not _has(float, value)):
        raise InvalidArgumentError(
            f"{value!r:.200} does not fit int64; make it a NumPy array of the dtype that you mean"
        )
    if array.dtype == np.float64:
        with np.errstate(over="ignore"):
            return array.astype(np.float32)
    if array.dtype == np.int64 and _fits(array, np.dtype(np.int32)):
        return array.astype(np.int32)
    return array


def as_reduce_op(op: ReduceOp | str) -> ReduceOp:
    """The ReduceOp for a member or its name in any case. Raises ValueError for unknown names, TypeError for other
    types."""
    if isinstance(op, ReduceOp):
        return op
    if not isinstance(op, str):
        raise TypeError(f"a reduction must be ReduceOp.SUM or ReduceOp.MEAN, not {op!r}")
    try:
        return ReduceOp(op.upper())
    except ValueError:
        raise InvalidArgumentError(f"a reduction must be 'SUM' or 'MEAN', not {op!r}") from None


def asserted_reduce_op(op: ReduceOp | str) -> ReduceOp:
    """As :func:`as_reduce_op`, but a wrong type is an AssertionError, as in TensorFlow without an axis."""
    try:
        return as_reduce_op(op)
    except TypeError as error:
        raise AssertionError(str(error)) from None


def reduce_components(op: ReduceOp, components: Sequence[Any]) -> Any:
    """The element-wise sum or mean of ``components``, an array.

    If all are IndexedSlices, the result is the IndexedSlices of all their rows in replica order, without merging rows
    that are named twice (MEAN divides the values by the number of components). Together with arrays they count as whole
    arrays.
    """
    slices = [component for component in components if isinstance(component, IndexedSlices)]
    if not slices or len(slices) < len(components):
        dtype = None
        if all(type(component) is int for component in components):  # Python's sum of them does not overflow
            dtype = convert_to_tensor([*components, sum(components) if op is ReduceOp.SUM else 0]).dtype
        return as_tensor(reduction.reduce(_name(op), [convert_to_tensor(each, dtype) for each in components]))
    shape, dtype = slices[0].dense_shape, slices[0].dtype
    for replica, component in enumerate(slices):
        if component.dense_shape != shape or component.dtype != dtype:
            raise InvalidArgumentError(
                f"component {replica} is IndexedSlices of {component.dtype}, dense_shape {component.dense_shape}; "
                f"component 0 of {dtype}, {shape}"
            )
    values = reduction.gather([convert_to_tensor(component.values) for component in slices], axis=0)
    if op is ReduceOp.MEAN:
        values = reduction.divide(values, len(slices))
    return IndexedSlices(values, np.concatenate([convert_to_tensor(c.indices) for c in slices]), shape)


def reduce_values(op: ReduceOp | str, value: Any, axis: Any, n: int) -> Any:
    """The result of ``Strategy.reduce(op, value, axis)`` under ``n`` replicas.

    ``axis=None`` combines the components of a PerReplica or Mirrored element by element; a single one is returned
    unchanged. With an axis the value is what each replica would see as an argument of ``run``: each sums its own over
    the axis first, and MEAN weighs all elements alike. A plain value under several replicas: SUM without an axis is a
    ValueError (zero apart), with an axis it counts ``n`` times; MEAN without an axis is the value itself. Raises as
    ``cs_proto.arithmetic.reduction`` does, IndexError where a replica has no component; a wrong ``op`` is an
    AssertionError without an axis.
    """
    op = asserted_reduce_op(op) if axis is None else as_reduce_op(op)
    if axis is not None:
        shares = [convert_to_tensor(select_replica(replica, value)) for replica in range(n)]
        return as_tensor(reduction.reduce_axis(_name(op), shares, axis))
    if isinstance(value, DistributedValues):
        if len(value.values) > 1:
            return reduce_components(op, value.values)
        value, n = value.values[0], 1
    if op is ReduceOp.MEAN:
        return as_tensor(value)
    if n == 1:
        return value if isinstance(value, IndexedSlices) else as_tensor(convert_to_tensor(value))
    # The sum of zeros is zero in either case; `run` returns equal Python numbers bare.
    if isinstance(value, int | float | np.number) and not isinstance(value, bool) and value == 0:
        return value
    if any(isinstance(leaf, DistributedValues) for leaf in optree.tree_leaves(value, none_is_leaf=True)):
        raise InvalidArgumentError(
            f"SUM of a {type(value).__name__} is not one value per replica; reduce each of its values, such as "
            "cs.nest.map_structure(lambda each: strategy.reduce('SUM', each, axis=None), value)"
        )
    raise InvalidArgumentError(
        f"SUM of {type(value).__name__} {value!r:.200} is ambiguous: it is not one value per replica, so it could "
        f"count once or {n} times. If the replicas returned equal values, keep them apart with "
        "strategy.run(…, options=cs.RunOptions(keep_per_replica=True)), or return an array from every replica; if it "
        "is one value, use MEAN"
    )


def gather_values(value: Any, axis: Any, n: int) -> Any:
    """The result of ``Strategy.gather(value, axis)`` under ``n`` replicas: the components one after the other.

    A plain value is returned unchanged for every axis, and so is a single component. Bare IndexedSlices are a
    NotImplementedError; as components they count as whole arrays. Raises as
    :func:`cs_proto.arithmetic.reduction.gather` does.
    """
    if isinstance(value, IndexedSlices):
        raise NotImplementedError(
            "gather does not take IndexedSlices; gather their values and indices, or their to_dense()"
        )
    if not isinstance(value, DistributedValues):
        return as_tensor(value)
    if len(value.values) == 1:
        return as_tensor(value.values[0])
    return as_tensor(reduction.gather([convert_to_tensor(component) for component in value.values], axis))


def _merged(leaves: tuple[Any, ...]) -> Any:
    first, *others = leaves
    if isinstance(first, Shared):
        alike = all(isinstance(other, Shared) and other.key == first.key for other in others)
        is_common = alike and len({_bits(leaf.value) for leaf in leaves}) == 1  # a replica may have changed it in place
    else:
        is_common = all(_is_common(first, other) for other in others)
    return unshared(first) if is_common else PerReplica([unshared(leaf) for leaf in leaves])


def unshared(structure: Any) -> Any:
    """``structure`` with the values of its :class:`Shared` parts."""
    if type(structure) in _LEAVES:
        return structure
    return optree.tree_map(lambda x: x.value if isinstance(x, Shared) else x, structure, none_is_leaf=True)


def _bits(value: Any) -> tuple[bytes, ...]:
    parts = (value.values, value.indices) if isinstance(value, IndexedSlices) else (value,)
    return tuple(np.asarray(part).tobytes() for part in parts)


def _is_common(first: Any, other: Any) -> bool:
    """Whether two leaves are one value that needs no PerReplica. Floats and arrays never are: if two replicas have
    computed the same one, that is chance."""
    if isinstance(first, float | np.ndarray):
        return False
    key = getattr(type(first), "_cs_handle", None) or getattr(type(first), "_cs_key", None)
    if key is not None:
        return first is other or (type(first) is type(other) and bool(key(first) == key(other)))
    if isinstance(first, float | complex | np.generic | DistributedValues | IndexedSlices) or _is_array(first):
        return False
    if isinstance(first, str | bytes | int | enum.Enum | np.dtype):
        return type(first) is type(other) and bool(first == other)
    return first is other


def _is_array(value: Any) -> bool:
    # The class np.float32 has the attributes of its instances; as a value it is a dtype.
    return not isinstance(value, type) and (hasattr(value, "__array__") or hasattr(value, "__dlpack__"))


def _name(op: ReduceOp) -> Literal["SUM", "MEAN"]:
    return "SUM" if op is ReduceOp.SUM else "MEAN"


def _array_of(value: Any) -> np.ndarray:
    if isinstance(value, IndexedSlices):
        return value.to_dense()
    if hasattr(value, "__cuda_array_interface__") and not isinstance(value, Handle):
        if not hasattr(value, "get"):
            raise TypeError(f"a {type(value).__name__} on a GPU is not copied implicitly; use its .cpu()")
        return np.asarray(value.get())
    try:
        return np.asarray(value)
    except TypeError:
        if not isinstance(value, list | tuple):
            raise
        return np.asarray(_in_host_memory(value))  # for arrays on a GPU
    except ValueError as error:  # uneven lists; a PerReplica
        raise InvalidArgumentError(f"{value!r:.200} cannot become an array: {error}") from error


def _in_host_memory(value: Any) -> Any:
    """A list or tuple, of lists or tuples, with its arrays on GPUs in host memory."""
    if isinstance(value, list | tuple):
        return list(map(_in_host_memory, value))
    return _array_of(value) if hasattr(value, "__cuda_array_interface__") else value


def _is_untyped(value: Any) -> bool:
    """Whether ``value`` is made of Python numbers only, so that we choose the dtype."""
    if isinstance(value, list | tuple):
        return all(map(_is_untyped, value))
    return isinstance(value, int | float | complex) and not isinstance(value, np.generic)


def _has(kind: type, value: Any) -> bool:
    return any(map(partial(_has, kind), value)) if isinstance(value, list | tuple) else isinstance(value, kind)


def _is_text(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_text, value))
    return isinstance(value, str | bytes) or getattr(value, "dtype", np.dtype(object)).kind in "US"


def _cast(array: np.ndarray, dtype: np.dtype[Any], anything: bool) -> np.ndarray:
    if array.dtype == dtype:
        return array
    integers = array.dtype.kind in "iu" and dtype.kind in "iu"
    texts = (array.dtype.kind in "US") + (dtype.kind in "US")
    alike = array.dtype.kind == dtype.kind if texts else np.can_cast(array.dtype, dtype, "same_kind")
    if not (integers or alike or anything):
        raise TypeError(f"{array.dtype} is not converted to {dtype} implicitly; use astype")
    if integers and not _fits(array, dtype):
        raise InvalidArgumentError(f"{array!r:.200} does not fit {dtype}")
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def _fits(array: np.ndarray, dtype: np.dtype[Any]) -> bool:
    limits = np.iinfo(dtype)
    return array.size == 0 or (int(array.min()) >= limits.min and int(array.max()) <= limits.max)
