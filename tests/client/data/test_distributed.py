"""Distributed data sets: who gets which rows, and how it ends."""

import copy
import itertools
import threading
from collections import UserDict, namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import central_storage.strategy.service_strategy  # noqa: F401  (makes the default strategy)
from central_storage.core import context
from central_storage.core.backends import Carriage
from central_storage.core.options import InputOptions, InputReplicationMode
from central_storage.core.values import PerReplica, local_results
from central_storage.data.dataset import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Dataset
from central_storage.data.distributed import (
    DistributedDataset,
    DistributedFromFunction,
    DistributedIterator,
    refuse_in_replica,
)
from central_storage.data.element_spec import PerReplicaSpec, TensorSpec
from central_storage.data.input_context import InputContext
from central_storage.pickling import pickler
from cs_proto.errors import ContextError, DatasetContextError, InvalidArgumentError, NotADatasetError, OutOfRangeError

INT64 = np.dtype(np.int64)
PER_REPLICA = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "cs-read-ahead"]


def steps(distributed):
    """Per step the list of every replica's rows."""
    return [[share.tolist() for share in element.values] for element in distributed]


def batched(size, batch, n):
    return DistributedDataset(Dataset.range(size).batch(batch), n)


def in_turn(size, batch, n):
    return DistributedFromFunction(lambda _: Dataset.range(size).batch(batch), n)


class Loader:
    """What a torch DataLoader looks like from outside: lists of tensors that are no NumPy arrays."""

    def __len__(self):
        return 2

    def __iter__(self):
        return ([Tensor([i, i + 1, i + 2]), Tensor([[0.5]] * 3)] for i in range(2))


class Tensor:
    def __init__(self, data):
        self.data = np.array(data)
        self.shape = self.data.shape

    def __array__(self, dtype=None, copy=None):
        return self.data


class TestSplit:
    @pytest.mark.parametrize(
        ("size", "batch", "n", "expected"),
        [
            (4, 4, 3, [[[0, 1], [2, 3], []]]),
            (10, 10, 3, [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]]),
            (1, 1, 3, [[[0], [], []]]),
            (5, 4, 2, [[[0, 1], [2, 3]], [[4], []]]),
            (6, 4, 2, [[[0, 1], [2, 3]], [[4], [5]]]),
            (0, 4, 2, []),
        ],
    )
    def test_each_global_batch_by_the_ceiling_of_its_own_rows(self, size, batch, n, expected):
        assert steps(batched(size, batch, n)) == expected

    @given(st.integers(0, 40), st.integers(1, 12), st.integers(2, 5))
    def test_no_row_is_lost_moved_or_doubled(self, size, batch, n):
        for number, shares in enumerate(steps(batched(size, batch, n))):
            assert len(shares) == n
            assert list(itertools.chain(*shares)) == list(range(number * batch, min(size, (number + 1) * batch)))

    def test_components_are_split_each_by_its_own_rows(self):
        x, y = np.ones((5, 2), np.float32), np.arange(3)
        (element,) = DistributedDataset([{"x": x, "y": (y, None)}], 2)
        assert [share.shape for share in element["x"].values] == [(3, 2), (2, 2)]
        assert [share.tolist() for share in element["y"][0].values] == [[0, 1], [2]]
        assert element["y"][1] is None

    def test_empty_shares_keep_dtype_and_other_axes(self):
        (element,) = DistributedDataset([np.ones((1, 3, 2), np.uint8)], 3)
        assert [(share.shape, share.dtype) for share in element.values][1:] == [((0, 3, 2), np.uint8)] * 2

    def test_shares_of_the_first_batch_are_views(self):
        x = np.zeros((4, 2))
        (element,) = DistributedDataset([x], 2)
        assert all(np.shares_memory(share, x) for share in element.values)

    def test_nests_of_every_kind(self):
        Pair = namedtuple("Pair", "x y")
        batch = {"p": Pair(np.arange(3), np.array(["a", "b", "c"])), "q": [np.ones((2, 2)), (None, np.array([b"x"]))]}
        for element in DistributedDataset([batch] * 3, 2):
            assert type(element["p"]) is Pair
            assert steps([element["p"].x, element["p"].y]) == [[[0, 1], [2]], [["a", "b"], ["c"]]]
            ones, (none, text) = element["q"]
            assert [share.shape for share in ones.values] == [(1, 2), (1, 2)]
            assert none is None
            assert steps([text]) == [[[b"x"], []]]
            assert element["p"].y.values[1].dtype == "U1"

    def test_one_replica_gets_plain_elements(self):
        assert [element.tolist() for element in batched(3, 2, 1)] == [[0, 1], [2]]
        assert [int(element) for element in DistributedDataset(Dataset.range(2), 1)] == [0, 1]

    def test_unbatched(self):
        vectors = DistributedDataset(Dataset.from_tensor_slices(np.array([[1, 2, 3], [4, 5, 6]])), 2)
        assert steps(vectors) == [[[1, 2], [3]], [[4, 5], [6]]]
        for scalars in (Dataset.range(3), Dataset.range(2).enumerate().map(lambda i, x: {"x": x})):
            with pytest.raises(IndexError, match="batch") as caught:
                next(iter(DistributedDataset(scalars, 2)))
            assert isinstance(caught.value, ValueError)
            assert not isinstance(caught.value, OutOfRangeError)


class TestSources:
    def test_a_loader_of_tensors(self):
        distributed = DistributedDataset(Loader(), 2)
        for _ in range(2):
            elements = list(distributed)
            assert [steps([element[0]]) for element in elements] == [[[[0, 1], [2]]], [[[1, 2], [3]]]]
            assert elements[0][1].values[0].shape == (2, 1)
        assert distributed.cardinality == 2
        assert distributed.element_spec == [
            PerReplicaSpec((TensorSpec((None,), INT64),) * 2),
            PerReplicaSpec((TensorSpec((None, 1), np.float64),) * 2),
        ]

    def test_a_mapping_of_its_own_kind(self):
        (element,) = DistributedDataset([UserDict(ids=np.arange(2))], 2)
        assert steps([element["ids"]]) == [[[0], [1]]]

    @pytest.mark.parametrize(
        "value",
        [
            [1, 2, 3],
            [1.5],
            [np.float32(1)],
            [[1, 2], [3, 4]],
            ["a"],
            "text",
            {"x": np.zeros(2)},
            np.zeros((4, 2)),
            3,
            None,
            iter([np.zeros(2)]),
            (np.zeros(2) for _ in range(2)),
            DistributedDataset([np.zeros(2)], 2),
        ],
    )
    def test_what_is_no_data_set(self, value):
        for make in (lambda: DistributedDataset(value, 2), lambda: DistributedFromFunction(lambda _: value, 2)):
            for error in (NotADatasetError, TypeError, AttributeError):
                with pytest.raises(error):
                    make()

    def test_texts_as_loaders_collate_them(self):
        class Source:
            def __iter__(self):
                return iter([[np.arange(3), ("a", "bc", "d")], {"t": [b"x", b"y"]}])

        first, second = DistributedDataset(Source(), 2)
        assert steps(first) == [[[0, 1], [2]], [["a", "bc"], ["d"]]]
        assert steps([second["t"]]) == [[[b"x"], [b"y"]]]

    @pytest.mark.parametrize("element", [["a", 1], [object()], [[np.zeros(2), "label"]]])
    def test_elements_that_are_no_arrays(self, element):
        class Source:
            def __iter__(self):
                return iter([element])

        with pytest.raises(InvalidArgumentError, match="holds"):
            next(iter(DistributedDataset(Source(), 2)))


class TestIterator:
    def test_iterating_again_starts_again(self):
        distributed = batched(4, 2, 2)
        one, two = iter(distributed), iter(distributed)
        next(one)
        assert steps([next(one)]) == [[[2], [3]]]
        assert steps(two) == steps(distributed) == [[[0], [1]], [[2], [3]]]

    def test_the_end(self):
        iterator = iter(batched(2, 2, 2))
        iterator.get_next()
        for _ in range(2):
            with pytest.raises(OutOfRangeError):
                iterator.get_next()
            with pytest.raises(StopIteration):
                next(iterator)
            assert not iterator.get_next_as_optional().has_value()

    def test_optional(self):
        iterator = iter(batched(2, 2, 2))
        optional = iterator.get_next_as_optional()
        assert optional.has_value()
        assert steps([optional.get_value()]) == [[[0], [1]]]
        with pytest.raises(InvalidArgumentError):
            iterator.get_next_as_optional().get_value()

    @pytest.mark.parametrize(
        "options", [None, InputOptions(False), InputOptions(experimental_per_replica_buffer_size=9)]
    )
    @pytest.mark.parametrize("good", range(4))
    def test_an_exception_comes_out_at_its_element(self, options, good):
        freed = []

        def make():
            try:
                for _ in range(good):
                    yield np.zeros(2)
                raise KeyError("row 7")
            finally:
                freed.append(True)

        distributed = DistributedDataset(Dataset.from_generator(make), 2, options)
        for ask in (next, DistributedIterator.get_next, DistributedIterator.get_next_as_optional):
            iterator = iter(distributed)
            assert len([next(iterator) for _ in range(good)]) == good
            with pytest.raises(KeyError, match="row 7"):
                ask(iterator)
            assert freed.pop()
            assert list(iterator) == []
        assert readers() == []

    def test_elements_given_back_come_next_again(self):
        iterator = iter(batched(8, 2, 2))
        first = next(iterator)
        ahead = [next(iterator), next(iterator)]
        assert iterator.position == 3
        iterator.give_back(ahead)
        assert iterator.position == 1
        assert [next(iterator), next(iterator)] == ahead
        assert steps([first, *ahead, *iterator]) == [[[0], [1]], [[2], [3]], [[4], [5]], [[6], [7]]]

    def test_close_ends_threads_and_generators(self):
        closed = []

        def make():
            try:
                while True:
                    yield np.zeros(2)
            finally:
                closed.append(True)

        before = threading.active_count()
        with iter(DistributedDataset(Dataset.from_generator(make).prefetch(2), 2)) as iterator:
            kept = next(iterator)
            iterator.give_back([kept])
        assert threading.active_count() == before
        assert closed == [True]
        assert list(iterator) == []

    def test_left_half_way(self):
        closed = []

        def make():
            try:
                yield from (np.zeros(2) for _ in range(100))
            finally:
                closed.append(True)

        distributed = DistributedDataset(Dataset.from_generator(make), 2)
        for number, _ in enumerate(distributed):
            if number == 3:
                break
        assert closed == [True]
        assert readers() == []

    def test_infinite(self):
        distributed = DistributedDataset(Dataset.range(2).repeat().batch(3), 2)
        iterator = iter(distributed)
        assert steps([next(iterator), next(iterator)]) == [[[0, 1], [0]], [[1, 0], [1]]]
        assert distributed.cardinality == INFINITE_CARDINALITY

    def test_reduce(self):
        total = batched(5, 2, 2).reduce(0, lambda state, element: state + sum(int(s.sum()) for s in element.values))
        assert total == 10

    def test_no_transformations(self):
        for name in ("map", "batch"):
            assert not hasattr(batched(4, 2, 2), name)


class Counting:
    """Batches of one row: 0, 1, 2, …, and in which threads each was read."""

    def __init__(self):
        self.threads = []
        self.third = threading.Event()

    def __iter__(self):
        for number in range(50):
            self.threads.append(threading.current_thread().name)
            if number == 2:
                self.third.set()
            yield np.full(1, number)


class TestReadingAhead:
    def test_a_thread_reads_from_the_second_element_on(self):
        source = Counting()
        with iter(DistributedDataset(source, 1)) as iterator:
            next(iterator)
            assert source.threads == ["MainThread"]
            assert next(iterator) == 1
            assert source.third.wait(10)  # while the caller holds the second
            assert set(source.threads[1:]) == {"cs-read-ahead"}
            assert len(source.threads) <= 4
        assert readers() == []

    @pytest.mark.parametrize(
        "options",
        [InputOptions(experimental_fetch_to_device=False), InputOptions(experimental_per_replica_buffer_size=0)],
    )
    def test_switched_off(self, options):
        source = Counting()
        for element in DistributedDataset(source, 1, options):
            assert len(source.threads) == element + 1
        assert set(source.threads) == {"MainThread"}

    @pytest.mark.parametrize("size", [1, 2, 7])
    def test_a_source_that_fills_one_array_again_and_again(self, size):
        class Refilled:
            def __iter__(self):
                array = np.empty(4, np.int64)
                for number in range(20):
                    array[:] = number
                    yield array

        options = InputOptions(experimental_per_replica_buffer_size=size)
        for number, element in enumerate(DistributedDataset(Refilled(), 2, options)):
            assert steps([element]) == [[[number] * 2] * 2]

    @pytest.mark.parametrize("n", [1, 2])
    def test_what_is_masked_stays_so(self, n):
        masked = np.ma.masked_greater(np.arange(60_000) % 7, 3)
        for element in DistributedDataset([masked] * 3, n):
            assert sum(share.sum() for share in local_results(element, n)) == masked.sum()

    def test_a_memory_map_is_carried_like_any_array(self, tmp_path):
        np.save(tmp_path / "rows.npy", np.arange(4))
        mapped, carried = np.load(tmp_path / "rows.npy", mmap_mode="r"), []

        def carry(array):
            carried.append(array)
            return np.array(array)

        for element in DistributedDataset([mapped] * 3, 2, None, lambda: Carriage(carry)):
            assert steps([element]) == [[[0, 1], [2, 3]]]
            assert not any(share.flags.writeable for share in element.values)
        assert len(carried) == 2  # the first element is read when it is asked for

    def test_what_cannot_be_written_stays_so(self):
        for element in Dataset.range(6).batch(2), [np.zeros(2)] * 3:
            shares = [round_.values[0].flags.writeable for round_ in DistributedDataset(element, 2)]
            assert len(set(shares)) == 1

    def test_only_a_few_elements_are_held(self):
        class Row(np.ndarray):
            alive = 0

            def __array_finalize__(self, _):
                Row.alive += 1

            def __del__(self):
                Row.alive -= 1

        source = Dataset.from_generator(lambda: (np.zeros(4) for _ in range(100)))
        most = 0

        class Counted:
            def __iter__(self):
                return (element.view(Row) for element in source)

        for element in DistributedDataset(Counted(), 1, InputOptions(experimental_per_replica_buffer_size=2)):
            most = max(most, Row.alive)
            del element
        assert most <= 8


class TestOptions:
    def test_every_option_is_taken_and_changes_no_element(self):
        for options in (
            None,
            InputOptions(),
            InputOptions(False),
            PER_REPLICA,
            InputOptions(True, *PER_REPLICA[1:2], True),
        ):
            distributed = DistributedDataset(Dataset.range(5).batch(4), 2, options)
            assert steps(distributed) == [[[0, 1], [2, 3]], [[4], []]]

    def test_what_makes_no_sense(self):
        for make in (
            lambda options: DistributedDataset(Dataset.range(4).batch(2), 2, options),
            lambda options: DistributedFromFunction(lambda _: Dataset.range(4), 2, options),
        ):
            with pytest.raises(InvalidArgumentError, match="PER_REPLICA"):
                make(InputOptions(experimental_place_dataset_on_device=True))
            with pytest.raises(TypeError, match="InputOptions"):
                make({"experimental_fetch_to_device": True})

    def test_a_function_called_for_each_replica(self):
        seen = []

        def make(context):
            seen.append(context)
            return Dataset.range(7).shard(context.num_input_pipelines, context.input_pipeline_id).batch(2)

        distributed = DistributedFromFunction(make, 2, PER_REPLICA)
        assert seen == [InputContext(2, 0, 2), InputContext(2, 1, 2)]
        assert steps(distributed) == [[[0, 2], [1, 3]], [[4, 6], [5]]]
        assert distributed.cardinality == 2
        assert distributed.element_spec == PerReplicaSpec((TensorSpec((None,), INT64),) * 2)

    def test_replicas_whose_pipelines_end_at_different_times(self):
        distributed = DistributedFromFunction(
            lambda context: Dataset.range(2 - context.input_pipeline_id).batch(1), 2, PER_REPLICA
        )
        assert distributed.cardinality == 1
        assert steps(distributed) == [[[0], [0]]]
        iterator = iter(distributed)
        next(iterator)
        assert steps([iterator.get_next_as_optional().get_value()]) == [[[1], []]]
        assert not iterator.get_next_as_optional().has_value()


class TestInAReplica:
    def test_a_distributed_data_set_is_not_read(self):
        distributed = batched(4, 2, 2)
        iterator = iter(distributed)
        with context.enter_replica(object(), object()):
            for use in (
                lambda: iter(distributed),
                lambda: next(iterator),
                iterator.get_next,
                iterator.get_next_as_optional,
                lambda: refuse_in_replica("made"),
            ):
                for error in (ValueError, ContextError, DatasetContextError):
                    with pytest.raises(error, match=r"args=\(next"):
                        use()
        assert steps(iterator) == [[[0], [1]], [[2], [3]]]

    @pytest.mark.parametrize("make", [batched, in_turn])
    def test_one_that_was_sent_along(self, make):
        def refuse(handle):
            raise AssertionError(handle)

        distributed = make(4, 2, 2)
        iterator = iter(distributed)
        next(iterator)
        data = pickler.dump_function(lambda: (distributed, iterator), refuse)
        for use in (
            lambda sent, _: list(sent),
            lambda sent, _: sent.element_spec,
            lambda _, sent: next(sent),
            lambda _, sent: sent.get_next(),
            lambda _, sent: sent.element_spec,
        ):
            with pytest.raises(DatasetContextError):
                use(*pickler.load_function(data, refuse)())
        assert next(iter(copy.deepcopy(batched(2, 2, 1)))).tolist() == [0, 1]


class TestFromFunction:
    @pytest.mark.parametrize(
        ("size", "batch", "n", "expected"),
        [
            (8, 2, 2, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
            (7, 2, 2, [[[0, 1], [2, 3]], [[4, 5], [6]]]),
            (5, 2, 2, [[[0, 1], [2, 3]]]),
            (3, 1, 4, []),
        ],
    )
    def test_each_replica_takes_the_next_batch(self, size, batch, n, expected):
        assert steps(in_turn(size, batch, n)) == expected

    def test_optional_keeps_an_incomplete_round(self):
        iterator = iter(in_turn(5, 2, 3))
        assert steps([iterator.get_next_as_optional().get_value()]) == [[[0, 1], [2, 3], [4]]]
        assert not iterator.get_next_as_optional().has_value()
        iterator = iter(DistributedFromFunction(lambda _: Dataset.from_tensors((np.ones((1, 3)), 2)), 2))
        element = iterator.get_next_as_optional().get_value()
        assert [share.shape for share in element[0].values] == [(1, 3), (0, 3)]
        assert [share.shape for share in element[1].values] == [(), (0,)]
        assert list(iterator) == []

    def test_next_ends_before_an_incomplete_round(self):
        iterator = iter(in_turn(3, 2, 3))
        with pytest.raises(OutOfRangeError):
            iterator.get_next()
        assert not iterator.get_next_as_optional().has_value()

    def test_unbatched_and_plain(self):
        (element,) = DistributedFromFunction(lambda _: Dataset.range(2), 2)
        assert isinstance(element, PerReplica)
        assert [int(value) for value in element.values] == [0, 1]
        assert [element.tolist() for element in in_turn(3, 2, 1)] == [[0, 1], [2]]

    def test_the_function_is_called_once_at_construction(self):
        seen = []

        def make(context):
            seen.append(context)
            return Dataset.range(4).batch(context.get_per_replica_batch_size(4))

        distributed = DistributedFromFunction(make, 2)
        assert seen == [InputContext(1, 0, 2)]
        assert steps(distributed) == steps(distributed) == [[[0, 1], [2, 3]]]
        assert len(seen) == 1

    def test_errors_come_out_as_they_are(self):
        with pytest.raises(ZeroDivisionError):
            DistributedFromFunction(lambda _: 1 // 0, 2)
        with pytest.raises(TypeError):
            DistributedFromFunction(Dataset.range(3), 2)


@pytest.mark.parametrize("kind", [list, tuple])
def test_small_arrays_that_are_there_are_not_read_ahead(kind):
    source = kind([(np.full((4, 2), n),) for n in range(4)])
    with iter(DistributedDataset(source, 2)) as iterator:
        for n, (element,) in enumerate(iterator):
            assert readers() == []
            assert [share.tolist() for share in element.values] == [[[n, n]] * 2] * 2


def test_what_is_done_to_small_arrays_is_not_done_to_those_that_are_there():
    source = [np.full(4, n) for n in range(3)]
    with iter(DistributedDataset(source, 2)) as iterator:
        next(iterator)
        for element in iterator:
            element.values[0][:] = -1
    assert [array.tolist() for array in source] == [[n] * 4 for n in range(3)]


def test_what_is_large_or_has_to_be_made_is_read_ahead():
    class Made(list):
        pass

    large = [np.zeros((4, 1 << 16)) for _ in range(3)]
    for source in (large, Made([np.zeros(2)] * 3), Dataset.range(8).batch(2)):
        with iter(DistributedDataset(source, 2)) as iterator:
            next(iterator)
            next(iterator)
            assert len(readers()) == 1
        assert readers() == []


def test_input_context():
    context = InputContext()
    assert (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync) == (1, 0, 1)
    assert context.get_per_replica_batch_size(5) == 5
    with pytest.raises(ValueError, match="5"):
        InputContext(num_replicas_in_sync=2).get_per_replica_batch_size(5)
    with pytest.raises(AttributeError):
        context.num_replicas_in_sync = 3


def test_element_spec():
    def of(n, *batch):
        return DistributedDataset(Dataset.range(9).batch(*batch), n).element_spec

    assert of(1, 4) == TensorSpec((None,), INT64)
    assert of(2, 4) == PerReplicaSpec((TensorSpec((None,), INT64),) * 2)
    assert of(2, 4, True) == PerReplicaSpec((TensorSpec((2,), INT64),) * 2)
    assert of(3, 4, True) == PerReplicaSpec((TensorSpec((None,), INT64),) * 3)
    assert in_turn(9, 4, 2).element_spec == PerReplicaSpec((TensorSpec((None,), INT64),) * 2)
    assert iter(batched(4, 2, 2)).element_spec == batched(4, 2, 2).element_spec
    pairs = DistributedDataset([(np.zeros((4, 2), np.float32), None)], 2).element_spec
    assert pairs == (PerReplicaSpec((TensorSpec((None, 2)),) * 2), None)
    with pytest.raises(InvalidArgumentError, match="empty"):
        _ = DistributedDataset([], 2).element_spec


def test_cardinality():
    assert batched(9, 4, 2).cardinality == 3
    assert in_turn(9, 4, 2).cardinality == 1
    assert DistributedDataset(Dataset.from_generator(list), 2).cardinality == UNKNOWN_CARDINALITY

    class Stream:
        def __iter__(self):
            return iter(())

    assert DistributedDataset(Stream(), 2).cardinality == UNKNOWN_CARDINALITY
