"""Arguments that are pickled again and again arrive as those of :func:`dump_arguments` do, whatever changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from central_storage.core.tensors.tensor import as_tensor
from central_storage.pickling import repeated
from central_storage.pickling.pickler import are_plain, dump_arguments, load_arguments
from central_storage.pickling.repeated import ArgumentsPickler
from cs_proto.arrays import INLINE_NBYTES
from cs_proto.errors import ShippingError

Given = tuple[tuple[Any, ...], dict[str, Any]]


def refuse(handle: object) -> tuple[str, int]:
    raise AssertionError(handle)


def in_place(data: memoryview) -> memoryview:
    return data


def loaded(dumped: tuple[bytes, tuple[memoryview, ...]]) -> Given:
    return load_arguments(*dumped, lambda kind, number: None)


def shown(value: Any) -> Any:
    """A value with everything that a replica function can see of it."""
    if isinstance(value, np.ndarray):
        return type(value), value.dtype, value.shape, value.strides, value.flags.writeable, value.tobytes()
    if isinstance(value, dict):
        return dict, [(key, shown(each)) for key, each in value.items()]
    if isinstance(value, tuple | list):
        return type(value), [shown(each) for each in value]
    return type(value), repr(value)


def arrays() -> st.SearchStrategy[np.ndarray]:
    shapes = st.sampled_from([(), (1,), (3,), (2, 3), (0, 2), (300,)])
    dtypes = st.sampled_from(["?", "u1", "f4", "f8", "i8", "c16", ">f4", "U2", "M8[s]"])
    made = st.builds(
        lambda shape, dtype, seed: np.full(shape, seed, "i8").astype(dtype), shapes, dtypes, st.integers(0, 1)
    )
    changes: list[Callable[[np.ndarray], Any]] = [
        lambda a: a,
        as_tensor,
        lambda a: a.T,
        lambda a: a[::2] if a.shape else a,
    ]
    return st.builds(lambda array, change: change(array), made, st.sampled_from(changes))


def values() -> st.SearchStrategy[Any]:
    constants = st.sampled_from([None, True, False, 0, 1, 1.0, 0.0, -0.0, math.nan, "", "a", b"a", 1 << 70])
    leaves = arrays() | constants
    return st.recursive(
        leaves,
        lambda each: (
            st.lists(each, max_size=3)
            | st.tuples(each, each)
            | st.lists(each, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from(["x", "y", 1, (2, 3)]), each, max_size=3)
        ),
        max_leaves=5,
    )


@given(st.lists(st.tuples(st.lists(values(), max_size=2).map(tuple), st.dictionaries(st.sampled_from("kl"), values()))))
def test_all_arguments_arrive_as_they_do_at_first(said: list[Given]) -> None:
    pickler = ArgumentsPickler()
    for _ in range(2):
        for arguments, dumped in zip(said, pickler.dump(said, refuse), strict=True):
            assert shown(loaded(dumped)) == shown(loaded(dump_arguments(*arguments, refuse, in_place)))
            assert are_plain(dumped[0])


def is_repeated(first: Given, second: Given, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the second arguments are not pickled. Asserts that they arrive."""
    pickler, pickled = ArgumentsPickler(), []
    dump = dump_arguments

    def spy(*of: Any) -> Any:
        pickled.append(of)
        return dump(*of)

    with monkeypatch.context() as patched:
        patched.setattr(repeated, "dump_arguments", spy)
        pickler.dump([first], refuse)
        [dumped] = pickler.dump([second], refuse)
    assert shown(loaded(dumped)) == shown(loaded(dump(*second, refuse, in_place)))
    return len(pickled) == 1


ONE, OTHER = np.arange(6, dtype=np.float32), np.ones(6, np.float32)
TWICE = np.arange(6)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (((ONE,), {}), ((OTHER,), {}), True),
        ((((ONE, TWICE), 3), {"rate": 0.5}), (((OTHER, TWICE + 1), 3), {"rate": 0.5}), True),
        ((({"x": ONE, "y": [TWICE]},), {}), (({"x": OTHER, "y": [TWICE]},), {}), False),  # two that may be one
        ((({"x": ONE, "y": (TWICE,)},), {}), (({"x": OTHER, "y": (TWICE,)},), {}), True),
        ((({"x": ONE, "y": TWICE},), {}), (({"y": TWICE, "x": ONE},), {}), False),
        ((((ONE, OTHER), TWICE), {}), ((ONE, (OTHER, TWICE)), {}), False),
        ((((ONE,), OTHER, TWICE), {}), (((ONE, OTHER), TWICE), {}), False),
        (((ONE,), {}), ((ONE, OTHER), {}), False),
        (((ONE, OTHER), {}), ((ONE,), {}), False),
        (((ONE, OTHER), {}), ((ONE, ONE), {}), False),
        (((ONE,), {}), ((as_tensor(ONE),), {}), False),
        (((ONE,), {}), ((ONE.astype(np.float64),), {}), False),
        (((ONE,), {}), ((ONE[:5],), {}), False),
        (((ONE,), {}), ((np.arange(12, dtype=np.float32)[::2],), {}), False),
        (((ONE, 0.0), {}), ((ONE, -0.0), {}), False),
        (((ONE, True), {}), ((ONE, 1), {}), False),
        (((ONE,), {"training": True}), ((ONE,), {"training": False}), False),
        (((ONE,), {"a": 1}), ((ONE,), {}), False),
        (((ONE, "long" * INLINE_NBYTES), {}), ((ONE, "long" * INLINE_NBYTES), {}), False),
        (((np.zeros(INLINE_NBYTES),), {}), ((np.zeros(INLINE_NBYTES),), {}), False),
        ((((ONE,) * 100,), {}), (((ONE,) * 100,), {}), False),
    ],
)
def test_only_what_differs_in_the_values_of_arrays_alone_is_not_pickled(
    first: Given, second: Given, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_repeated(first, second, monkeypatch) is expected


def test_what_is_one_object_arrives_as_one_object() -> None:
    pickler, one = ArgumentsPickler(), [ONE]
    pickler.dump([(([ONE], [ONE]), {}), ((ONE, OTHER), {})], refuse)
    first, second = map(loaded, pickler.dump([((one, one), {}), ((ONE, ONE), {})], refuse))
    assert first[0][0] is first[0][1]
    assert second[0][0] is second[0][1]


def test_arguments_are_those_of_the_call() -> None:
    pickler, batch = ArgumentsPickler(), np.zeros(4)
    sent = []
    for number in range(3):
        batch[:] = number
        sent += pickler.dump([((batch,), {})], refuse)
    assert [loaded(each)[0][0].tolist() for each in sent] == [[0.0] * 4, [1.0] * 4, [2.0] * 4]


def test_a_list_that_contains_itself_is_pickled() -> None:
    pickler, endless = ArgumentsPickler(), [ONE]
    endless.append(endless)  # type: ignore[arg-type]
    for _ in range(2):
        [dumped] = pickler.dump([((endless,), {})], refuse)
        ((arrived,), _) = loaded(dumped)
        assert arrived[1] is arrived


def test_what_cannot_be_sent_is_refused_also_among_known_arguments() -> None:
    pickler = ArgumentsPickler()
    pickler.dump([((ONE, None), {})], refuse)
    with pytest.raises(ShippingError):
        pickler.dump([((ONE, (each for each in ())), {})], refuse)


def test_numbers_that_always_change_make_few_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    pattern_of = repeated._pattern_of

    def spy(*of: Any) -> Any:
        made.append(of)
        return pattern_of(*of)

    monkeypatch.setattr(repeated, "_pattern_of", spy)
    pickler = ArgumentsPickler()
    for number in range(200):
        pickler.dump([((ONE, number), {}), ((OTHER, number), {})], refuse)
    assert len(made) == 11
    assert len(pickler._patterns) == 1
    for _ in range(200):  # and arguments that are repeated afterwards have one
        pickler.dump([((OTHER, -1), {})], refuse)
    assert len(made) == 12
