"""What every data set has: its elements, its options, and the names that it does not have."""

import copy
import pickle

import cloudpickle
import numpy as np
import pytest

import central_storage as cs
from central_storage.data.dataset import Dataset
from central_storage.data.options import Options
from cs_proto.errors import InvalidArgumentError


class TestReduce:
    def test_a_nest_as_state(self):
        def step(state, element):
            count, total = state
            return [count + np.int32(1), total + element["x"]]  # a list is a tuple, as in map

        data = Dataset.from_tensor_slices({"x": np.float32([1, 2, 3.5])})
        count, total = data.reduce((0, 0.0), step)
        assert (count, total, total.dtype) == (3, 6.5, np.float32)

    def test_a_tuple_is_one_argument(self):
        pairs = Dataset.zip(Dataset.range(3), Dataset.range(3))
        assert pairs.reduce(np.int64(0), lambda state, pair: state + pair[0] * pair[1]) == 5

    def test_no_element_and_a_shape_that_grows(self):
        assert Dataset.range(0).reduce(7, lambda state, x: state).dtype == np.int32
        grown = Dataset.range(3).reduce(np.zeros(0, np.int64), lambda state, x: np.append(state, x))
        assert grown.tolist() == [0, 1, 2]

    @pytest.mark.parametrize(
        ("initial", "function", "said"),
        [
            (0, lambda state, x: state + x, r"keep its dtype, int32, .* such as np\.int64\(0\)"),
            ((0, 0), lambda state, x: state[0], "keep its structure"),
            ([0, 0], lambda state, x: [state[0], state[1]], "a list as initial_state is one array"),
        ],
    )
    def test_a_state_that_changes_its_kind(self, initial, function, said):
        with pytest.raises(TypeError, match=said):
            Dataset.range(2).reduce(initial, function)


def test_one_element():
    assert Dataset.range(4).batch(4).get_single_element().tolist() == [0, 1, 2, 3]
    for count, said in ((0, "none"), (2, "more")):
        with pytest.raises(InvalidArgumentError, match=said):
            Dataset.range(count).get_single_element()


def test_take_while_ends_at_the_first_false():
    data = Dataset.range(9).map(lambda x: (x * 3) % 5).take_while(lambda x: x != 4)
    assert [int(x) for x in data] == [0, 3, 1]
    assert data.cardinality() == cs.data.UNKNOWN_CARDINALITY


def test_options_travel_with_the_data_set():
    one, other = Options(), Options()
    one.deterministic, other.deterministic = True, False
    other.threading.private_threadpool_size = 4
    data = Dataset.range(6).with_options(one).batch(2).map(lambda x: x).shuffle(2)
    assert data.options().deterministic is True
    later = data.with_options(other)
    one.deterministic = None  # the data set has a copy
    assert (data.options().deterministic, later.options().deterministic) == (True, False)
    assert later.options().threading.private_threadpool_size == 4
    assert later.with_options(Options()).options() == later.options()
    assert Dataset.zip(Dataset.range(2), later).options() == later.options()
    assert [x.tolist() for x in Dataset.range(4).with_options(other).batch(2)] == [[0, 1], [2, 3]]


def test_a_method_that_grain_has():
    data = Dataset.range(3)
    for name in ("interleave", "window", "padded_batch"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; use instead: grain"):
            getattr(data, name)
    with pytest.raises(AttributeError, match=r"no attribute 'no_such_name'$"):
        _ = data.no_such_name
    assert not hasattr(data, "flat_map")
    for reader in ("TFRecordDataset", "TextLineDataset"):
        with pytest.raises(AttributeError, match="use instead: grain"):
            getattr(cs.data, reader)


def test_no_attribute_is_invented():
    with pytest.raises(AttributeError):
        Dataset.range(3).batch_size = 3


def test_a_data_set_is_copied_and_sent():
    for again in (copy.deepcopy, lambda data: pickle.loads(cloudpickle.dumps(data))):
        assert [int(x) for x in again(Dataset.range(3).skip(1))] == [1, 2]
