"""Compiled kernels against the reference, bit for bit; what is refused before memory is touched."""

import ctypes
import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.updates import ELEMENTWISE, HYPERPARAMETERS, assert_same_bits

from cs_proto.arithmetic.optimizers import ROWWISE
from cs_proto.errors import InvalidArgumentError
from cs_server.compute import kernels, object_loader
from cs_server.compute.kernels import KERNEL_DTYPES, BoundRows, apply_dense
from cs_server.compute.undo import Lane
from cs_server.rules import RULES, Array, Rule, reference

STEPS = 20
#: Elements and replicas. The longest arrays cost most: all but one number of replicas are slow tests.
SIZES: list[Any] = [(length, replicas) for length in (1, 7, 1000) for replicas in (1, 2, 3, 4)]
SIZES += [(100_003, 3), *(pytest.param(100_003, replicas, marks=pytest.mark.slow) for replicas in (1, 2, 4))]


def state_of(rule: Rule, length: int, dtype: str, replicas: int) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
    """Parameters, slots and gradients of many magnitudes, a few of them as odd as the dtype allows."""
    random = np.random.default_rng(length + replicas)

    def values() -> Array:
        return (random.standard_normal(length) * 10.0 ** random.integers(-6, 4, length)).astype(dtype)

    limits = np.finfo(dtype)
    tiny = [limits.smallest_subnormal, -3 * limits.smallest_subnormal, limits.tiny, limits.eps]
    odd = np.array([0.0, -0.0, 1.0, limits.max, -limits.max, np.inf, -np.inf, np.nan, *tiny], dtype)
    slots = tuple(np.full(length, value, dtype) for value in rule.initial(HYPERPARAMETERS))
    gradients = tuple(values() for _ in range(replicas))
    parameters = values()
    if length >= 1000:
        for array in (parameters, *gradients):
            where = random.choice(length, length // 10, replace=False)
            array[where] = random.choice(odd, length // 10)
    return parameters, slots, gradients


def with_gaps(length: int) -> Array:
    if length < 7:
        return np.array([[0, length]])
    third = length // 3
    return np.array([[1, third], [third, third], [third, third + 1], [third + 2, length - 1]])


@pytest.mark.parametrize(("length", "replicas"), SIZES)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_kernels_have_the_bits_of_the_reference(name: str, dtype: str, length: int, replicas: int) -> None:
    rule = RULES[name]
    parameters, slots, gradients = state_of(rule, length, dtype, replicas)
    expected, expected_slots = parameters.copy(), tuple(slot.copy() for slot in slots)
    untouched = parameters.copy()
    ranges = with_gaps(length)
    for gradient in gradients:
        gradient.flags.writeable = False
    for t in range(1, STEPS + 1):
        apply_dense(rule, ranges, parameters, slots, gradients, HYPERPARAMETERS, t)
        for start, stop in ranges:
            reference(
                rule,
                expected[start:stop],
                [gradient[start:stop] for gradient in gradients],
                tuple(slot[start:stop] for slot in expected_slots),
                HYPERPARAMETERS,
                t,
            )
    for found, wanted in zip((parameters, *slots), (expected, *expected_slots), strict=True):
        assert_same_bits(found, wanted)
    gaps = np.ones(length, bool)
    for start, stop in ranges:
        gaps[start:stop] = False
    assert_same_bits(parameters[gaps], untouched[gaps])


@pytest.mark.parametrize("name", sorted(ROWWISE))
def test_a_rule_of_rows_takes_no_ranges(name: str) -> None:
    w, slot, g = np.ones(4, "float32"), np.ones(4, "float32"), np.ones(4, "float32")
    with pytest.raises(InvalidArgumentError, match=f"{name} updates rows, not ranges of elements"):
        apply_dense(RULES[name], np.array([[0, 4]]), w, (slot,), (g,), HYPERPARAMETERS, 1)


@pytest.mark.parametrize("dtype", ["float16", "complex64"])
def test_dtypes_without_kernel_are_served_by_the_reference(dtype: str) -> None:
    rule = RULES["adam"]
    parameters, gradient = np.ones(9, dtype), np.full(9, 0.5, dtype)
    slots = (np.zeros(9, dtype), np.zeros(9, dtype))
    expected, expected_slots = np.ones(4, dtype), (np.zeros(4, dtype), np.zeros(4, dtype))
    apply_dense(rule, np.array([[1, 5], [7, 9]]), parameters, slots, (gradient, gradient), HYPERPARAMETERS, 1)
    reference(rule, expected, [gradient[:4], gradient[:4]], expected_slots, HYPERPARAMETERS, 1)
    np.testing.assert_array_equal(parameters[1:5], expected)
    np.testing.assert_array_equal(parameters[7:9], expected[:2])
    np.testing.assert_array_equal(parameters[[0, 5, 6]], 1)
    np.testing.assert_array_equal(slots[0][[0, 5, 6]], 0)


def test_no_range_is_no_update() -> None:
    w, g = np.ones(3, "float32"), np.ones(3, "float32")
    apply_dense(RULES["sgd"], np.empty((0, 2), np.int64), w, (), (g,), HYPERPARAMETERS, 1)
    np.testing.assert_array_equal(w, 1)


def test_replicas_may_share_a_gradient() -> None:
    w, g = np.zeros(3, "float64"), np.ones(3, "float64")
    apply_dense(RULES["sgd"], np.array([[0, 3]]), w, (), (g, g, g), HYPERPARAMETERS | {"learning_rate": 1}, 1)
    np.testing.assert_array_equal(w, -3)


def test_threads_may_update_different_ranges_at_once() -> None:
    rule, length, parts = RULES["adam"], 400_000, 8
    parameters, slots, gradients = state_of(rule, length, "float32", 2)
    expected, expected_slots = parameters.copy(), tuple(slot.copy() for slot in slots)
    edges = np.linspace(0, length, parts + 1).astype(np.int64)
    with ThreadPoolExecutor(4) as pool:
        for t in (1, 2):
            done = [
                pool.submit(
                    apply_dense, rule, edges[None, k : k + 2].copy(), parameters, slots, gradients, HYPERPARAMETERS, t
                )
                for k in range(parts)
            ]
            for future in done:
                future.result()
            reference(rule, expected, gradients, expected_slots, HYPERPARAMETERS, t)
    for found, wanted in zip((parameters, *slots), (expected, *expected_slots), strict=True):
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("dtype", [*KERNEL_DTYPES, "float16"])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_updates_in_turn_have_the_bits_of_one_after_the_other(dtype: str, is_scaled: bool) -> None:
    """Of two rules over ranges of the same arrays; float16 has no kernel."""
    parameters, slots, gradients = state_of(RULES["adagrad"], 1000, dtype, 2)
    expected, expected_slots = parameters.copy(), tuple(slot.copy() for slot in slots)
    scale = (0.5, 2.0, 0.25) if is_scaled else ()
    ranges = [np.array([[0, 300], [400, 401]]), np.array([[401, 1000]])]
    numbers = [kernels.UpdateNumbers(RULES[name], parameters.dtype, 2) for name in ("adagrad", "sgd")]
    values = np.array([0.25, 9.0])
    factors = [kernels.Factors(values, np.zeros(len(each), np.int64)) for each in ranges]
    first = kernels.BoundRanges(numbers[0], ranges[0], parameters, slots, gradients, factors=factors[0])
    second = kernels.BoundRanges(numbers[1], ranges[1], parameters, (), gradients, factors=factors[1])
    run = kernels.in_turn([bound.update(is_scaled) for bound in (first, second)])
    for t in (1, 2, 3):
        for each in numbers:
            each.set(HYPERPARAMETERS | {"learning_rate": 0.1 * t}, t)
            each.bound(scale[:-1])
        run()
        for rule, own, places in ((RULES["adagrad"], expected_slots, ranges[0]), (RULES["sgd"], (), ranges[1])):
            for start, stop in places.tolist():
                part = slice(start, stop)
                taken = [gradient[part] for gradient in gradients]
                given = HYPERPARAMETERS | {"learning_rate": 0.1 * t}
                reference(rule, expected[part], taken, tuple(slot[part] for slot in own), given, t, scale)
    for found, wanted in zip((parameters, *slots), (expected, *expected_slots), strict=True):
        assert_same_bits(found, wanted)


def test_a_kernel_that_fails_ends_the_updates_in_turn() -> None:
    parameters, gradient = np.zeros(4), np.ones(4)
    numbers = kernels.UpdateNumbers(RULES["sgd"], parameters.dtype, 1)
    numbers.set(HYPERPARAMETERS | {"learning_rate": 1.0}, 1)
    updates = [
        kernels.BoundRanges(numbers, np.array([[at, at + 1]]), parameters, (), (gradient,)).update(is_scaled=False)
        for at in range(3)
    ]
    assert all(isinstance(update, object_loader.Bound) for update in updates)
    failing = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)(lambda *words: 3)
    updates[1].call = (ctypes.cast(failing, ctypes.c_void_p).value, updates[1].call[1])
    with pytest.raises(RuntimeError, match="ended with status 3"):
        kernels.in_turn(updates)()
    assert parameters.tolist() == [-1, 0, 0, 0]


class _Subclass(np.ndarray[Any, Any]):
    pass


def _misaligned(array: Array) -> Array:
    raw = np.zeros(array.nbytes + 1, np.uint8)
    return raw[1:].view(array.dtype)


def _read_only(array: Array) -> Array:
    array = array.copy()
    array.flags.writeable = False
    return array


W, M, V, G = (np.full(8, value, "float32") for value in (1.0, 2.0, 3.0, 4.0))
ALL = np.array([[0, 8]])
SHARED = np.zeros(12, "float32")
BAD_INPUT: dict[str, tuple[dict[str, Any], str]] = {
    "slot missing": ({"slots": (M,)}, r"adam has the slots \('m', 'v'\), 1 arrays"),
    "slot too many": ({"slots": (M, V, G.copy())}, "3 arrays"),
    "no gradient": ({"gradients": ()}, "at least one replica"),
    "gradient dtype": ({"gradients": (G, G.astype("float64"))}, r"gradient of replica 1: float64\(8,\) does not fit"),
    "gradient length": ({"gradients": (G[:7],)}, r"gradient of replica 0: float32\(7,\) does not fit"),
    "gradient strided": ({"gradients": (np.zeros(16, "float32")[::2],)}, "contiguous"),
    "gradient misaligned": ({"gradients": (_misaligned(G),)}, "gradient of replica 0: must be aligned"),
    "gradient list": ({"gradients": ([0.0] * 8,)}, r"must be a numpy.ndarray, not list"),
    "slot subclass": ({"slots": (M, V.view(_Subclass))}, "v: must be a numpy.ndarray, not _Subclass"),
    "slot length": ({"slots": (M, np.zeros(9, "float32"))}, "v: "),
    "slot read-only": ({"slots": (_read_only(M), V)}, "m: is read-only"),
    "parameters read-only": ({"parameters": _read_only(W)}, "parameters: is read-only"),
    "parameters 2-D": ({"parameters": W.reshape(2, 4)}, "parameters: must be 1-D"),
    "byte order": (
        {"parameters": W.astype(">f4"), "slots": (M.astype(">f4"), V.astype(">f4")), "gradients": (G.astype(">f4"),)},
        "byte order",
    ),
    "integers": (
        {"parameters": W.astype("i4"), "slots": (M.astype("i4"), V.astype("i4")), "gradients": (G.astype("i4"),)},
        "not int32",
    ),
    "slot is parameters": ({"slots": (M, W)}, "must not overlap"),
    "slot is gradient": ({"slots": (M, G)}, "must not overlap"),
    "gradient over slot": ({"slots": (M, SHARED[:8]), "gradients": (G, SHARED[4:])}, "must not overlap"),
    "range beyond": ({"ranges": np.array([[0, 9]])}, r"ranges: \[0, 9\] does not lie ascending inside \[0, 8\]"),
    "range before": ({"ranges": np.array([[-1, 4]])}, r"\[-1, 4\]"),
    "range backwards": ({"ranges": np.array([[4, 2]])}, r"\[4, 2\]"),
    "ranges overlap": ({"ranges": np.array([[0, 4], [3, 8]])}, r"\[3, 8\] does not lie ascending inside \[4, 8\]"),
    "ranges unordered": ({"ranges": np.array([[4, 8], [0, 4]])}, r"\[0, 4\]"),
    "ranges dtype": ({"ranges": ALL.astype(np.int32)}, "int64"),
    "ranges shape": ({"ranges": np.array([0, 8])}, "shape"),
    "ranges list": ({"ranges": [[0, 8]]}, "int64"),
    "ranges read-only": ({"ranges": _read_only(ALL)}, "ranges: must be contiguous, aligned and writable"),
    "update 0": ({"t": 0}, "counted from 1"),
    "hyperparameter": ({"hyperparameters": {"learning_rate": 0.1}}, "adam needs the hyperparameter 'beta_1'"),
    "foreign rule": ({"rule": Rule("adam", lambda *_: (), lambda *_: ())}, "not a rule of the table"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_refused_and_nothing_changed(case: str) -> None:
    changes, message = BAD_INPUT[case]
    given: dict[str, Any] = {
        "rule": RULES["adam"],
        "ranges": ALL,
        "parameters": W,
        "slots": (M, V),
        "gradients": (G,),
        "hyperparameters": HYPERPARAMETERS,
        "t": 1,
    }
    with pytest.raises(InvalidArgumentError, match=message):
        apply_dense(**given | changes)
    for array, value in ((W, 1), (M, 2), (V, 3), (G, 4), (SHARED, 0)):
        np.testing.assert_array_equal(array, value)


TABLE, VALUES, ROWS = np.ones((4, 2), "float32"), np.ones((2, 2), "float32"), np.array([3, 0])
BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "rows dtype": ({"gradients": [(VALUES, ROWS.astype("i4"))]}, "float32 of rows int32 must be float32 and int64"),
    "rows 2-D": ({"gradients": [(VALUES.reshape(1, 2, 2), ROWS.reshape(1, 2))]}, "do not fit"),
    "rows strided": ({"gradients": [(VALUES, np.array([3, 0, 0])[::2])]}, "contiguous"),
    "rows misaligned": ({"gradients": [(VALUES, _misaligned(ROWS))]}, "aligned"),
    "more rows than values": ({"gradients": [(VALUES, np.array([0, 1, 2]))]}, "do not fit"),
    "values of another width": ({"gradients": [(np.ones((2, 3), "float32"), ROWS)]}, "do not fit"),
    "values dtype": ({"gradients": [(VALUES.astype("float64"), ROWS)]}, "float64 of rows int64 must be float32"),
    "values strided": ({"gradients": [(np.ones((2, 4), "float32")[:, ::2], ROWS)]}, "contiguous"),
    "values misaligned": ({"gradients": [(_misaligned(VALUES.reshape(-1)).reshape(2, 2), ROWS)]}, "aligned"),
    "values are parameters": ({"gradients": [(VALUES, ROWS), (TABLE[:2], ROWS)]}, "must not overlap"),
    "no replica": ({"gradients": []}, "at least one replica"),
    "slot too many": ({"slots": (TABLE.copy(),)}, "1 arrays"),
    "parameters read-only": ({"parameters": _read_only(TABLE)}, "read-only"),
    "dtype": ({"parameters": TABLE.astype("float16")}, "sgd is not compiled for float16"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_are_refused_and_nothing_changed(case: str) -> None:
    changes, message = BAD_ROWS[case]
    given: dict[str, Any] = {"parameters": TABLE, "slots": (), "gradients": [(VALUES, ROWS)]} | changes
    with pytest.raises(InvalidArgumentError, match=message):
        BoundRows(RULES["sgd"], given["parameters"], given["slots"]).take(given["gradients"])
    np.testing.assert_array_equal(TABLE, 1)


@pytest.mark.parametrize("shares", [1, 2, 3, 7])
def test_every_row_falls_to_one_share(shares: int) -> None:
    rows = np.array([*range(0, 4000, 4), *range(10_000, 10_500), 3, 3, -5, 1 << 40])
    counts, values = np.zeros((1 << 20, 1)), np.ones((len(rows), 1))
    bound = BoundRows(RULES["sgd"], counts, ())
    bound.take([(values, rows)])
    moved = []
    for share in range(shares):
        before = counts.copy()
        bound.apply(share, shares, Lane(), HYPERPARAMETERS | {"learning_rate": -1.0}, 1)
        moved.append(np.count_nonzero(counts != before))
    assert sum(moved) == 1501
    assert min(moved) > 1501 // shares // 2
    assert np.unique(counts, return_counts=True)[1].tolist() == [(1 << 20) - 1501, 1500, 1]


def test_memory_for_many_rows_is_given_back() -> None:
    count = 100_000
    table, values, rows = np.ones((count, 1)), np.ones((count, 1)), np.arange(count)
    bound = BoundRows(RULES["sgd"], table, ())
    bound.take([(values, rows)])
    tracemalloc.start()
    try:
        for share in (0, 1):
            bound.apply(share, 2, Lane(), HYPERPARAMETERS | {"learning_rate": 2.0}, 1)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < kernels.KEPT_SHARE_NBYTES < 40 * count < most
    assert np.unique(table).tolist() == [-1]


def test_a_share_that_could_not_be_made_is_made_by_the_next_update(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise MemoryError

    table, lane = np.ones((2, 1)), Lane()
    bound = BoundRows(RULES["sgd"], table, ())
    bound.take([(np.ones((1, 1)), np.array([1]))])
    with monkeypatch.context() as once:
        once.setattr(kernels, "_bound", full)
        with pytest.raises(MemoryError):
            bound.apply(0, 1, lane, HYPERPARAMETERS, 1)
    bound.apply(0, 1, lane, HYPERPARAMETERS | {"learning_rate": 2.0}, 1)
    assert table.tolist() == [[1], [-1]]


# The kept code. Every load below is a process of its own, as a server is.


def test_code_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.code")
    (tmp_path / "device.code").symlink_to("/dev/zero")
    for name in ("pipe.code", "device.code"):
        assert kernels._read(tmp_path / name) is None
        kernels._keep(b"code", tmp_path / name)
        assert kernels._read(tmp_path / name) == b"code"


def test_code_that_cannot_be_kept_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x.code").mkdir()
    kernels._keep(b"code", tmp_path / "x.code")
    assert os.listdir(tmp_path) == ["x.code"]
    assert "x.code cannot be kept" in caplog.text
