"""Hypothesis strategies for every record kind, made from the field types: a new record is covered without a word.

Where a record's own check ties fields together (a run's path, an array and its frame), the rule is told here; for all
other fields the type is all there is to know.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Union

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from cs_proto.arithmetic.schedules import FIELDS, Kind, Schedule
from cs_proto.arrays import Array, Location, array_of, bytes_array
from cs_proto.errors import LocalProtocolError
from cs_proto.messages import (
    MOST_AHEAD,
    ApplyPoint,
    AssignAll,
    Counters,
    DevicePlace,
    Envelope,
    ExtendSegment,
    Fetch,
    Joined,
    MakeSegment,
    OptimizerUpdate,
    Put,
    Return,
    Run,
    SparseGradient,
    VariableSpec,
)
from cs_proto.records import RECORDS, Frame, Record

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
COUNTS = st.integers(0, 1 << 40)
NUMBERS = st.integers(1, 1 << 40)
SEGMENTS = st.from_regex(r"[a-z0-9][a-z0-9_/-]{0,20}", fullmatch=True)
# A path with an odd number of parts: (n,) or (n, k, j, ...).
RUNS = st.tuples(COUNTS, st.lists(st.tuples(COUNTS, COUNTS), max_size=2)).map(
    lambda drawn: (drawn[0], *(number for pair in drawn[1] for number in pair))
)
DTYPES = st.one_of(
    npst.scalar_dtypes().filter(lambda dtype: dtype.kind in "biufc" and dtype.itemsize <= 16),
    npst.unicode_string_dtypes(max_len=5),
    npst.byte_string_dtypes(max_len=5),
).filter(lambda dtype: dtype.name not in ("float128", "complex256", "longdouble"))
ARRAYS_INLINE = DTYPES.flatmap(lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_side=3))).map(
    array_of
)
ARRAYS_IN_SEGMENTS = st.builds(
    Array,
    st.sampled_from(["float32", "int64", "bool", "complex128", "U3", "S9"]),
    st.lists(st.integers(0, 1 << 10), max_size=4).map(tuple),
    st.builds(Location, SEGMENTS, st.integers(0, 1 << 50)),
)

_SCALARS: Mapping[object, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(1 << 63), (1 << 64) - 1),
    float: st.floats(),
    str: TEXT,
    bytes: st.binary(max_size=12),
    type(None): st.none(),
    Frame: st.binary(max_size=12).map(Frame),
}

# By name of the field, whatever the record: what every record means by it.
_FIELDS: Mapping[str, st.SearchStrategy[Any]] = {
    "run": RUNS,
    "k": COUNTS,
    "series": st.sampled_from([0, 0, 1]),  # of a nested run, 0
    "lookahead": st.integers(0, MOST_AHEAD),
    "later": st.sampled_from([0, 0, 3]),
    "digest": st.binary(min_size=16, max_size=16),
    "session": st.binary(min_size=16, max_size=16),
    "held": st.lists(st.integers(0, 1 << 30), max_size=4, unique=True).map(
        lambda drawn: tuple((page << 12, (page + 1) << 12) for page in sorted(drawn))
    ),
}


def records(kind: type[Record]) -> st.SearchStrategy[Any]:
    """Valid records of one kind."""
    special = _SPECIAL.get(kind)
    return special() if special is not None else _built(kind)


def any_record() -> st.SearchStrategy[Any]:
    """Valid records of every kind."""
    return st.sampled_from(sorted(RECORDS)).flatmap(lambda code: records(RECORDS[code]))


def _built(kind: type[Record], **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    known = {**_FIELDS, **given}
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    fields = {name: known[name] if name in known else _of(hints[name]) for name in names}
    return st.fixed_dictionaries(fields).map(lambda values: _try(kind, values)).filter(lambda made: made is not None)


def _try(kind: type[Record], values: dict[str, Any]) -> Record | None:
    try:
        return kind(**values)
    except LocalProtocolError:
        return None  # a rule between fields that is not told here: drawn again, and too many are an error of Hypothesis


def _of(hint: Any) -> st.SearchStrategy[Any]:
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated and arguments[0] is int:
        return st.integers(arguments[1].least, arguments[1].most)
    if origin is Annotated:
        return st.floats(arguments[1].least, arguments[1].most)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return st.lists(_of(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(_of, arguments))
    if origin in (Union, types.UnionType):
        return st.one_of(*map(_of, arguments))
    return records(hint)


def _returns() -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(Return)
    value, error = (next(a for a in typing.get_args(hints[name]) if a is not type(None)) for name in ("value", "error"))
    return st.booleans().flatmap(
        lambda raised: _built(
            Return, value=st.none() if raised else _of(value), error=_of(error) if raised else st.none()
        )
    )


def _pickles() -> st.SearchStrategy[Array]:
    return st.one_of(st.binary(max_size=40).map(bytes_array), _bytes_in_segments())


def _bytes_in_segments() -> st.SearchStrategy[Array]:
    return st.builds(lambda nbytes, place: Array("uint8", (nbytes,), place), st.integers(0, 1 << 40), records(Location))


def _rows() -> st.SearchStrategy[Any]:
    def fitting(shape: list[int], segment: Location, dtype: str) -> tuple[Array, Array]:
        return Array(dtype, tuple(shape), segment), Array("int64", (shape[0],), segment)

    shapes = st.lists(st.integers(0, 1 << 10), min_size=1, max_size=4)
    arrays = st.builds(fitting, shapes, records(Location), st.sampled_from(["float32", "float16", "complex128"]))
    return st.tuples(NUMBERS, arrays).map(lambda drawn: SparseGradient(drawn[0], *drawn[1]))


def _fetches() -> st.SearchStrategy[Any]:
    def of_rows(array: Array, numbers: Array) -> tuple[Array, Array | None]:
        return array, numbers if array.shape else None

    rows = st.integers(0, 1 << 10).flatmap(
        lambda count: st.builds(Array, st.just("int64"), st.just((count,)), records(Location))
    )
    arrays = st.one_of(st.tuples(ARRAYS_IN_SEGMENTS, st.none()), st.builds(of_rows, ARRAYS_IN_SEGMENTS, rows))
    return st.tuples(COUNTS, arrays).map(lambda drawn: Fetch(drawn[0], *drawn[1]))


def _puts() -> st.SearchStrategy[Any]:
    def fitting(number: int, value: Array, place: Location, has_value: bool) -> Put:
        return Put(number, Array("uint8", value.shape, place), value if has_value else None)

    return st.builds(fitting, COUNTS, _pickles(), records(Location), st.booleans())


def _schedules() -> st.SearchStrategy[Any]:
    finite = st.floats(allow_nan=False, allow_infinity=False)
    steps = st.floats(0, exclude_min=True, allow_infinity=False)

    def numbers(kind: Kind) -> st.SearchStrategy[Schedule]:
        special = {"decay_steps": steps, "first_decay_steps": steps, "t_mul": st.floats(1, allow_infinity=False)}
        drawn = st.tuples(*(special.get(field, finite) for field in FIELDS[kind]))
        return drawn.map(lambda numbers: Schedule(kind, numbers))

    pieces = st.lists(finite, max_size=3).flatmap(
        lambda boundaries: st.lists(finite, min_size=len(boundaries) + 1, max_size=len(boundaries) + 1).map(
            lambda values: Schedule("PiecewiseConstantDecay", (*sorted(boundaries), *values))
        )
    )
    return st.one_of(pieces, *(numbers(kind) for kind in FIELDS if FIELDS[kind]))


def _applies() -> st.SearchStrategy[Any]:
    updates = st.lists(_updates(), min_size=1, max_size=3, unique_by=lambda update: update.optimizer).map(tuple)
    bounded = _built(ApplyPoint, updates=updates, global_clipnorm=st.floats(0, 1e300))
    free = _built(ApplyPoint, updates=updates, global_clipnorm=st.none(), clip_epsilon=st.just(0.0))
    return st.one_of(bounded, free)


def _updates() -> st.SearchStrategy[Any]:
    sparse = st.lists(_rows(), max_size=2, unique_by=lambda gradient: gradient.variable).map(
        lambda rows: tuple(sorted(rows, key=lambda gradient: gradient.variable))
    )
    variables = st.lists(NUMBERS, min_size=1, max_size=4).map(tuple)
    first = _built(OptimizerUpdate, variable_set=st.just(0), variables=variables, sparse=sparse)
    later = _built(OptimizerUpdate, variable_set=st.integers(1, 1 << 40), variables=st.just(()), sparse=sparse)
    return st.one_of(first, later)


def _joined() -> st.SearchStrategy[Any]:
    def of(replicas: int) -> st.SearchStrategy[Any]:
        ranks, incarnations = st.integers(0, replicas - 1), st.integers(1, 1 << 20)
        return _built(Joined, replicas=st.just(replicas), rank=ranks, incarnation=incarnations)

    return st.integers(1, 1 << 10).flatmap(of)


def _envelopes() -> st.SearchStrategy[Any]:
    def holding(name: bytes, number: int, heard: int, pieces: list[tuple[bytes | Frame, int]]) -> Envelope:
        ends = bytes(end for _, end in pieces)
        return Envelope(name, number if pieces else 0, heard, ends, tuple(piece for piece, _ in pieces))

    pieces = st.lists(st.tuples(st.one_of(_SCALARS[bytes], _SCALARS[Frame]), st.integers(0, 2)), max_size=4)
    return st.builds(holding, _FIELDS["session"], NUMBERS, COUNTS, pieces)


_SPECIAL: Mapping[type[Record], Callable[[], st.SearchStrategy[Any]]] = {
    Counters: lambda: _built(Counters, run=COUNTS),  # a number, while others name a run by its path
    Array: lambda: st.one_of(ARRAYS_INLINE, ARRAYS_IN_SEGMENTS),
    Envelope: _envelopes,
    Joined: _joined,
    Location: lambda: st.builds(Location, SEGMENTS, st.integers(0, 1 << 50)),
    VariableSpec: lambda: _built(
        VariableSpec,
        name=NAMES,
        dtype=st.sampled_from(["float32", "float64", "int8", "bool", "complex64"]),
        shape=st.lists(st.integers(0, 1 << 20), max_size=4).map(tuple),
    ),
    ApplyPoint: _applies,
    AssignAll: lambda: _built(AssignAll, value=_bytes_in_segments()),
    OptimizerUpdate: _updates,
    SparseGradient: _rows,
    DevicePlace: lambda: st.one_of(
        st.just(DevicePlace(b"", 0, 0, b"")),
        st.builds(
            lambda handle, before, after, mark: DevicePlace(handle, 16 + before, 32 + before + after, mark),
            st.binary(min_size=64, max_size=64),
            st.integers(0, 1 << 40),
            st.integers(0, 1 << 40),
            st.binary(min_size=16, max_size=16),
        ),
    ),
    Fetch: _fetches,
    Put: _puts,
    Schedule: _schedules,
    Return: _returns,
    Run: lambda: _built(Run, function=st.one_of(st.none(), _pickles()), arguments=_pickles()),
    MakeSegment: lambda: _built(MakeSegment, segment=SEGMENTS),
    ExtendSegment: lambda: _built(ExtendSegment, segment=SEGMENTS),
}


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays have the same dtype, shape and bytes (NaN included)."""
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
