"""Sparse gradients: the merge and the rules by rows against plain NumPy, bit for bit, over many shapes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.examples import examples
from tests.harness.updates import HYPERPARAMETERS, assert_same_bits

from cs_proto.arithmetic.optimizers import slot_shape
from cs_server.compute import kernels, sparse
from cs_server.compute.kernels import KERNEL_DTYPES
from cs_server.compute.sparse import Merged, Table, merge, merge_reference
from cs_server.compute.undo import KEPT_NBYTES, Lane
from cs_server.rules import RULES, Array, Rule, reference

DTYPES = [*KERNEL_DTYPES, "float16", "complex64"]
ROWS = ("sgd", "sgd_momentum", "sgd_nesterov", "adagrad", "rmsprop_momentum", "rmsprop_centered_momentum")
ROWS_OF_OTHERS = ("torch_sgd", "torch_sparse_adam", "torch_adagrad", "optax_sgd", "optax_adagrad")
ROWS += ("adamax", "adadelta", "ftrl", "ftrl_power", "rowwise_adagrad")


def one_by_one(items: Sequence[Any], work: Callable[[Sequence[Any], Lane], None]) -> None:
    for item in items:
        work([item], Lane())


@st.composite
def gradients(draw: st.DrawFn, dtype: str) -> tuple[int, int, list[tuple[Array, Array]]]:
    """Height and width of a table and what one to three replicas bring; rows named again and again, or none."""
    height, width = draw(st.integers(1, 40)), draw(st.integers(1, 9))
    seed = draw(st.integers(0, 1 << 32))
    random = np.random.default_rng(seed)
    brought = []
    for count in draw(st.lists(st.integers(0, 60), min_size=1, max_size=3)):
        values = (random.standard_normal((count, width)) * 10.0 ** random.integers(-3, 2, (count, width))).astype(dtype)
        values[random.random((count, width)) < 0.1] = -0.0
        brought.append((values, random.integers(0, height, count)))
    return height, width, brought


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_the_merge_adds_in_the_order_of_replicas_and_places(dtype: str, data: st.DataObject) -> None:
    height, width, brought = data.draw(gradients(dtype))
    found = merge(brought, height, width)
    by_row: dict[int, Array] = {}
    for values, indices in brought:
        for value, row in zip(values, indices.tolist(), strict=True):
            by_row[row] = value.copy() if row not in by_row else by_row[row] + value
    assert found.rows.tolist() == list(by_row)
    assert_same_bits(found.sums, np.array(list(by_row.values()), dtype).reshape(-1, width))
    expected = merge_reference([values for values, _ in brought], [indices for _, indices in brought])
    assert found.rows.tolist() == expected.rows.tolist()
    assert_same_bits(found.sums, expected.sums)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_merge_leaves_out_rows_that_are_not_there_and_takes_read_only_or_misaligned_arrays(dtype: str) -> None:
    values = np.arange(8, dtype=dtype).reshape(4, 2)
    values.flags.writeable = False
    raw = np.zeros(4 * 8 + 1, np.uint8)
    indices = raw[1:].view(np.int64)
    indices[:] = [1, -1, 3, 1]
    found = merge([(values, indices), (values, np.array([7, 2, 1 << 62, 1]))], 3, 2)
    assert found.rows.tolist() == [1, 2]
    assert found.sums.tolist() == np.stack([values[0] + values[3] + values[3], values[1]]).tolist()


def expected_after(
    rule: Rule, parameters: Array, slots: tuple[Array, ...], gradient: Merged, is_lazy: bool, t: int
) -> tuple[Array, ...]:
    """The dense rule under a gradient that is zero but for the named rows, and then only what may move."""
    dense = np.zeros_like(parameters)
    dense[gradient.rows] = gradient.sums
    moved = [array.copy() for array in (parameters, *slots)]
    reference(rule, moved[0], [dense], tuple(moved[1:]), HYPERPARAMETERS, t)
    for position, (after, before) in enumerate(zip(moved, (parameters, *slots), strict=True)):
        moving = "rows" if is_lazy else "all" if rule.decays else rule.moves
        if moving == "rows" or (moving == "slots" and position == 0):
            stays = np.ones(len(before), bool)
            stays[gradient.rows] = False
            after[stays] = before[stays]
    return tuple(moved)


def slots_of(rule: Rule, shape: tuple[int, int], dtype: str) -> tuple[Array, ...]:
    return tuple(np.full(slot_shape(rule.name, shape), value, dtype) for value in rule.initial(HYPERPARAMETERS))


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name in RULES for dtype in DTYPES if RULES[name].takes(np.dtype(dtype))]
)
@settings(max_examples=examples(4), deadline=None)
@given(data=st.data(), piece=st.sampled_from([1, 16, 1 << 15]), lanes=st.integers(1, 5))
def test_rules_by_rows_have_the_bits_of_the_dense_reference(
    name: str, dtype: str, data: st.DataObject, piece: int, lanes: int
) -> None:
    rule = RULES[name]
    height, width, brought = data.draw(gradients(dtype))
    gradient = merge(brought, height, width)
    for is_lazy in (False, True):
        random = np.random.default_rng(height)
        parameters = random.standard_normal((height, width)).astype(dtype)
        slots = slots_of(rule, (height, width), dtype)
        given = HYPERPARAMETERS | ({"lazy": 1.0} if is_lazy else {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sparse, "_PIECE", piece)
            for t in (1, 2):
                expected = expected_after(rule, parameters, slots, gradient, is_lazy, t)
                Table(rule, parameters, slots).apply(brought, given, t, one_by_one, lanes)
                for found, wanted in zip((parameters, *slots), expected, strict=True):
                    assert_same_bits(found, wanted)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("dtype", [*KERNEL_DTYPES, "float16"])
@pytest.mark.parametrize("width", [15, 16, 17, 127, 128, 129, 256, 257, 1025, 5000])
def test_means_of_rows_of_any_width_have_the_bits_of_the_reference(width: int, dtype: str, keeps: bool) -> None:
    """Narrower and wider than the partial sums, and than what compiled code does at a time."""
    rule, height, random = RULES["rowwise_adagrad"], 9, np.random.default_rng(width)
    lane = Lane(np.zeros(64 + 4 * KEPT_NBYTES, np.uint8)) if keeps else Lane()
    parameters = random.standard_normal((height, width)).astype(dtype)
    slots = slots_of(rule, (height, width), dtype)
    brought = [(random.standard_normal((k, width)).astype(dtype), random.integers(0, height, k)) for k in (11, 0, 4)]
    phases = itertools.count(1)

    def in_turn(items: Sequence[Any], work: Callable[[Sequence[Any], Lane], None]) -> None:
        lane.enter(next(phases))
        work(items, lane)

    for t in (1, 2):
        expected = expected_after(rule, parameters, slots, merge(brought, height, width), False, t)
        Table(rule, parameters, slots).apply(brought, HYPERPARAMETERS, t, in_turn, 1)
        for found, wanted in zip((parameters, *slots), expected, strict=True):
            assert_same_bits(found, wanted)


def test_rules_that_move_named_rows_only_are_those_of_the_table() -> None:
    assert {name for name, rule in RULES.items() if rule.moves == "rows"} == {*ROWS, *ROWS_OF_OTHERS}
    assert {name for name, rule in RULES.items() if rule.moves == "slots"} == {
        "rmsprop",
        "rmsprop_centered",
        "nadam",
    } | {
        "torch_rmsprop",
        "torch_rmsprop_centered",
        "torch_adadelta",
        "optax_rmsprop",
        "optax_rmsprop_centered",
    }


def test_weight_decay_moves_every_row_unless_the_optimizer_is_lazy() -> None:
    decaying = {name for name, rule in RULES.items() if rule.decays}
    assert decaying == {name for name, rule in RULES.items() if name.startswith("torch") and rule.moves != "all"} - {
        "torch_sparse_adam"
    }
    for name in decaying:
        assert RULES[name].moving(HYPERPARAMETERS) == "all"
        assert RULES[name].moving(HYPERPARAMETERS | {"weight_decay": 0.0}) == RULES[name].moves
        assert RULES[name].moving(HYPERPARAMETERS | {"lazy": 1.0}) == "rows"


@pytest.mark.parametrize("name", [*ROWS, *ROWS_OF_OTHERS, "adam"])
def test_the_work_is_that_of_the_named_rows(name: str) -> None:
    rule = RULES[name]
    table = np.ones((100_000, 4), np.float32)
    slots = slots_of(rule, table.shape, "float32")
    gradients = [(np.ones((4, 4), np.float32), np.array([5, 90_000, -1, 100_000]))]
    pieces: list[Any] = []

    def counting(items: Sequence[Any], work: Callable[[Sequence[Any], Lane], None]) -> None:
        pieces.extend(items)
        one_by_one(items, work)

    Table(rule, table, slots).apply(gradients, HYPERPARAMETERS | {"lazy": 1.0}, 1, counting, 8)
    assert len(pieces) == 1
    assert np.flatnonzero((table != 1).any(axis=1)).tolist() == [5, 90_000]


@pytest.mark.parametrize("name", ["adam", "nadam"])
def test_no_kernel_of_rows_is_made_before_an_update_goes_by_rows(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(kernels, "_kernels", {})
    rule, gradients = RULES[name], [(np.ones((1, 2), np.float32), np.array([1]))]
    table = Table(rule, np.ones((3, 2), np.float32), tuple(np.ones((3, 2), np.float32) for _ in rule.slots))
    table.apply(gradients, HYPERPARAMETERS, 1, one_by_one, 1)
    assert {made for made, _ in kernels._kernels} == {name, "merge"}
    table.apply(gradients, HYPERPARAMETERS | {"lazy": 1.0}, 2, one_by_one, 1)
    assert {made for made, _ in kernels._kernels} == {name, "merge", f"{name}_rows"}


@pytest.mark.parametrize("is_lazy", [False, True])
def test_threads_share_the_pieces(is_lazy: bool) -> None:
    rule, height, width = RULES["adam"], 20_000, 8
    given = HYPERPARAMETERS | {"lazy": float(is_lazy)}
    shares: list[Any] = []
    random = np.random.default_rng(1)
    values, indices = random.standard_normal((30_000, width)).astype("f4"), random.integers(0, height, 30_000)
    gradient = merge([(values, indices)], height, width)
    parameters = random.standard_normal((height, width)).astype("f4")
    slots = tuple(np.zeros((height, width), "f4") for _ in rule.slots)
    expected = expected_after(rule, parameters, slots, gradient, is_lazy, 1)
    with ThreadPoolExecutor(4) as pool:

        def spread(items: Sequence[Any], work: Callable[[Sequence[Any], Lane], None]) -> None:
            shares.extend(items)
            list(pool.map(lambda item: work([item], Lane()), items))

        Table(rule, parameters, slots).apply([(values, indices)], given, 1, spread, 3)
    assert len(shares) == 3
    for found, wanted in zip((parameters, *slots), expected, strict=True):
        assert_same_bits(found, wanted)


@pytest.mark.parametrize(("height", "width"), [(0, 3), (3, 0)])
@pytest.mark.parametrize("name", ["sgd", "adam", "nadam"])
def test_an_empty_table_stays_one(name: str, height: int, width: int) -> None:
    rule = RULES[name]
    empty = np.zeros((height, width), "f4")
    gradients = [(np.zeros((2, width), "f4"), np.array([0, 1]))]
    Table(rule, empty, tuple(empty.copy() for _ in rule.slots)).apply(gradients, HYPERPARAMETERS, 1, one_by_one, 2)
