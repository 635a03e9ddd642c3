"""Many values in a few requests: in which order, in which parts, and with which bytes in between."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from central_storage.controller import bulk_values
from central_storage.controller.bulk_values import Sent, image, in_parts
from central_storage.core.backends import Column
from cs_proto.memory_plan import room_of

KINDS = [(0, "", "float32"), (0, "", "float64"), (2, "m", "float32"), (2, "v", "float32"), (7, "m", "float32")]
SHAPES = [(), (16,), (3,), (0, 2), (4, 8)]


def values_in(sent: Sent) -> list[tuple[int, bytes]]:
    """The numbers and the bytes in an image, whose other bytes are zeros."""
    data, at, found = image(sent).tobytes(), 0, []
    for number, nbytes in zip(sent.numbers, sent.nbytes, strict=True):
        found.append((number, data[at : at + nbytes]))
        assert not any(data[at + nbytes : at + room_of(nbytes)])
        at += room_of(nbytes)
    assert at == len(data)
    return found


@given(
    given_columns=st.lists(
        st.tuples(st.sampled_from(KINDS), st.lists(st.tuples(st.integers(1, 30), st.sampled_from(SHAPES)), min_size=1)),
        max_size=6,
    ),
    limits=st.sampled_from([(1 << 20, 1 << 16, 1 << 12, 1 << 20), (256, 5, 3, 128), (64, 1, 1, 64)]),
)
def test_values_come_whole_and_in_order(
    given_columns: list[tuple[tuple[int, str, str], list[tuple[int, tuple[int, ...]]]]],
    limits: tuple[int, int, int, int],
) -> None:
    expected: dict[tuple[int, str, str], dict[int, bytes]] = {}
    columns: list[tuple[Column, memoryview]] = []
    count = itertools.count(1)
    for (optimizer, slot, dtype), asked in given_columns:
        known = expected.setdefault((optimizer, slot, dtype), {})
        column, data = Column(optimizer, slot, dtype), b""
        for number, shape in asked:
            if number not in known:
                known[number] = np.full(shape, next(count), dtype).tobytes()
                column.numbers.append(number)
                column.shapes.append(shape)
                data += known[number]
        if column.numbers:
            columns.append((column, memoryview(data)))
    with pytest.MonkeyPatch.context() as patched:
        for name, limit in zip(("_SENT_NBYTES", "_SENT_VALUES", "_CUT_VALUES", "LARGE_NBYTES"), limits, strict=True):
            patched.setattr(bulk_values, name, limit)
        parts = list(in_parts(columns))
    found: dict[tuple[int, str], list[list[tuple[int, bytes]]]] = {}
    for part in parts:
        assert all(sent.numbers for sent in part)
        rooms = [room_of(nbytes) for sent in part for nbytes in sent.nbytes]
        assert part
        assert len(part) == 1 or (sum(rooms) <= limits[0] and len(rooms) <= limits[1])
        for sent in part:
            found.setdefault((sent.optimizer, sent.slot), []).append(values_in(sent))
    assert list(found) == sorted(found)
    for (optimizer, slot), sents in found.items():
        wanted = [known for (*kind, _), known in expected.items() if kind == [optimizer, slot]]
        got = [value for sent in sents for value in sent]
        assert sorted(got) == sorted(value for known in wanted for value in known.items())
        if len(wanted) == 1:
            assert got == sorted(got)


def test_what_lies_side_by_side_is_not_copied() -> None:
    data = np.arange(64, dtype=np.float32)
    column = Column(0, "", "float32", [3, 4], [(2, 16), (32,)])
    [[sent]] = in_parts([(column, data.view(np.uint8).data)])
    assert np.shares_memory(image(sent), data)


def test_as_much_as_one_request_may_have_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_values, "_SENT_NBYTES", 128)
    column = Column(0, "", "float32", [1, 2], [(16,), (9,)])
    data = memoryview(bytes(100))
    assert len(list(in_parts([(column, data)]))) == 1
    more = (Column(0, "", "float32", [3], [()]), memoryview(bytes(4)))
    assert [[sent.numbers for sent in part] for part in in_parts([(column, data), more])] == [[[1, 2]], [[3]]]
