"""Per-replica values: regrouping, selecting, converting, reducing and gathering."""

import enum
import pickle
import traceback
from collections import OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest

from central_storage.core.tensors.tensor import Tensor
from central_storage.core.values import (
    IndexedSlices,
    Mirrored,
    PerReplica,
    ReduceOp,
    Shared,
    VariableAggregation,
    VariableSynchronization,
    convert_to_tensor,
    gather_values,
    local_results,
    reduce_values,
    regroup,
    select_replica,
    select_replicas,
)
from central_storage.diagnostics.tracebacks import shorten
from cs_proto.errors import InvalidArgumentError, StructureMismatchError

SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN


def test_only_an_array_of_objects_may_hold_texts():
    with pytest.raises(InvalidArgumentError, match=r"use astype\(str\)"):
        convert_to_tensor(np.array(["a", None], object))
    for array in (np.array([(1, 2.0)], [("a", "i4"), ("b", "f4")]), np.array("2020-01-01", "M8[D]")):
        with pytest.raises(InvalidArgumentError) as caught:
            convert_to_tensor(array)
        assert "astype" not in str(caught.value)


Point = namedtuple("Point", ["x", "y"])


class Token:
    """A handle: what variables and optimizers are to this module."""

    def __init__(self, number):
        self.number = number

    def _cs_handle(self):
        return ("token", self.number)

    def __array__(self, dtype=None, copy=None):
        return np.zeros(2)


def f32(*values):
    return PerReplica([np.asarray(value, np.float32) for value in values])


def slices(values, indices):
    return IndexedSlices(values, indices, [4, 2])


def shown(value):
    """``value`` with PerReplica told apart from tuples, for comparing."""
    return ("per_replica", *value.values) if isinstance(value, PerReplica) else value


def same(result, expected, dtype=np.float32):
    np.testing.assert_array_equal(result, np.asarray(expected, dtype), strict=True)


def test_enums():
    assert [(op.name, op.value) for op in ReduceOp] == [("SUM", "SUM"), ("MEAN", "MEAN")]
    assert [a.value for a in VariableAggregation] == [0, 1, 2, 3]
    assert [s.name for s in VariableSynchronization] == ["AUTO", "NONE", "ON_WRITE", "ON_READ"]


class TestRegroup:
    @pytest.mark.parametrize("value", [None, 5, 10**12, True, "abc" * 9, b"x", SUM, np.dtype("f4"), np.float32])
    def test_equal_plain_values_come_back_bare(self, value):
        again = pickle.loads(pickle.dumps(value))  # equal, and where Python allows not identical
        assert regroup([value, again]) == value

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (1.5, 1.5),
            (1j, 1j),
            (np.int32(1), np.int32(1)),
            (None, np.zeros(1)),
            (1, True),
            (1, 2),
            ("a", b"a"),
            (SUM, MEAN),
            (3, (1, 2)),
        ],
    )
    def test_what_may_differ_is_wrapped(self, one, other):
        grouped = regroup([one, other])
        assert isinstance(grouped, PerReplica)
        assert grouped.values == (one, other)

    def test_the_identical_array_is_wrapped(self):
        array = np.zeros(2)
        assert isinstance(regroup([array, array]), PerReplica)
        sparse = slices([[1.0, 2.0]], [0])
        assert regroup([sparse, sparse]).values == (sparse, sparse)

    def test_handles_of_one_thing_are_bare(self):
        token = Token(1)
        assert regroup([token, token]) is token
        assert regroup([token, Token(1)]) is token
        assert isinstance(regroup([token, Token(2)]), PerReplica)

    def test_what_one_merge_function_gave_to_all_is_bare(self):
        key, array = (0, 1), np.array([1.0, np.nan])
        mine, other = [[Shared(key, array)], 0.5], [[Shared(key, array.copy())], Shared((0, 2), 0.5)]
        grouped = regroup([mine, other])
        assert grouped[0][0] is array
        assert shown(grouped[1]) == ("per_replica", 0.5, 0.5)
        sparse = IndexedSlices([1.0], [0])
        assert regroup([Shared(key, sparse), Shared(key, IndexedSlices([1.0], [0]))]) is sparse

    @pytest.mark.parametrize("other", [Shared((1, 1), 2.0), Shared((0, 1), 3.0), 2.0])
    def test_what_one_has_changed_or_got_elsewhere_is_each_replicas_own(self, other):
        grouped = regroup([Shared((0, 1), 2.0), other])
        assert shown(grouped) == ("per_replica", 2.0, 3.0 if isinstance(other, Shared) and other.value == 3 else 2.0)

    def test_containers_are_kept(self):
        results = [
            OrderedDict(b=Point(float(r), "x"), a=[r, None], c=defaultdict(int, k=(np.ones(1),))) for r in range(3)
        ]
        grouped = regroup(results)
        assert type(grouped) is OrderedDict
        assert list(grouped) == ["b", "a", "c"]
        assert type(grouped["b"]) is Point
        assert shown(grouped["b"].x) == ("per_replica", 0.0, 1.0, 2.0)
        assert grouped["b"].y == "x"
        assert shown(grouped["a"][0]) == ("per_replica", 0, 1, 2)
        assert grouped["a"][1] is None
        assert type(grouped["c"]) is defaultdict
        assert len(grouped["c"]["k"][0].values) == 3

    @pytest.mark.parametrize("other", [[1], [1, 2, 3], (1, 2), {"a": 1}, 1, None])
    def test_structures_that_differ(self, other):
        with pytest.raises(StructureMismatchError, match=r"replica 1 .*the same keys and lengths") as caught:
            regroup([[1, 2], other])
        assert isinstance(caught.value, AssertionError)
        assert caught.value.__cause__ is None
        assert {entry.name for entry in traceback.extract_tb(shorten(caught.value).__traceback__)} == {
            "test_structures_that_differ"
        }
        with pytest.raises(AssertionError):
            regroup([{"b": 1}, {"a": 1}])

    def test_one_replica_is_bare_unless_asked(self):
        array = np.zeros(1)
        assert regroup([{"a": array}])["a"] is array
        assert shown(regroup([{"a": 1}], always_wrap=True)["a"]) == ("per_replica", 1)
        assert shown(regroup([None, None], always_wrap=True)) == ("per_replica", None, None)
        with pytest.raises(InvalidArgumentError):
            regroup([])


class TestDistributedValues:
    def test_select_replica(self):
        other = object()
        structure = {"a": [PerReplica([1, 2]), other], "b": Point(Mirrored([3, 3]), None)}
        assert select_replica(1, structure) == {"a": [2, other], "b": Point(3, None)}
        with pytest.raises(IndexError, match="replica 2"):
            select_replica(2, structure)

    @pytest.mark.parametrize(
        "structure",
        [
            (),
            (PerReplica([1, 2]), 5, (), [PerReplica(["a", "b"])], {"k": PerReplica([3, 4])}),
            ((PerReplica([1, 2]), (PerReplica([3, 4]),)),),
            Point(Mirrored([3, 3]), PerReplica([1, 2, 3])),
            "text",
        ],
    )
    def test_select_replicas(self, structure):
        assert list(select_replicas(2, structure)) == [select_replica(replica, structure) for replica in range(2)]

    def test_select_replicas_of_what_has_too_few(self):
        with pytest.raises(IndexError, match="replica 2"):
            select_replicas(3, (PerReplica([1, 2]),))

    def test_local_results(self):
        per_replica = PerReplica([1, 2])
        assert local_results(per_replica, 2) == (1, 2)
        assert local_results(Mirrored([1, 1]), 2) == (1, 1)
        assert local_results(None, 2) == (None,)
        assert local_results(3, 2) == (3,)
        assert local_results({"a": per_replica, "b": 3}, 2) == ({"a": 1, "b": 3}, {"a": 2, "b": 3})
        assert local_results((1, 2), 2) == ((1, 2), (1, 2))

    def test_per_replica_is_no_array(self):
        per_replica = f32([1, 2], [3, 4])
        with pytest.raises(TypeError):
            per_replica + 1
        with pytest.raises(TypeError):
            np.ones(2) * per_replica
        with pytest.raises(TypeError):
            np.add(np.ones(2), per_replica)
        with pytest.raises(TypeError):
            iter(per_replica)
        with pytest.raises(TypeError):
            per_replica[0]
        with pytest.raises(ValueError, match="reduce"):
            np.asarray(per_replica)
        with pytest.raises(ValueError, match="experimental_local_results"):
            convert_to_tensor(per_replica)
        assert repr(PerReplica([1, "a"])) == "PerReplica:{\n  0: 1,\n  1: 'a'\n}"
        assert pickle.loads(pickle.dumps(PerReplica([1, 2]))).values == (1, 2)
        with pytest.raises(InvalidArgumentError):
            PerReplica([])

    def test_mirrored_computes_with_component_0(self):
        mirrored = Mirrored([np.float32([1, 2]), np.float32([1, 2])])
        same(mirrored + 1, [2, 3])
        same(np.float32([1, 1]) - mirrored, [0, -1])
        same(np.exp(mirrored * 0), [1, 1])
        same(np.asarray(mirrored), [1, 2])
        assert Mirrored([2, 2]) * 3 == 6
        assert (mirrored.shape, mirrored.dtype, mirrored[1]) == ((2,), np.float32, 2)
        with pytest.raises(AttributeError):
            _ = mirrored.nothing


class TestConvertToTensor:
    @pytest.mark.parametrize(
        ("value", "dtype"),
        [
            (1.5, "float32"),
            (1, "int32"),
            (2**31, "int64"),
            ([1, 2**31], "int64"),
            (True, "bool"),
            (1j, "complex128"),
            ([], "float32"),
            ([[1.0, 2], (3, 4)], "float32"),
            ("ab", "<U2"),
            (np.float64(1), "float64"),
            ([np.int64(1)], "int64"),
            ([np.zeros(2), np.zeros(2)], "float64"),
            (1e300, "float32"),
        ],
    )
    def test_dtypes(self, value, dtype):
        array = convert_to_tensor(value)
        assert type(array) is np.ndarray
        assert array.dtype == dtype

    def test_arrays_are_not_copied(self):
        array = np.zeros(3)
        assert convert_to_tensor(array) is array
        assert convert_to_tensor(array, np.float64) is array

    @pytest.mark.parametrize("kind", [np.ndarray, Tensor])
    @pytest.mark.parametrize("dtype", [">f4", ">i8", ">c16", ">U1"])
    def test_a_foreign_byte_order_is_no_dtype_of_its_own(self, kind, dtype):
        array = np.array([1, 2], dtype).view(kind)
        got = convert_to_tensor(array)
        same(got, array, np.dtype(dtype).newbyteorder("="))
        if got.dtype.kind != "U":
            same(reduce_values("SUM", PerReplica([array, got]), 0, 2), 6, got.dtype)

    @pytest.mark.parametrize(
        ("value", "dtype"), [(1, "float16"), ([], "int32"), (200, "uint8"), (1.5, "complex64"), (np.zeros(2), "f4")]
    )
    def test_with_dtype(self, value, dtype):
        same(convert_to_tensor(value, dtype), value, dtype)

    def test_texts_as_objects(self):
        with pytest.raises(ValueError, match=r"astype\(str\)"):
            convert_to_tensor(np.array(["a", "b"], object))

    @pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x, x], lambda x: ([x],)])
    def test_what_is_masked_never_counts(self, wrap):
        masked = np.ma.masked_greater(np.float32([1, 9]), 5)
        with pytest.raises(InvalidArgumentError, match=r"masked array .* use \.filled"):
            convert_to_tensor(wrap(masked))

    @pytest.mark.parametrize(
        "value", [None, {}, {"a": 1}, [[1], [1, 2]], object(), 2**63, [1, 2**63], 2**70, [None], ["a", 1]]
    )
    def test_no_arrays(self, value):
        with pytest.raises(InvalidArgumentError):
            convert_to_tensor(value)

    @pytest.mark.parametrize(
        ("value", "dtype", "error"),
        [
            (1.5, "int32", TypeError),
            (np.zeros(1), "int64", TypeError),
            (1, "bool", TypeError),
            (1, "U", TypeError),
            ("a", "float32", TypeError),
            (300, "uint8", InvalidArgumentError),
            (np.int64(2**40), "int32", InvalidArgumentError),
        ],
    )
    def test_values_that_do_not_become_the_dtype(self, value, dtype, error):
        with pytest.raises(error):
            convert_to_tensor(value, dtype)


class TestIndexedSlices:
    def test_to_dense_adds_rows_named_twice(self):
        same(slices([[1.0, 2], [3, 4], [5, 6]], [3, 0, 3]).to_dense(), [[3, 4], [0, 0], [0, 0], [6, 8]])
        same(IndexedSlices(np.zeros((0, 2), np.float32), [], (3, 2)).to_dense(), np.zeros((3, 2)))

    @pytest.mark.parametrize(
        ("values", "indices", "shape"),
        [
            ([[1.0]], [0, 1], [3, 1]),
            ([[1.0]], [0.5], [3, 1]),
            ([[1.0]], [0], [3, 2]),
            ([[1.0]], [[0]], [3, 1]),
            (1.0, [0], [3]),
        ],
    )
    def test_pieces_that_do_not_fit(self, values, indices, shape):
        with pytest.raises(InvalidArgumentError):
            IndexedSlices(values, indices, shape)

    @pytest.mark.parametrize("index", [-1, 4])
    def test_an_index_outside(self, index):
        with pytest.raises(InvalidArgumentError, match=str(index)):
            slices([[1.0, 2.0]], [index]).to_dense()

    def test_no_dense_shape(self):
        with pytest.raises(InvalidArgumentError, match="dense_shape"):
            IndexedSlices([[1.0]], [0]).to_dense()


class TestReduce:
    def test_per_replica(self):
        same(reduce_values(SUM, f32([1, 2], [3, 4]), None, 2), [4, 6])
        same(reduce_values("mEaN", f32(1, 2), None, 2), 1.5)
        same(reduce_values("sum", f32([1, 2, 3], [], [4]), 0, 3), 10)
        same(reduce_values(SUM, PerReplica([0.25, 1.25]), None, 2), 1.5)
        same(reduce_values(SUM, Mirrored([np.float32(2)] * 3), None, 3), 6)

    @pytest.mark.parametrize("counts", [[2**31 - 1, 1], [2**31, 5], [5, -(2**40)]])
    def test_python_ints_do_not_overflow(self, counts):
        same(reduce_values(SUM, PerReplica(counts), None, 2), sum(counts), np.int64)
        same(reduce_values(MEAN, PerReplica(counts), None, 2), sum(counts) / 2, np.float64)

    def test_python_ints_whose_sum_is_small_are_int32(self):
        same(reduce_values(SUM, PerReplica([2, 3]), None, 2), 5, np.int32)

    def test_python_ints_whose_sum_fits_no_array(self):
        with pytest.raises(InvalidArgumentError, match="does not fit int64"):
            reduce_values(SUM, PerReplica([2**63 - 1, 1]), None, 2)
        same(reduce_values(MEAN, PerReplica([2**63 - 1, 1]), None, 2), 2.0**62, np.float64)
        with pytest.raises(InvalidArgumentError, match="does not fit int64"):
            reduce_values(MEAN, PerReplica([2**63, 1]), None, 2)

    @pytest.mark.parametrize("op", [SUM, MEAN])
    def test_one_component_comes_back_as_it_is(self, op):
        same(reduce_values(op, PerReplica([np.int32([1, 2])]), None, 1), [1, 2], np.int32)
        same(reduce_values(op, PerReplica([np.array([True])]), None, 1), [True], np.bool_)

    def test_over_an_axis_each_replica_sums_what_it_would_see(self):
        same(reduce_values(SUM, [f32(1, 2), np.float32(3)], 0, 2), 9)
        same(reduce_values(MEAN, [f32(1, 2), np.float32(3)], 0, 2), 2.25)
        with pytest.raises(TypeError, match="only numbers"):
            reduce_values(SUM, True, 0, 2)

    def test_own_number_of_components_counts_without_an_axis(self):
        same(reduce_values(MEAN, f32(1, 2, 6), None, 2), 3)
        same(reduce_values(SUM, f32([1], [2], [4]), 0, 2), 3)
        with pytest.raises(IndexError):
            reduce_values(SUM, f32([1], [2]), 0, 3)

    @pytest.mark.parametrize("value", [np.float32(2), np.zeros(2), 5, True, None, [1], {"a": f32(1, 2)}, Token(1)])
    def test_sum_of_a_plain_value_is_refused(self, value):
        with pytest.raises(ValueError, match="one value per replica"):
            reduce_values(SUM, value, None, 2)

    def test_plain_values(self):
        array = np.float32([1, 2])
        assert reduce_values(SUM, 0, None, 2) == 0
        assert reduce_values(SUM, np.float32(0), None, 2) == 0
        assert np.shares_memory(reduce_values(MEAN, array, None, 2), array)
        assert reduce_values(MEAN, None, None, 2) is None
        same(reduce_values(SUM, array, 0, 2), 6)
        same(reduce_values(SUM, [1, 2], 0, 2), 6, np.int32)
        same(reduce_values(MEAN, array, 0, 3), 1.5)
        same(reduce_values(SUM, 2.0, None, 1), 2)
        assert np.shares_memory(reduce_values(MEAN, array, None, 1), array)

    @pytest.mark.parametrize(
        ("op", "axis", "error"),
        [("max", None, ValueError), ("max", 0, ValueError), (3, None, AssertionError), (3, 0, TypeError)],
    )
    def test_wrong_op(self, op, axis, error):
        with pytest.raises(error):
            reduce_values(op, f32([1], [2]), axis, 2)

    def test_indexed_slices(self):
        value = PerReplica([slices([[1.0, 2], [3, 4]], [0, 2]), slices([[2.0, 4], [6, 8]], [2, 3])])
        total = reduce_values(SUM, value, None, 2)
        assert isinstance(total, IndexedSlices)
        same(total.values, [[1, 2], [3, 4], [2, 4], [6, 8]])
        same(total.indices, [0, 2, 2, 3], np.int32)
        assert total.dense_shape == (4, 2)
        same(reduce_values(MEAN, value, None, 2).values, [[0.5, 1], [1.5, 2], [1, 2], [3, 4]])
        same(reduce_values(SUM, value, 0, 2), [12, 18])

    def test_indexed_slices_beside_an_array(self):
        value = PerReplica([slices([[1.0, 2.0]], [0]), np.ones((4, 2), np.float32)])
        same(reduce_values(SUM, value, None, 2), [[2, 3], [1, 1], [1, 1], [1, 1]])

    @pytest.mark.parametrize(
        "other", [IndexedSlices([[1.0, 2.0]], [0], [5, 2]), IndexedSlices(np.ones((1, 2)), [0], [4, 2])]
    )
    def test_indexed_slices_of_different_wholes(self, other):
        with pytest.raises(InvalidArgumentError):
            reduce_values(SUM, PerReplica([slices([[1.0, 2.0]], [0]), other]), None, 2)


class TestGather:
    def test_per_replica(self):
        same(gather_values(f32([1, 2], [], [3]), 0, 3), [1, 2, 3])
        same(gather_values(PerReplica([slices([[1.0, 2.0]], [0])] * 2), 1, 2), [[1, 2] * 2] + [[0] * 4] * 3)
        with pytest.raises(InvalidArgumentError):
            gather_values(f32(1, 2), 0, 2)

    def test_plain_values_come_back_whatever_the_axis(self):
        array = np.zeros(2)
        assert np.shares_memory(gather_values(PerReplica([array]), 7, 1), array)
        assert np.shares_memory(gather_values(array, 7, 2), array)
        with pytest.raises(NotImplementedError):
            gather_values(slices([[1.0, 2.0]], [0]), 0, 2)


def test_enum_members_of_different_types_are_not_one_value():
    class Other(enum.Enum):
        SUM = "SUM"

    assert isinstance(regroup([SUM, Other.SUM]), PerReplica)


def test_what_differs_by_replica_is_written_whole_or_not_at_all():
    losses = PerReplica([0.5, 1.5])
    assert f"{losses}" == str(losses)
    with pytest.raises(TypeError, match=r"2 components is not a number to write as '\.3f'; reduce it"):
        f"{losses:.3f}"
