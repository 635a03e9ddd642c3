"""Nests are walked as tf.nest walks them."""

from collections import OrderedDict, defaultdict, namedtuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from central_storage import nest
from central_storage.core.values import IndexedSlices, PerReplica
from cs_proto.errors import InvalidArgumentError

Point = namedtuple("Point", ["x", "y"])
NESTS = st.recursive(
    st.integers() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Point, inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict)
    ),
)


@pytest.mark.parametrize(
    ("structure", "leaves"),
    [
        (3, [3]),
        (None, [None]),
        ([], []),
        ([1, (2, [3, None])], [1, 2, 3, None]),
        ({"b": 1, "a": {"d": 2, "c": 3}}, [3, 2, 1]),
        (OrderedDict([("b", 1), ("a", [2, 3])]), [2, 3, 1]),
        (defaultdict(list, b=1, a=2), [2, 1]),
        (Point(y=1, x=2), [2, 1]),
        ("text", ["text"]),
    ],
)
def test_flatten_sorts_the_keys_of_every_dict(structure, leaves):
    assert nest.flatten(structure) == leaves


def test_distributed_and_sparse_values_are_leaves():
    both = [PerReplica([1, 2]), IndexedSlices([[1.0]], [0], [3, 1])]
    assert nest.flatten({"a": both}) == both


@given(NESTS)
def test_pack_undoes_flatten(structure):
    again = nest.pack_sequence_as(structure, nest.flatten(structure))
    assert again == structure
    assert type(again) is type(structure)


def test_pack_keeps_the_order_of_an_ordered_dict():
    packed = nest.pack_sequence_as(OrderedDict([("b", 0), ("a", 0)]), [1, 2])
    assert list(packed.items()) == [("b", 2), ("a", 1)]


@pytest.mark.parametrize(
    ("structure", "flat", "error"),
    [([1, 2], [1], InvalidArgumentError), (1, [], ValueError), ([1], 3, TypeError), ([1], "x", TypeError)],
)
def test_pack_of_what_does_not_fit(structure, flat, error):
    with pytest.raises(error):
        nest.pack_sequence_as(structure, flat)


def test_map_structure():
    assert nest.map_structure(lambda x: x + 1, {"a": [1, 2]}) == {"a": [2, 3]}
    pair = nest.map_structure(lambda a, b: a - b, Point(5, (7,)), Point(1, (2,)))
    assert pair == Point(4, (5,))
    assert nest.map_structure(lambda a, b: a + b, [1, 2], (3, 4), check_types=False) == [4, 6]
    with pytest.raises(TypeError):
        nest.map_structure(3, [1])
    with pytest.raises(ValueError):
        nest.map_structure(lambda: 0)
    with pytest.raises(ValueError, match="length"):
        nest.map_structure(lambda a, b: a, [1], [1, 2])


@pytest.mark.parametrize(
    ("one", "other", "error"),
    [
        ([1], [1, 2], ValueError),
        ({"a": 1}, {"b": 1}, ValueError),
        ([1], 1, ValueError),
        ([[1]], [1], ValueError),
        ([1], (1,), TypeError),
        ((1, 2), Point(1, 2), TypeError),
        ({"a": 1}, [1], TypeError),
    ],
)
def test_different_structures(one, other, error):
    with pytest.raises(error):
        nest.assert_same_structure(one, other)


def test_same_structures():
    nest.assert_same_structure({"a": [1, None]}, {"a": [2, "x"]})
    nest.assert_same_structure({"a": 1}, OrderedDict(a=2))
    nest.assert_same_structure(Point(1, 2), namedtuple("Point", ["x", "y"])(3, 4))
    nest.assert_same_structure([1, (2,)], ((1, [2])), check_types=False)
