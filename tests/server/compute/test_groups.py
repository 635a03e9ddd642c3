"""Steps of several optimizers in one apply: the bits of single applies, weights, and one bound for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.server.compute.test_executor import Bytes, commit

from cs_proto.arrays import array_of
from cs_server.compute import plans
from cs_server.compute.clipping import Clipping, factors_together, square_of
from cs_server.compute.executor import Executor
from cs_server.events import Apply, Commit, Dense, Rows, Update
from cs_server.rules import RULES, reference, summed

RULES_HERE = ("sgd", "adam", "adagrad", "ftrl_power")
GIVEN = {
    "learning_rate": 0.1,
    "beta_1": 0.9,
    "beta_2": 0.999,
    "epsilon": 1e-7,
    "initial_accumulator_value": 0.1,
    "l1_regularization_strength": 0.0,
    "l2_regularization_strength": 0.0,
    "l2_shrinkage_regularization_strength": 0.0,
    "learning_rate_power": -0.25,
    "beta": 0.0,
}
SIZE, TABLE, REPLICAS = 1000, (20, 3), 3
WEIGHTS = (0.25, 0.0, 1 / 3)


class Model:
    """For each rule a part of one slab of each dtype, and a table."""

    def __init__(self) -> None:
        random = np.random.default_rng(1)
        count = len(RULES_HERE)

        def positive(length: int, dtype: str) -> np.ndarray:
            return np.abs(random.standard_normal(length)).astype(dtype)

        self.arrays: dict[str, np.ndarray] = {}
        for dtype in ("float32", "float64"):
            for name in ("w", "a", "b"):
                self.arrays[f"{name}/{dtype}"] = positive(count * SIZE, dtype)
            for replica in range(REPLICAS):
                self.arrays[f"g{replica}/{dtype}"] = random.standard_normal(count * SIZE).astype(dtype)
        for name in ("table", "table/a", "table/b"):
            self.arrays[name] = positive(math.prod(TABLE) * count, "float32")
        self.rows = [
            (random.standard_normal((9, TABLE[1])).astype("float32"), random.integers(0, TABLE[0], 9))
            for _ in range(REPLICAS)
        ]

    def update(self, which: int, **given: float) -> Update:
        rule = RULES_HERE[which]
        slots = tuple("ab"[: len(RULES[rule].slots)])
        dense = tuple(
            Dense(
                dtype,
                ((which * SIZE, which * SIZE + 400), (which * SIZE + 401, (which + 1) * SIZE)),
                f"w/{dtype}",
                tuple(f"{slot}/{dtype}" for slot in slots),
                tuple(f"g{replica}/{dtype}" for replica in range(REPLICAS)),
            )
            for dtype in ("float32", "float64")
        )
        rows = tuple((array_of(values), array_of(indices)) for values, indices in self.rows)
        first = which * math.prod(TABLE)
        table = Rows("float32", first, TABLE, "table", tuple(f"table/{slot}" for slot in slots), rows)
        return Update(rule, tuple((GIVEN | given).items()), 2, dense, (table,))

    def after(self, *operations: Apply, threads: int = 1) -> dict[str, bytes]:
        arrays = {name: array.copy() for name, array in self.arrays.items()}
        for operation in operations:
            commit(Bytes(**arrays), operation, threads=threads)
        return {name: array.tobytes() for name, array in arrays.items()}


@pytest.fixture(autouse=True)
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_ELEMENTS_PER_THREAD", 300)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.mark.parametrize("weights", [(), WEIGHTS, (0.0, 0.0, 0.0)], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_together_they_have_the_bits_of_one_after_the_other(
    model: Model, threads: int, weights: tuple[float, ...]
) -> None:
    steps = [model.update(which) for which in range(len(RULES_HERE))]
    alone = model.after(*(Apply((step,), (), weights) for step in steps))
    assert alone != model.after()
    assert model.after(Apply(tuple(steps), (), weights), threads=threads) == alone


def test_the_dense_parts_of_all_are_one_phase(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    phases = []
    plain = Executor._phase

    def counted(self: Executor, items: Sequence[Any], work: Any) -> None:
        phases.append(len(items))
        plain(self, items, work)

    monkeypatch.setattr(Executor, "_phase", counted)
    steps = [model.update(which) for which in range(len(RULES_HERE))]
    without_rows = tuple(Update(step.rule, step.hyperparameters, step.t, step.dense) for step in steps)
    model.after(Apply(without_rows, (), WEIGHTS, 1.0), threads=2)
    assert phases == [2]


@pytest.mark.parametrize("rule", ["adam", "ftrl_power"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
def test_weights_have_the_bits_of_the_reference(rule: str, dtype: str) -> None:
    if not RULES[rule].takes(np.dtype(dtype)):
        pytest.skip("this rule compares")
    random = np.random.default_rng(2)
    names = ("w", *RULES[rule].slots, "g0", "g1", "g2")
    arrays = {name: np.abs(random.standard_normal(SIZE)).astype(dtype) for name in names}
    arrays["g1"][:] = np.nan  # it has no weight
    expected = {name: array.copy() for name, array in arrays.items()}
    own = tuple(expected[slot] for slot in RULES[rule].slots)
    gradients = [expected[f"g{replica}"] for replica in range(REPLICAS)]
    reference(RULES[rule], expected["w"], gradients, own, GIVEN, 3, (*WEIGHTS, 1.0))
    part = Dense(dtype, ((0, SIZE),), "w", RULES[rule].slots, ("g0", "g1", "g2"))
    commit(Bytes(**arrays), Apply((Update(rule, tuple(GIVEN.items()), 3, (part,)),), (), WEIGHTS))
    assert np.isfinite(arrays["w"]).all()
    for name in names:
        if RULES[rule].is_compiled:
            assert arrays[name].tobytes() == expected[name].tobytes(), name
        else:  # a power that NumPy rounds differently in the middle of an array and at its end
            np.testing.assert_allclose(arrays[name], expected[name], rtol=1e-2 if dtype == "float16" else 1e-5)


@pytest.mark.parametrize("bounds", [{}, {"clipvalue": 0.4}, {"global_clipnorm": 1e9}], ids=str)
def test_rows_of_a_replica_without_weight_are_not_named(bounds: dict[str, float]) -> None:
    table = np.zeros(8, np.float32)
    one = (np.ones((2, 2), np.float32), np.array([0, 1]))
    nan = (np.full((1, 2), np.nan, np.float32), np.array([2]))
    rows = Rows("float32", 0, (4, 2), "w", (), tuple((array_of(v), array_of(i)) for v, i in (one, nan, one)))
    update = Update("sgd", (("learning_rate", -1.0), *bounds.items()), 1, (), (rows,))
    commit(Bytes(w=table), Apply((update,), (), (0.25, 0.0, 0.125)))
    assert table.tolist() == [0.375] * 4 + [0.0] * 4


def test_one_bound_holds_for_all_of_them(model: Model) -> None:
    steps = [model.update(which) for which in (0, 1)]
    gradients = [model.arrays[f"g{replica}/{dtype}"] for dtype in ("float32", "float64") for replica in range(3)]
    squares = []
    for three in (gradients[:3], gradients[3:]):
        for which in (0, 1):
            for first, last in ((0, 400), (401, SIZE)):
                part = [each[which * SIZE :][first:last] for each in three]
                squares.append(square_of(summed(part, WEIGHTS, part[0].dtype)))
    table = np.zeros(TABLE, np.float32)
    for (values, indices), weight in zip(model.rows, WEIGHTS, strict=True):
        np.add.at(table, indices, values * np.float32(weight))
    norm = math.sqrt(sum(squares) + 2 * square_of(table))
    bound, epsilon = norm / 3, 0.5
    factor = bound / (norm + epsilon)
    found = model.after(Apply(tuple(steps), (), WEIGHTS, bound, epsilon))
    w = np.frombuffer(found["w/float64"])
    total = summed([each[:400] for each in gradients[3:]], WEIGHTS, np.dtype("float64"))
    np.testing.assert_allclose(w[:400], model.arrays["w/float64"][:400] - 0.1 * factor * total, rtol=1e-6)
    after = np.frombuffer(found["table"], np.float32)[: math.prod(TABLE)].reshape(TABLE)
    before = model.arrays["table"][: math.prod(TABLE)].reshape(TABLE)
    np.testing.assert_allclose(after, before - np.float32(0.1 * factor) * table, rtol=1e-5)
    assert model.after(Apply(tuple(steps), (), WEIGHTS, bound, epsilon), threads=3) == found


def test_the_bound_does_not_depend_on_the_groups(model: Model) -> None:
    """One optimizer for all variables, or each of two for a half of them."""

    def part(*ranges: tuple[int, int]) -> Update:
        names = tuple(f"g{replica}/float32" for replica in range(REPLICAS))
        return Update("sgd", (("learning_rate", 0.1),), 1, (Dense("float32", ranges, "w/float32", (), names),))

    whole = Apply((part((0, 100), (100, 350), (360, 600)),), (), (), 0.5, 1e-6)
    halves = Apply((part((0, 100), (360, 600)), part((100, 350))), (), (), 0.5, 1e-6)
    assert model.after(whole) == model.after(halves) != model.after()


def test_the_bounds_of_an_optimizer_come_before_the_common_one(model: Model) -> None:
    free, bounded = Clipping(None, None, None), Clipping(None, 3.0, None)
    own, common = factors_together([free, bounded], [[16.0], [36.0]], 2.5, 0.0)
    assert (own, common) == ([[1.0], [0.5]], 0.5)
    steps = (model.update(0), model.update(1, clipnorm=1.0), model.update(2, clipvalue=0.25))
    for bound in (0.5, None):
        found = model.after(Apply(steps, (), WEIGHTS, bound))
        assert model.after(Apply(steps, (), WEIGHTS, bound), threads=3) == found


@pytest.mark.parametrize(
    ("squares", "bound", "epsilon", "factor"),
    [
        ([9.0, 16.0], 2.5, 0.0, 0.5),
        ([9.0, 16.0], 5.0, 0.0, 1.0),
        ([9.0, 16.0], 5.0, 1.0, 5 / 6),
        ([9.0, 16.0], 0.0, 0.0, 0.0),
        ([0.0, 0.0], 0.0, 0.0, 1.0),
        ([0.0, 0.0], 1.0, 1e-6, 1.0),
        ([math.inf, 1.0], 1.0, 0.0, 0.0),
        ([math.nan, 1.0], 1.0, 0.0, math.nan),
        ([1e308, 1e308], 1.0, 0.0, 0.0),
    ],
)
def test_the_common_factor(squares: list[float], bound: float, epsilon: float, factor: float) -> None:
    _, found = factors_together([Clipping(None, None, None)] * 2, [squares[:1], squares[1:]], bound, epsilon)
    np.testing.assert_array_equal(found, factor)


def test_the_same_parts_with_other_numbers_use_no_plan_of_others(model: Model) -> None:
    """Kernels are bound once for a combination; weights, factors and hyperparameters are those of each commit."""
    arrays = {name: array.copy() for name, array in model.arrays.items()}
    arithmetic = Executor(Bytes(**arrays), 2)
    expected = {name: array.copy() for name, array in model.arrays.items()}
    for ticket, (weights, bound) in enumerate([((), None), (WEIGHTS, None), (WEIGHTS, 0.5), ((), 0.25), ((), None)], 1):
        steps = tuple(model.update(which, learning_rate=0.1 / ticket) for which in (0, 1, 2))
        operation = Apply(steps, (), weights, bound)
        arithmetic.commit(Commit(ticket, (operation,)))
        commit(Bytes(**expected), operation)
    for name, array in expected.items():
        assert arrays[name].tobytes() == array.tobytes(), name
    arithmetic.close()
