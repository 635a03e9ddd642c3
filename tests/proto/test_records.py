"""Records check themselves where they are built, and every kind survives the way to the wire and back."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.harness.examples import examples
from tests.harness.record_strategies import any_record, records

from cs_proto.arrays import bytes_array
from cs_proto.codec import decode, encode
from cs_proto.errors import LocalProtocolError
from cs_proto.messages import (
    ApplyPoint,
    Ask,
    Cancel,
    CreatePoint,
    DevicePlace,
    Done,
    Locate,
    MakeSegment,
    OptimizerUpdate,
    Output,
    ReducePoint,
    Return,
    Run,
    Statistics,
    Value,
    VariableSpec,
    Worker,
)
from cs_proto.records import RECORDS, Count, Frame, Frames, Record, _compile, from_wire, record, shown

# The server's private rows are records too, and are proved by its own tests.
KINDS = [kind for _, kind in sorted(RECORDS.items()) if kind.__module__.startswith("cs_proto.")]

UPDATES = (OptimizerUpdate(1, 3, ()),)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=examples(8), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_kind_comes_back_as_it_was_sent(kind: type[Record], data: st.DataObject) -> None:
    sent = data.draw(records(kind))
    parts = [bytes(part) for part in encode(sent)]
    got = decode(parts)
    assert type(got) is kind
    assert got == sent or "nan" in repr(sent)
    assert [bytes(part) for part in encode(got)] == parts


@settings(max_examples=examples(40))
@given(any_record())
def test_a_record_cannot_be_changed(sent: Record) -> None:
    names = [field.name for field in dataclasses.fields(sent)]  # type: ignore[arg-type]
    for name in names or ["new"]:  # some records have no fields
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(sent, name, 1)


def test_every_record_has_a_code_of_its_own() -> None:
    codes = [kind.code for kind in KINDS]
    assert codes == sorted(set(codes))
    assert all(1 <= code <= 255 for code in codes)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Statistics(1.0), "request must be int"),
        (lambda: Statistics(True), "request must be int"),
        (lambda: Statistics(1 << 64), "request must be int"),
        (lambda: Statistics(-(1 << 63) - 1), "request must be int"),
        (lambda: Output("stdin", "x"), "stream must be one of"),
        (lambda: Output(["stdout"], "x"), "stream must be one of"),
        (lambda: Output("stdout", b"x"), "text must be str"),
        (lambda: Value(bytearray(b"x"), ()), "body must be bytes"),
        (lambda: Value(b"x", []), "arrays must be a tuple of Array"),
        (lambda: Value(b"x", (None,)), "arrays must be a tuple of Array"),
        (lambda: Run((1,), 1, 0, 0, b"d" * 16, b"f", False, bytes_array(b""), ()), "function must be Array or None"),
        (lambda: Ask((1,), 0, 1, (), Statistics(1)), "point must be ApplyPoint or"),
        (lambda: Done(1, 2, None), "version must be int from 0 to .*, not None"),
        (lambda: Cancel(()), "is not a run"),
        (lambda: Cancel((1, 2)), "is not a run"),
        (lambda: Cancel((1, -2, 3)), "Cancel.run must be a tuple of int from 0"),
        (lambda: Cancel((1,) * 67), "is not a run"),
        (lambda: ReducePoint(-1, "f.py:1", "SUM", ()), "k must be int from 0"),
        (lambda: ReducePoint(0, "f" * 4097, "SUM", ()), "the call site has 4097 characters"),
        (lambda: OptimizerUpdate(1, 0, ()), "either variables or the number of their set"),
        (lambda: OptimizerUpdate(1, 3, (1,)), "either variables or the number of their set"),
        (lambda: ApplyPoint(0, "f.py:1", UPDATES, 4), "buffers must be int from 0 to 3"),
        (lambda: ApplyPoint(0, "f.py:1", (), 0), "name at least one optimizer"),
        (lambda: ApplyPoint(0, "f.py:1", 2 * UPDATES, 0), r"name at least one optimizer, and each once, not \(1, 1\)"),
        (lambda: ApplyPoint(0, "f.py:1", UPDATES, 0, -0.5), "weight must be float from 0.0"),
        (lambda: ApplyPoint(0, "f.py:1", UPDATES, 0, float("nan")), "weight must be float from 0.0"),
        (lambda: ApplyPoint(0, "f.py:1", UPDATES, 0, float("inf")), "weight must be float from 0.0"),
        (lambda: ApplyPoint(0, "f.py:1", UPDATES, 0, 1.0, -1.0), "global_clipnorm must be"),
        (lambda: ApplyPoint(0, "f.py:1", UPDATES, 0, clip_epsilon=1e-6), "clip_epsilon belongs to a global_clipnorm"),
        (lambda: Locate(1, (), 2), "buffers must be int from -1 to 1"),
        (lambda: DevicePlace(bytes(64), 16, 64, b""), "a mark of 0"),
        (lambda: DevicePlace(bytes(64), 15, 64, bytes(16)), "offset 15 in a block of 64"),
        (lambda: DevicePlace(bytes(64), 49, 64, bytes(16)), "offset 49 in a block of 64"),
        (lambda: DevicePlace(b"", 0, 64, b""), "offset 0 in a block of 64"),
        (lambda: Return((1,), 0, 1, (), 0, None, None), "a value or an error"),
        (lambda: Run((1,), 1, 0, 0, b"d", None, False, bytes_array(b""), ()), "a digest must have 16 bytes"),
        (lambda: Run((1,), -1, 0, 0, b"d" * 16, None, False, bytes_array(b""), ()), "Run.step must be int from 0"),
        (lambda: VariableSpec("", "float32", (), True, 0, 0), "is not a variable name"),
        (lambda: VariableSpec("a\n", "float32", (), True, 0, 0), "is not a variable name"),
        (lambda: VariableSpec("a", "U3", (), True, 0, 0), "a variable cannot have dtype"),
        (lambda: VariableSpec("a", "object", (), True, 0, 0), "a variable cannot have dtype"),
        (lambda: VariableSpec("a", "float32", (-1,), True, 0, 0), "shape must be a tuple of int from 0"),
        (lambda: VariableSpec("a", "float32", (1,) * 33, True, 0, 0), "is not a shape"),
        (lambda: VariableSpec("a", "float32", (1 << 61,), True, 0, 0), "is too large"),
        (
            lambda: VariableSpec("a", "float32", (), True, 0, 0, sparse=True),
            "a sparse variable is trainable, has an axis",
        ),
        (lambda: VariableSpec("a", "float32", (2,), False, 0, 0, sparse=True), "a sparse variable is trainable"),
        (lambda: VariableSpec("a", "int64", (2,), True, 0, 0, sparse=True), "a dtype that has gradients"),
        (lambda: VariableSpec("a", "float32", (), True, 4, 0), "aggregation must be int from 0 to 3"),
        (lambda: VariableSpec("a", "float32", (), True, 0, -1), "synchronization must be int from 0 to 3"),
        (lambda: MakeSegment("x", 0, ""), "reservation must be int from 1"),
        (lambda: MakeSegment("../x", 1, ""), "is not a segment name"),
        (lambda: CreatePoint(0, "", None, None), "variable must be VariableSpec"),
        (lambda: Worker(0, 1, 2, None), "device must be str"),
    ],
)
def test_what_does_not_fit_is_refused_where_it_is_built(build: object, said: str) -> None:
    with pytest.raises(LocalProtocolError, match=said):
        build()  # type: ignore[operator]


def test_a_code_is_given_once() -> None:
    class Late(Record):
        number: Count

    with pytest.raises(LocalProtocolError, match="code 35 already belongs to Statistics"):
        record(35)(Late)
    with pytest.raises(LocalProtocolError, match="not between 1 and 255"):
        record(256)(Late)


@pytest.mark.parametrize("hint", [dict, object, list[int], set[str], Literal[1], complex])
def test_a_field_of_an_unknown_type_is_refused_when_the_first_record_is_built_or_read(hint: object) -> None:
    unknown = type("Unknown", (Record,), {"__annotations__": {"field": hint}, "__module__": __name__})
    try:
        kind = record(255)(unknown)
        with pytest.raises(TypeError, match="a record field cannot be"):
            kind(1)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="a record field cannot be"):
            from_wire([255, 1], Frames([]))
    finally:
        del RECORDS[255]


def test_no_kind_has_a_field_of_an_unknown_type() -> None:
    for kind in RECORDS.values():
        _compile(kind)


def test_a_record_that_is_read_before_any_is_built_is_what_it_is_built_as() -> None:
    class Pair(Record):
        left: Count
        right: str = "r"

    try:
        kind = record(255)(Pair)
        read = from_wire([255, 1, "r"], Frames([]))
        assert read == kind(1) == kind(left=1)  # type: ignore[call-arg]
        assert read != kind(2)  # type: ignore[call-arg]
        assert hash(read) == hash(kind(1, "r"))  # type: ignore[call-arg]
        assert repr(read).endswith("Pair(left=1, right='r')")
        with pytest.raises(LocalProtocolError, match="Pair has 2 fields, not 1"):
            from_wire([255, 1], Frames([]))
    finally:
        del RECORDS[255]


def test_frames_are_equal_when_their_bytes_are_and_show_only_their_size() -> None:
    assert Frame(b"abc") == Frame(bytearray(b"abc")) == Frame(memoryview(b"abc"))
    assert Frame(b"abc") != Frame(b"abd")
    assert Frame(b"abc") != b"abc"
    assert len({Frame(b"abc"), Frame(bytearray(b"abc"))}) == 1
    assert repr(Frame(b"secret")) == "<6 bytes>"


@pytest.mark.parametrize("length", [10, 100_000])
def test_what_an_error_shows_is_short_whatever_its_size_and_depth(length: int) -> None:
    deep: object = "x" * length
    for _ in range(length):
        deep = [deep, *[0] * 20]
    assert len(shown(deep)) < 500
    assert len(shown("x" * length)) < 100
