"""Data sets: what their elements are, in which order, and what is refused."""

import itertools
import threading
from collections import UserDict, namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from central_storage.data.dataset import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Dataset, numpy_dataset
from central_storage.data.element_spec import PerReplicaSpec, TensorSpec, joined
from central_storage.data.options import Options
from cs_proto.errors import InvalidArgumentError

INT64 = np.dtype(np.int64)


def listed(dataset):
    """The elements as plain lists and numbers."""
    return [plain(element) for element in dataset]


def plain(element):
    if isinstance(element, dict):
        return {key: plain(value) for key, value in element.items()}
    return tuple(map(plain, element)) if isinstance(element, tuple) else element.tolist()


def numbers(n):
    """``n`` scalars that do not come from a table of rows."""
    return Dataset.from_generator(lambda: iter(np.arange(n)))


class TestBeginnings:
    def test_slices_of_a_nest(self):
        dataset = Dataset.from_tensor_slices({"x": np.float32([[1, 2], [3, 4]]), "y": ([5, 6], ["a", "b"])})
        assert listed(dataset) == [{"x": [1, 2], "y": (5, "a")}, {"x": [3, 4], "y": (6, "b")}]
        assert dataset.cardinality() == 2
        assert dataset.element_spec == {
            "x": TensorSpec((2,), np.float32),
            "y": (TensorSpec((), np.int32), TensorSpec((), "U1")),
        }

    def test_a_list_is_stacked(self):
        assert listed(Dataset.from_tensor_slices([np.array([0, 1]), np.array([2, 3])])) == [[0, 1], [2, 3]]
        assert listed(Dataset.from_tensors([1, 2])) == [[1, 2]]

    @pytest.mark.parametrize("value", [3, np.zeros(()), (), (np.zeros(2), np.zeros(3)), None, [[1], [2, 3]]])
    def test_slices_of_what_has_no_rows(self, value):
        with pytest.raises(InvalidArgumentError):
            Dataset.from_tensor_slices(value)

    def test_tensors(self):
        dataset = Dataset.from_tensors((np.zeros((2, 3)), 1.5))
        (element,) = dataset
        assert [part.shape for part in element] == [(2, 3), ()]
        assert dataset.element_spec == (TensorSpec((2, 3), np.float64), TensorSpec((), np.float32))

    def test_range(self):
        assert listed(Dataset.range(3)) == [0, 1, 2]
        assert listed(Dataset.range(5, -6, -5)) == [5, 0, -5]
        assert listed(Dataset.range(-3, 3).batch(4)) == [[-3, -2, -1, 0], [1, 2]]
        assert listed(Dataset.range(0, 9, 2).batch(3)) == [[0, 2, 4], [6, 8]]
        assert next(iter(Dataset.range(10**12).batch(2))).dtype == INT64
        assert Dataset.range(3).element_spec == TensorSpec((), INT64)
        for wrong in ((0, 1, 0), (10**30,)):
            with pytest.raises(InvalidArgumentError):
                Dataset.range(*wrong)
        with pytest.raises(TypeError):
            Dataset.range(1.5)

    def test_generator_is_called_for_every_iteration(self):
        dataset = Dataset.from_generator(lambda n: ((i, [i, i]) for i in range(n)), args=(2,))
        assert listed(dataset) == listed(dataset) == [(0, [0, 0]), (1, [1, 1])]
        assert dataset.cardinality() == UNKNOWN_CARDINALITY
        assert dataset.element_spec == (TensorSpec((), np.int32), TensorSpec((None,), np.int32))

    def test_a_generator_that_fills_one_array_again_and_again(self):
        def make():
            array = np.empty(2, np.int64)
            for number in range(4):
                array[:] = number
                yield array, number

        signature = (TensorSpec((2,), np.int64), TensorSpec((), np.int64))
        for dataset in (Dataset.from_generator(make), Dataset.from_generator(make, output_signature=signature)):
            (four, numbers) = next(iter(dataset.batch(4)))
            assert four.tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
            assert numbers.tolist() == [0, 1, 2, 3]
            assert [a.tolist() for a, _ in dataset.prefetch(3)] == four.tolist()

    def test_generator_with_a_signature(self):
        def make():
            yield 1, [1.0]
            yield 2, [2.0, 3.0]

        signature = (TensorSpec((), np.float64), TensorSpec([None], np.float32))
        for dataset in (
            Dataset.from_generator(make, output_signature=signature),
            Dataset.from_generator(make, (np.float64, np.float32), ([], [None])),
        ):
            assert dataset.element_spec == signature
            assert [(a.dtype, b.dtype) for a, b in dataset] == [(np.float64, np.float32)] * 2

    @pytest.mark.parametrize(
        "signature", [TensorSpec((), np.int32), (TensorSpec((1,), np.int32),) * 2, (TensorSpec((), np.int32),)]
    )
    def test_elements_that_break_the_signature(self, signature):
        with pytest.raises(InvalidArgumentError):
            list(Dataset.from_generator(lambda: [(1, 2)], output_signature=signature))

    def test_generators_that_are_none(self):
        for arguments in ([3], [iter, None, ()], [iter, np.int32, None, None, TensorSpec(())]):
            with pytest.raises(TypeError):
                Dataset.from_generator(*arguments)
        with pytest.raises(TypeError):
            Dataset.from_generator(iter, output_signature=3)
        with pytest.raises(TypeError, match="must return an iterable"):
            list(Dataset.from_generator(lambda: 3))
        with pytest.raises(InvalidArgumentError, match="output_signature"):
            _ = Dataset.from_generator(list).element_spec

    @pytest.mark.parametrize("make", [Dataset.range, numbers], ids=["table", "elements"])
    def test_zip(self, make):
        a, b = make(3), make(5).skip(1)
        assert listed(Dataset.zip(a, b)) == listed(Dataset.zip((a, b))) == [(0, 1), (1, 2), (2, 3)]
        assert listed(Dataset.zip({"x": a}).take(1)) == [{"x": 0}]
        for wrong in ([], [[a, b]], [3], [a, 3]):
            with pytest.raises(TypeError):
                Dataset.zip(*wrong)

    def test_zip_of_slices_still_picks_rows(self):
        x, y = np.arange(10), np.arange(10, 30)
        dataset = Dataset.zip(Dataset.from_tensor_slices(x), Dataset.from_tensor_slices(y))
        assert dataset.cardinality() == 10
        one, two = next(iter(dataset.batch(4)))
        assert np.shares_memory(one, x)
        assert np.shares_memory(two, y)
        assert [(a == b - 10).all() for a, b in dataset.shuffle(10, seed=3).batch(5)] == [True, True]

    def test_made_in_no_other_way(self):
        with pytest.raises(TypeError, match="from_tensor_slices"):
            Dataset([1, 2])


@pytest.mark.parametrize("make", [Dataset.range, numbers], ids=["table", "elements"])
class TestStages:
    """Everything gives the same whether rows are picked or elements pass through."""

    def test_picking(self, make):
        d = make(5)
        assert listed(d.take(2)) == [0, 1]
        assert listed(d.take(-1)) == [0, 1, 2, 3, 4]
        assert listed(d.take(9)) == [0, 1, 2, 3, 4]
        assert listed(d.skip(3)) == [3, 4]
        assert listed(d.skip(-1)) == listed(d.skip(9)) == []
        assert listed(d.shard(2, 1)) == [1, 3]
        assert listed(make(2).repeat(2)) == listed(make(2).repeat().take(4)) == [0, 1, 0, 1]
        assert listed(d.repeat(0)) == listed(make(0).repeat()) == []
        assert listed(make(1).concatenate(make(2))) == [0, 0, 1]
        assert listed(d.filter(lambda x: x % 2 == 1)) == [1, 3]

    def test_batches(self, make):
        assert listed(make(5).batch(2)) == [[0, 1], [2, 3], [4]]
        assert listed(make(5).batch(2, drop_remainder=True)) == [[0, 1], [2, 3]]
        assert listed(make(8).batch(2).batch(2)) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        assert listed(make(3).batch(2).repeat(2)) == [[0, 1], [2]] * 2
        assert listed(make(3).repeat(2).batch(4)) == [[0, 1, 2, 0], [1, 2]]
        assert listed(make(5).batch(2).unbatch()) == [0, 1, 2, 3, 4]
        assert listed(make(0).batch(2)) == []
        assert make(5).batch(2).element_spec == TensorSpec((None,), INT64)
        assert make(5).batch(2, True).element_spec == TensorSpec((2,), INT64)
        assert make(5).batch(2, True).unbatch().element_spec == TensorSpec((), INT64)
        assert make(5).batch(2, True).map(lambda x: x + 1).element_spec == TensorSpec((2,), INT64)

    def test_new_elements(self, make):
        d = make(3)
        assert listed(d.map(lambda x: x * 2)) == [0, 2, 4]
        assert listed(d.map(lambda x: (x, [x, 1.0]))) == [(0, [0, 1]), (1, [1, 1]), (2, [2, 1])]
        assert listed(d.enumerate(5).map(lambda i, x: i * x)) == [0, 6, 14]
        assert listed(d.enumerate()) == [(0, 0), (1, 1), (2, 2)]
        spec = d.batch(2).map(lambda x: {"a": x / 2, "b": np.ones(3, bool)}).element_spec
        assert spec == {"a": TensorSpec((None,), np.float64), "b": TensorSpec((None,), bool)}
        assert d.enumerate().element_spec == (TensorSpec((), INT64),) * 2

    def test_shuffle_is_a_permutation_that_the_seed_decides(self, make):
        d = make(50).shuffle(50, seed=7)
        one, two = listed(d), listed(d)
        assert sorted(one) == sorted(two) == list(range(50))
        assert one != two
        again = make(50).shuffle(50, seed=7)
        assert (listed(again), listed(again)) == (one, two)
        assert listed(make(50).shuffle(50, seed=8)) != one
        steady = make(50).shuffle(50, seed=7, reshuffle_each_iteration=False)
        assert listed(steady) == listed(steady) == one
        assert listed(make(50).shuffle(50, seed=7, reshuffle_each_iteration=None).repeat(2)) == one + two
        epochs = listed(make(50).shuffle(50, seed=7).repeat(2))
        assert epochs == one + two

    def test_shuffle_draws_from_its_buffer(self, make):
        order = listed(make(2000).shuffle(10, seed=1))
        assert sorted(order) == list(range(2000))
        # The k-th element is drawn when rows 0 … k + 9 have been seen.
        assert all(element <= place + 9 for place, element in enumerate(order))
        assert any(element < place - 9 for place, element in enumerate(order))
        assert listed(make(5).shuffle(1, seed=1)) == [0, 1, 2, 3, 4]

    def test_shuffle_without_a_seed_follows_numpys(self, make):
        np.random.seed(3)
        one = listed(make(30).shuffle(30))
        np.random.seed(3)
        assert listed(make(30).shuffle(30)) == one

    def test_batches_of_a_shuffle_hold_its_elements_in_order(self, make):
        def shuffled():
            return make(40).shuffle(7, seed=5)

        assert listed(shuffled().batch(6).unbatch()) == listed(shuffled())

    def test_element_spec_does_not_disturb_the_order(self, make):
        d = make(20).shuffle(20, seed=1).map(lambda x: x)
        _ = d.element_spec
        assert listed(d) == listed(make(20).shuffle(20, seed=1))

    def test_cache_freezes_the_order_of_the_first_whole_iteration(self, make):
        d = make(20).shuffle(20, seed=1).cache()
        next(iter(d))
        first = listed(d)
        assert listed(d) == listed(d.batch(20).unbatch()) == first

    def test_prefetch(self, make):
        d = make(5).map(lambda x: x + 1)
        assert listed(d.prefetch(2)) == listed(d.prefetch(AUTOTUNE)) == listed(d.prefetch(0)) == [1, 2, 3, 4, 5]
        assert d.prefetch(1).element_spec == d.element_spec


def test_cache_computes_once():
    calls = []
    d = Dataset.range(3).map(lambda x: calls.append(x) or x).cache()
    assert listed(d) == listed(d) == [0, 1, 2]
    assert len(calls) == 3


def test_prefetch_computes_ahead_in_a_thread_that_ends():
    seen, fourth = [], threading.Event()

    def note(x):
        seen.append(threading.current_thread().name)
        if x == 3:
            fourth.set()
        return x

    before = threading.active_count()
    iterator = iter(Dataset.range(100).map(note).prefetch(3))
    assert next(iterator) == 0
    assert fourth.wait(10)
    iterator.close()
    assert threading.active_count() == before
    assert all(name == "cs-read-ahead" for name in seen)
    assert len(seen) <= 5


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: d.prefetch(3)])
def test_an_exception_comes_out_at_its_element(wrap):
    iterator = iter(wrap(Dataset.range(4).map(lambda x: 6 // (2 - int(x)))))
    assert [next(iterator), next(iterator)] == [3, 6]
    with pytest.raises(ZeroDivisionError):
        next(iterator)


@pytest.mark.parametrize(
    ("dataset", "count"),
    [
        (Dataset.range(7).batch(2), 4),
        (Dataset.range(7).batch(2, True), 3),
        (Dataset.range(7).take(3).repeat(2), 6),
        (Dataset.range(7).skip(9), 0),
        (Dataset.range(7).shard(3, 1), 2),
        (Dataset.range(7).repeat(), INFINITE_CARDINALITY),
        (Dataset.range(0).repeat(), 0),
        (Dataset.range(7).repeat().skip(3).batch(2), INFINITE_CARDINALITY),
        (Dataset.range(7).repeat().take(3), 3),
        (Dataset.range(7).concatenate(Dataset.range(2)), 9),
        (Dataset.range(7).concatenate(Dataset.range(2).repeat()), INFINITE_CARDINALITY),
        (Dataset.range(7).concatenate(numbers(2)), UNKNOWN_CARDINALITY),
        (Dataset.range(7).filter(lambda x: x > 0), UNKNOWN_CARDINALITY),
        (Dataset.zip(Dataset.range(7), Dataset.range(3).repeat()), 7),
        (Dataset.zip(Dataset.range(7), numbers(3)), UNKNOWN_CARDINALITY),
        (numbers(7).repeat(), UNKNOWN_CARDINALITY),
        (numbers(7).take(3), UNKNOWN_CARDINALITY),
        (numbers(7).take(0), 0),
        (Dataset.range(7).map(lambda x: x).enumerate().shuffle(3).cache().prefetch(1), 7),
    ],
)
def test_cardinality(dataset, count):
    assert dataset.cardinality() == count
    if count >= 0:
        assert len(list(dataset)) == count


@pytest.mark.parametrize(
    ("method", "arguments", "error"),
    [
        ("batch", (0,), ValueError),
        ("batch", (2.0,), TypeError),
        ("take", (-2,), ValueError),
        ("skip", ("1",), TypeError),
        ("shard", (0, 0), ValueError),
        ("shard", (2, 2), ValueError),
        ("shard", (2, -1), ValueError),
        ("repeat", (-2,), ValueError),
        ("shuffle", (0,), ValueError),
        ("shuffle", (3, -1), ValueError),
        ("prefetch", (-2,), ValueError),
        ("map", (3,), TypeError),
        ("filter", (None,), TypeError),
        ("enumerate", (0.5,), TypeError),
        ("concatenate", ([1],), TypeError),
        ("concatenate", (Dataset.from_tensors(1.0),), TypeError),
        ("concatenate", (Dataset.from_tensors((1, 2)),), TypeError),
        ("batch", (2, 1), TypeError),
        ("batch", (2, False, 0), ValueError),
        ("batch", (2, False, "many"), TypeError),
        ("batch", (2, False, None, "yes"), TypeError),
        ("map", (abs, True), TypeError),
        ("map", (abs, None, 1), TypeError),
        ("map", (abs, -2), ValueError),
        ("shuffle", (2, 1, "no"), TypeError),
        ("cache", ("/tmp/rows",), ValueError),
        ("cache", (3,), TypeError),
        ("take_while", (3,), TypeError),
        ("apply", (3,), TypeError),
        ("apply", (list,), TypeError),
        ("with_options", ({"deterministic": True},), TypeError),
        ("reduce", (0, 0), TypeError),
        ("range", (300,), ValueError),
    ],
)
def test_wrong_arguments(method, arguments, error):
    with pytest.raises(error):
        getattr(Dataset.range(3), method)(*arguments, **({"output_type": np.uint8} if method == "range" else {}))


NAMED = {
    "take": (1,),
    "skip": (1,),
    "shard": (2, 0),
    "repeat": (2,),
    "shuffle": (2,),
    "cache": (),
    "prefetch": (AUTOTUNE,),
    "concatenate": (Dataset.range(2),),
    "filter": (lambda x: x > 0,),
    "take_while": (lambda x: x < 2,),
    "with_options": (Options(),),
    "map": (lambda x: x,),
    "enumerate": (),
    "batch": (2,),
    "reduce": (np.int64(0), lambda total, x: total + x),
    "cardinality": (),
    "from_tensors": (1,),
    "from_tensor_slices": ([1],),
    "range": (2,),
    "from_generator": (lambda: iter([1]),),
    "zip": (Dataset.range(2), Dataset.range(2)),
}


@pytest.mark.parametrize("method", NAMED)
def test_every_method_that_has_a_name_in_tensorflow_takes_one(method):
    """The keywords change nothing, and one of another type is refused."""
    data = Dataset.range(3)
    assert getattr(data, method)(*NAMED[method], name="stage") is not None
    with pytest.raises(TypeError, match=f"{method}: name must be a str"):
        getattr(data, method)(*NAMED[method], name=3)
    if method in ("map", "batch"):
        with_all = getattr(data, method)(*NAMED[method], num_parallel_calls=AUTOTUNE, deterministic=False, name="stage")
        assert listed(with_all) == listed(getattr(data, method)(*NAMED[method], num_parallel_calls=4))


Point = namedtuple("Point", "x y")


class TestListsTuplesAndDicts:
    """Where TensorFlow takes a list for components, and where for one array."""

    def test_a_list_that_map_returns_is_a_tuple_of_components(self):
        data = Dataset.range(2).map(lambda x: [x, x + 10])
        assert listed(data) == [(0, 10), (1, 11)]
        assert data.element_spec == (TensorSpec((), INT64), TensorSpec((), INT64))
        assert listed(data.map(lambda a, b: a + b)) == [10, 12]  # so it is spread over the arguments
        unlike = Dataset.range(1).map(lambda x: [np.zeros(2), np.zeros((3, 3)), "text"])
        assert [part.shape for part in next(iter(unlike))] == [(2,), (3, 3), ()]
        assert listed(data.batch(2)) == [([0, 1], [10, 11])]

    def test_a_list_inside_is_one_array(self):
        assert listed(Dataset.range(1).map(lambda x: {"a": [x, 5]})) == [{"a": [0, 5]}]
        assert listed(Dataset.range(1).map(lambda x: (x, [x, 5]))) == [(0, [0, 5])]
        assert listed(Dataset.range(1).map(lambda x: [[x, 5], [1]])) == [([0, 5], [1])]
        assert listed(Dataset.from_tensors(([1, 2], {"a": [3]}))) == [([1, 2], {"a": [3]})]
        assert listed(Dataset.from_tensor_slices({"a": [[1, 2], [3, 4]]})) == [{"a": [1, 2]}, {"a": [3, 4]}]
        assert listed(Dataset.from_tensor_slices([(1, 2), (3, 4)])) == [[1, 2], [3, 4]]
        with pytest.raises(InvalidArgumentError):
            list(Dataset.range(1).map(lambda x: (x, [np.zeros(2), np.zeros(3)])))

    def test_only_a_tuple_is_spread(self):
        pairs = Dataset.range(2).map(lambda x: Point(x, x + 1))
        assert all(type(element) is Point for element in pairs)
        assert listed(pairs.map(lambda point: point.x + point.y)) == [1, 3]
        assert len(list(pairs.filter(lambda point: point.y > 1))) == 1
        assert listed(Dataset.range(1).map(lambda x: {"a": x}).map(lambda row: row["a"])) == [0]
        assert listed(Dataset.zip(Point(Dataset.range(1), Dataset.range(1))).map(lambda point: point.y)) == [0]

    def test_mappings_of_any_kind_are_dicts(self):
        rows = Dataset.range(2).map(lambda x: UserDict(a=x, b={"c": UserDict(d=[x])}))
        assert listed(rows.batch(2)) == [{"a": [0, 1], "b": {"c": {"d": [[0], [1]]}}}]

    def test_a_list_of_data_sets_is_refused(self):
        a = Dataset.range(1)
        for wrong in ([a, a], (a, [a, a]), {"x": [a]}):
            with pytest.raises(TypeError, match="use a tuple in place of a list"):
                Dataset.zip(wrong)
        assert listed(Dataset.zip(datasets=(a, a))) == [(0, 0)]
        for wrong in ({"datasets": None}, {"datasets": 3}):
            with pytest.raises(TypeError):
                Dataset.zip(**wrong)

    def test_a_list_in_a_signature_is_refused(self):
        spec = TensorSpec((), np.int32)
        for signature in ([spec, spec], (spec, [spec])):
            with pytest.raises(TypeError, match="use a tuple"):
                Dataset.from_generator(list, output_signature=signature)
        with pytest.raises(TypeError, match="use a tuple"):
            Dataset.from_generator(list, [np.int32, np.int32])

    def test_a_list_that_a_generator_yields(self):
        pair = (TensorSpec((), np.int32),) * 2
        with pytest.raises(InvalidArgumentError, match="does not fit its signature"):
            list(Dataset.from_generator(lambda: [[1, 2]], output_signature=pair))
        one = Dataset.from_generator(lambda: [[1, 2]], output_signature=TensorSpec((2,), np.int32))
        assert listed(one) == listed(Dataset.from_generator(lambda: [[1, 2]])) == [[1, 2]]
        with pytest.raises(InvalidArgumentError, match=r"yield a tuple for several, np\.stack"):
            list(Dataset.from_generator(lambda: [[np.zeros(2), np.ones(2)]]))

    def test_a_predicate_returns_no_list(self):
        for method in ("filter", "take_while"):
            with pytest.raises(InvalidArgumentError, match="must return one bool"):
                list(getattr(Dataset.range(1), method)(lambda x: [True]))


def test_a_range_of_another_dtype():
    assert [x.dtype for x in Dataset.range(2, output_type=np.int32)] == [np.int32] * 2
    (halves,) = Dataset.range(3, output_type=np.float32).batch(3)
    assert (halves.dtype, halves.tolist()) == (np.float32, [0, 1, 2])
    assert Dataset.range(3, output_type=np.uint8).element_spec == TensorSpec((), np.uint8)
    with pytest.raises(TypeError, match="a dtype of numbers"):
        Dataset.range(3, output_type=str)


@pytest.mark.parametrize(
    "dataset",
    [
        numbers(2).map(lambda x: np.ones(x)).batch(2),
        numbers(2).map(lambda x: x if x else 1.5).batch(2),
        numbers(2).map(lambda x: (x, x) if x else x).batch(2),
        numbers(2).unbatch(),
        Dataset.from_tensors((np.zeros(2), np.zeros(3))).unbatch(),
        numbers(2).filter(lambda x: x),
        Dataset.from_tensor_slices([[1, 2]]).filter(lambda x: x > 1),
        numbers(2).map(lambda x: None),
    ],
    ids=["shapes", "dtypes", "structures", "scalars", "lengths", "no bool", "many bools", "none"],
)
def test_elements_that_do_not_fit(dataset):
    with pytest.raises(InvalidArgumentError):
        list(dataset)


def test_what_belongs_to_the_user_is_neither_copied_nor_writable():
    x = np.arange(6.0).reshape(3, 2)
    for element in (next(iter(Dataset.from_tensor_slices(x))), next(iter(Dataset.from_tensor_slices(x).batch(2)))):
        assert np.shares_memory(element, x)
        with pytest.raises(ValueError, match="read-only"):
            element[...] = 0
    (whole,) = Dataset.from_tensors(x)
    assert np.shares_memory(whole, x)
    assert x.flags.writeable


@given(st.integers(0, 30), st.integers(1, 8), st.integers(1, 40), st.integers(0, 5))
def test_no_row_is_lost_or_doubled(rows, size, buffer, skipped):
    x = np.arange(rows)
    dataset = Dataset.from_tensor_slices((x, x * 2)).skip(skipped).shuffle(buffer, seed=0).batch(size)
    batches = list(dataset)
    assert len(batches) == dataset.cardinality()
    assert sorted(row for batch, _ in batches for row in batch.tolist()) == list(range(skipped, rows))
    assert all((b == 2 * a).all() for a, b in batches)


class TestNumpy:
    """``experimental_make_numpy_dataset``: rows of arrays; what is no array is an AttributeError."""

    def test_rows(self):
        assert listed(numpy_dataset(np.arange(3))) == [0, 1, 2]
        assert listed(numpy_dataset((np.arange(2), {"y": np.float32([2, 3])}))) == [(0, {"y": 2}), (1, {"y": 3})]
        assert listed(numpy_dataset([np.array([0, 1]), np.array([2, 3])])) == [[0, 1], [2, 3]]

    @pytest.mark.parametrize("value", [3, [1, 2], (np.zeros(2), 1.5), None, {"a": "text"}])
    def test_what_is_no_array(self, value):
        with pytest.raises(AttributeError):
            numpy_dataset(value)

    @pytest.mark.parametrize(
        "value", [np.float32(1), np.zeros(()), (np.zeros(2), np.zeros(3)), [np.zeros(2), np.zeros(3)], ()]
    )
    def test_what_has_no_rows_in_common(self, value):
        with pytest.raises(ValueError):
            numpy_dataset(value)


def test_length():
    assert len(Dataset.range(7).batch(2)) == 4
    assert Dataset.range(0)
    assert len(Dataset.range(0)) == 0
    for endless, said in (
        (Dataset.range(7).repeat(), "dataset is infinite"),
        (numbers(3), "dataset length is unknown"),
    ):
        assert endless
        with pytest.raises(TypeError, match=f"^The {said}"):
            len(endless)


#: A stage of a data set, and what it makes of a list of plain elements.
STAGES = st.one_of(
    st.integers(-1, 8).map(lambda n: (lambda d: d.take(n), lambda rows: rows if n < 0 else rows[:n])),
    st.integers(-1, 8).map(lambda n: (lambda d: d.skip(n), lambda rows: [] if n < 0 else rows[n:])),
    st.integers(0, 3).map(lambda n: (lambda d: d.repeat(n), lambda rows: rows * n)),
    st.tuples(st.integers(1, 3), st.integers(0, 2)).map(
        lambda s: (lambda d: d.shard(s[0], s[1] % s[0]), lambda rows: rows[s[1] % s[0] :: s[0]])
    ),
    st.just((lambda d: d.concatenate(d.take(2)), lambda rows: rows + rows[:2])),
    st.just((lambda d: d.cache(), lambda rows: rows)),
    st.just((lambda d: d.prefetch(2), lambda rows: rows)),
    st.just((lambda d: d.shuffle(1), lambda rows: rows)),
    st.just((lambda d: d.batch(2).unbatch(), lambda rows: rows)),
    st.just((lambda d: d.batch(2, True).unbatch(), lambda rows: rows[: len(rows) // 2 * 2])),
    st.just((lambda d: d.map(lambda x: x + 1), lambda rows: [row + 1 for row in rows])),
    st.just((lambda d: d.filter(lambda x: x % 3 > 0), lambda rows: [row for row in rows if row % 3])),
    st.just((lambda d: d.enumerate().map(lambda i, x: i + x), lambda rows: [i + row for i, row in enumerate(rows)])),
    st.just((lambda d: Dataset.zip(d, d.skip(1)).map(np.add), lambda r: [a + b for a, b in itertools.pairwise(r)])),
)


def test_an_empty_generator_has_the_elements_it_declares():
    empty = generated(0).map(lambda x: x + 1)
    assert empty.element_spec == TensorSpec((), np.int64)
    assert listed(empty.concatenate(empty.take(2))) == []
    undeclared = Dataset.from_generator(lambda: iter(()))
    with pytest.raises(InvalidArgumentError, match="pass output_signature"):
        undeclared.map(lambda x: x + 1).element_spec


def generated(n):
    return Dataset.from_generator(lambda: iter(np.arange(n)), output_signature=TensorSpec((), np.int64))


@given(st.sampled_from([Dataset.range, generated]), st.integers(0, 9), st.lists(STAGES, max_size=5))
def test_any_chain_gives_what_lists_would(make, n, stages):
    dataset, rows = make(n), list(range(n))
    for stage, of_list in stages:
        dataset, rows = stage(dataset), of_list(rows)
    assert listed(dataset) == listed(dataset) == rows
    assert dataset.cardinality() in (len(rows), UNKNOWN_CARDINALITY)
    batches = [rows[start : start + 2] for start in range(0, len(rows), 2)]
    assert listed(dataset.batch(2)) == batches
    if rows:
        assert all(dataset.element_spec.admits(element.shape) for element in dataset)


def test_specs():
    assert TensorSpec(None).admits((1, 2))
    assert TensorSpec([None, 2]).admits((7, 2))
    assert not TensorSpec((None, 2)).admits((2,))
    assert TensorSpec((1,)).dtype == np.float32
    assert joined(TensorSpec((1, 2)), TensorSpec((1, 3))) == TensorSpec((1, None))
    assert joined(TensorSpec((1,)), TensorSpec((1, 3))) == TensorSpec(None)
    assert PerReplicaSpec((TensorSpec((1,)),)) == PerReplicaSpec((TensorSpec([1]),))
