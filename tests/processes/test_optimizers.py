"""Every optimizer over a real service: dense and sparse gradients in one step, the bits of plain NumPy, slots,
schedules, clipping, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import central_storage as cs
from central_storage.optimizers import of_kind, schedules
from cs_proto.arithmetic.optimizers import slot_shape
from cs_proto.errors import ContextError, InvalidArgumentError
from cs_server.compute.sparse import merge_reference
from cs_server.rules import RULES, reference

F32 = np.float32
SHAPES: tuple[tuple[int, ...], ...] = ((4, 3), (), (0,), (7,))
TABLE = (9, 2)
MOVES = {"all": (True, True), "slots": (False, True), "rows": (False, False)}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"learning_rate": 0.1}),
    "nesterov": ("SGD", {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True}),
    "adagrad": ("Adagrad", {"learning_rate": 0.1}),
    "rowwise_adagrad": ("RowwiseAdagrad", {"learning_rate": 0.1, "weight_decay": 0.01}),
    "rmsprop": ("RMSprop", {"learning_rate": 0.01, "centered": True}),
    "rmsprop_momentum": ("RMSprop", {"learning_rate": 0.01, "momentum": 0.5}),
    "adam": ("Adam", {"learning_rate": 0.1, "amsgrad": True}),
    "lazy_adam": ("Adam", {"learning_rate": 0.1, "lazy": True}),
    "adamw": ("AdamW", {"learning_rate": 0.1}),
    "adamax": ("Adamax", {"learning_rate": 0.1}),
    "nadam": ("Nadam", {"learning_rate": 0.1}),
    "lazy_nadam": ("Nadam", {"learning_rate": 0.1, "lazy": True}),
    "adadelta": ("Adadelta", {"learning_rate": 1.0}),
    "ftrl": ("Ftrl", {"learning_rate": 0.1, "l1_regularization_strength": 0.01}),
    "ftrl_power": ("Ftrl", {"learning_rate": 0.1, "learning_rate_power": -0.25}),
    "lion": ("Lion", {"learning_rate": 0.1, "weight_decay": 0.1}),
    "torch_sgd": ("torch.SGD", {"learning_rate": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "torch_adagrad": ("torch.Adagrad", {"learning_rate": 0.1, "weight_decay": 0.1}),
    "lazy_optax_adam": ("optax.adamw", {"learning_rate": 0.1, "lazy": True}),
}


def dense(step: int, replica: int, dtype: str) -> list[np.ndarray]:
    random = np.random.default_rng([step, replica])
    return [np.asarray(random.normal(size=shape), dtype) for shape in SHAPES]


def rows(step: int, replica: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows named twice, by both replicas, and at one step by only one of them."""
    random = np.random.default_rng([step, replica, 1])
    count = 0 if (step, replica) == (1, 1) else 5
    return random.normal(size=(count, *TABLE[1:])).astype(dtype), random.integers(0, TABLE[0] - 2, count)


class Expected:
    """One optimizer in plain NumPy."""

    def __init__(self, optimizer: cs.optimizers.Optimizer, dtype: str) -> None:
        self.given = {"lazy": False} | {k: v for k, v in optimizer.get_config().items() if k not in ("kind", "name")}
        self.rule = RULES[optimizer._rule]
        shapes = (*SHAPES, TABLE)
        self.values = [np.ones(shape, dtype) for shape in shapes]
        self.slots = [
            tuple(np.full(slot_shape(self.rule.name, shape), value, dtype) for value in self.rule.initial(self.given))
            for shape in shapes
        ]

    def step(self, t: int, dtype: str) -> None:
        gradients = [dense(t - 1, replica, dtype) for replica in (0, 1)]
        for position, brought in enumerate(zip(*gradients, strict=True)):
            reference(self.rule, self.values[position], brought, self.slots[position], self.given, t)
        brought_rows = [rows(t - 1, replica, dtype) for replica in (0, 1)]
        merged = merge_reference([values for values, _ in brought_rows], [indices for _, indices in brought_rows])
        gradient = np.zeros(TABLE, dtype)
        gradient[merged.rows] = merged.sums
        before = [array.copy() for array in (self.values[-1], *self.slots[-1])]
        reference(self.rule, self.values[-1], [gradient], self.slots[-1], self.given, t)
        others = np.setdiff1d(np.arange(TABLE[0]), merged.rows)
        moves_value, moves_slots = MOVES[self.rule.moving(self.given)]
        for position, (after, was) in enumerate(zip((self.values[-1], *self.slots[-1]), before, strict=True)):
            if not (moves_slots if position else moves_value):
                after[others] = was[others]


def variables(strategy: cs.CentralStorageStrategy, dtype: str = "float32") -> list[cs.Variable]:
    with strategy.scope():
        return [cs.Variable(np.ones(shape, dtype)) for shape in (*SHAPES, TABLE)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_every_optimizer_has_the_bits_of_plain_numpy(case: str, dtype: str, two: cs.CentralStorageStrategy) -> None:
    kind, given = CASES[case]
    made = variables(two, dtype)
    with two.scope():
        optimizer = of_kind(kind, kind, **given) if "." in kind else getattr(cs.optimizers, kind)(**given)

    def step(t: int) -> None:
        replica = int(cs.get_replica_context().replica_id_in_sync_group)
        table = cs.IndexedSlices(*rows(t, replica, dtype))
        optimizer.apply_gradients(zip([*dense(t, replica, dtype), table], made, strict=True))

    expected = Expected(optimizer, dtype)
    for t in range(4):
        two.run(step, args=(t,))
        expected.step(t + 1, dtype)
    assert optimizer.iterations == 4
    for position, variable in enumerate(made):
        assert variable.version == 4
        slots = [optimizer.get_slot(variable, name).numpy() for name in optimizer.slot_names]
        for found, wanted in zip(
            [variable.numpy(), *slots], [expected.values[position], *expected.slots[position]], strict=True
        ):
            if RULES[optimizer._rule].is_compiled:
                assert found.tobytes() == wanted.tobytes()
            else:  # a power that NumPy rounds differently in the middle of an array and at its end
                np.testing.assert_allclose(found, wanted, rtol=1e-2 if dtype == "float16" else 1e-5)


def test_complex_variables_and_rules_that_compare(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        z = cs.Variable(np.zeros(3, np.complex64))
        sgd, ftrl = cs.optimizers.SGD(0.5), cs.optimizers.Ftrl()

    def step(optimizer: Any) -> None:
        optimizer.apply_gradients([(np.full(3, 1 + 2j, np.complex64), z)])

    two.run(step, args=(sgd,))
    assert z.numpy().tolist() == [-1 - 2j] * 3
    with pytest.raises(InvalidArgumentError, match="this rule takes no complex ones"):
        two.run(step, args=(ftrl,))


# --- sparse gradients ---------------------------------------------------------------------------------------------


def test_only_named_rows_of_a_large_table_are_touched(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        table = cs.Variable(np.zeros((200_000, 32), F32), sparse=True)
        optimizer = cs.optimizers.SGD(1.0, momentum=0.5)

    def step(x: Any) -> None:
        optimizer.apply_gradients([(cs.IndexedSlices(np.ones((2, 32), F32), np.array([x, 199_999])), table)])

    for at in (3, 70_000):
        two.run(step, args=(at,))
    moved = np.flatnonzero(table.numpy().any(axis=1))
    assert moved.tolist() == [3, 70_000, 199_999]
    assert table.numpy()[[3, 199_999], 0].tolist() == [-2.0, -2.0 - 3.0]
    assert np.flatnonzero(optimizer.get_slot(table, "momentum").numpy().any(axis=1)).tolist() == moved.tolist()


def test_several_sparse_steps_in_one_run_keep_what_they_brought(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        table = cs.Variable(np.zeros((4, 1), F32))
        optimizer = cs.optimizers.SGD(1.0)

    def step() -> np.ndarray:
        values = np.zeros((1, 1), F32)
        for number in (1, 10, 100):
            values[:] = number
            optimizer.apply_gradients([(cs.IndexedSlices(values, np.array([number % 4])), table)])
        return np.array(table)

    for seen in two.experimental_local_results(two.run(step)):
        assert seen[:, 0].tolist() == [-200, -2, -20, 0]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("SGD", {"momentum": 0.9}),
        ("Adam", {}),
        ("Adam", {"lazy": True, "clipnorm": 0.5}),
        ("Adam", {"global_clipnorm": 0.5}),
        ("Ftrl", {}),
        ("LAMB", {}),
        ("RowwiseAdagrad", {}),
    ],
)
def test_rows_of_one_replica_and_a_dense_gradient_of_another_have_the_bits_of_dense_gradients(
    kind: str, given: dict[str, Any], dtype: str, two: cs.CentralStorageStrategy
) -> None:
    random = np.random.default_rng(5)
    start = [random.normal(size=shape).astype(dtype) for shape in ((), (6, 3), (7,))]
    with two.scope():
        models = [[cs.Variable(value) for value in start] for _ in range(2)]
        optimizers = [getattr(cs.optimizers, kind)(0.1, **given) for _ in range(2)]

    def step(t: int) -> None:
        replica = int(cs.get_replica_context().replica_id_in_sync_group)
        random = np.random.default_rng([t, replica])
        gradients: list[Any] = [random.normal(size=value.shape).astype(dtype) for value in start]
        has_rows = t % 4 == 2 + replica  # one replica, the other, none, none, and so on
        if has_rows:
            indices = np.array([4, 1, 4, 0, 4])
            values = random.normal(size=(5, 3)).astype(dtype)
            gradients[1] = np.zeros((6, 3), dtype)
            np.add.at(gradients[1], indices, values)
        weight = 0.5 + replica / 4
        pairs = list(zip(gradients, models[0], strict=True))
        cs.optimizers.apply_gradients([(optimizers[0], pairs)], weight=weight)
        if has_rows:
            gradients[1] = cs.IndexedSlices(values, indices)
        pairs = list(zip(gradients, models[1], strict=True))
        cs.optimizers.apply_gradients([(optimizers[1], pairs)], weight=weight)

    for t in range(8):
        two.run(step, args=(t,))
    for one, other in zip(*models, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()
    one, other = (optimizer.get_weights() for optimizer in optimizers)
    assert [each.tobytes() for each in one] == [each.tobytes() for each in other]
    assert optimizers[1].iterations == 8


# --- rates --------------------------------------------------------------------------------------------------------


def weight(strategy: cs.CentralStorageStrategy, **given: Any) -> tuple[cs.Variable, Any]:
    with strategy.scope():
        return cs.Variable(np.zeros(2, F32)), cs.optimizers.SGD(**given)


def moves(
    strategy: cs.CentralStorageStrategy, w: cs.Variable, optimizer: Any, runs: int, applies: int = 1
) -> list[float]:
    """How far each run moves the variable, under gradients that sum up to 1."""

    def step() -> None:
        for _ in range(applies):
            optimizer.apply_gradients([(np.full(2, 0.5, F32), w)])

    found = []
    for _ in range(runs):
        before = w.numpy()[0]
        strategy.run(step)
        found.append(float(before - w.numpy()[0]))
    return found


def test_a_schedule_is_evaluated_at_every_step_also_of_one_run(two: cs.CentralStorageStrategy) -> None:
    w, optimizer = weight(two, learning_rate=schedules.PiecewiseConstantDecay([1, 4], [64.0, 8.0, 1.0]))
    assert moves(two, w, optimizer, 3, applies=2) == [128.0, 16.0, 9.0]
    assert moves(two, w, optimizer, 1) == [1.0]
    optimizer.iterations = 0
    assert moves(two, w, optimizer, 3) == [64.0, 64.0, 8.0]
    optimizer.learning_rate = 0.25
    assert moves(two, w, optimizer, 2) == [0.25, 0.25]
    optimizer.learning_rate = schedules.ExponentialDecay(32.0, 1, 0.5)
    assert moves(two, w, optimizer, 2) == [1.0, 0.5]
    assert two.experimental_local_results(two.run(lambda: optimizer.learning_rate(1))) == (16.0, 16.0)


def test_a_schedule_of_ones_own_is_evaluated_in_the_client_once_a_run(two: cs.CentralStorageStrategy) -> None:
    asked = []

    def rate(step: int) -> float:
        asked.append(step)
        return 2.0**-step

    w, _ = weight(two)
    optimizer = cs.optimizers.SGD(rate)  # adopted by the first run
    assert moves(two, w, optimizer, 2, applies=2) == [2.0, 0.5]
    assert asked[-1] == 2
    batches = two.experimental_distribute_dataset(cs.data.Dataset.range(8).batch(2))

    def step(batch: Any) -> None:
        optimizer.apply_gradients([(np.full(2, 0.5, F32), w)])

    before = w.numpy()[0]
    with pytest.warns(UserWarning, match="made the steps 2 to 3 in one run, all with the rate of step 2"):
        assert len(list(two.run_steps(step, batches))) == 4
    assert before - w.numpy()[0] == 2.0**-4 + 2.0**-5 + 2.0**-6 + 2.0**-7
    assert asked[-4:] == [4, 5, 6, 7]


# --- clipping -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"clipvalue": 3.0}, ([3, -3], [3, 0, 3])),
        ({"clipnorm": 5.0}, ([3, -4], [3, 0, 4])),
        ({"clipnorm": 100.0}, ([6, -8], [6, 0, 8])),
        ({"global_clipnorm": 2**0.5 * 5}, ([3, -4], [3, 0, 4])),
        ({"clipvalue": 4.0, "clipnorm": 2**0.5 * 2}, ([2, -2], [2, 0, 2])),
    ],
)
def test_the_summed_gradient_is_clipped(
    given: dict[str, float], expected: tuple[Sequence[float], Sequence[float]], two: cs.CentralStorageStrategy
) -> None:
    """Of each replica alone, and of each duplicate alone, the norm would be another."""
    with two.scope():
        w, table = cs.Variable(np.zeros(2, F32)), cs.Variable(np.zeros((3, 1), F32))
        optimizer = cs.optimizers.SGD(1.0, **given)

    def step() -> None:
        replica = cs.get_replica_context().replica_id_in_sync_group
        gradient = np.array([6, 0] if replica == 0 else [0, -8], F32)
        named = [[3, 0, 3], [4, 4, 0]][int(replica)]
        slices = cs.IndexedSlices(np.array(named, F32)[:, None], np.array([0, 0, 0] if replica == 0 else [2, 2, 1]))
        optimizer.apply_gradients([(gradient, w), (slices, table)])

    two.run(step)
    np.testing.assert_allclose(-w.numpy(), expected[0], rtol=1e-6)
    np.testing.assert_allclose(-table.numpy()[:, 0], expected[1], rtol=1e-6)


# --- slots --------------------------------------------------------------------------------------------------------


def test_slots_can_be_read_before_the_first_step_written_and_read_in_a_replica(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        w = cs.Variable(np.zeros((2, 2), F32), name="slotted")
        optimizer = cs.optimizers.Adagrad(1.0, epsilon=0.0)
    slot = optimizer.get_slot(w, "accumulator")
    assert (slot.name, slot.shape) == ("slotted/accumulator", (2, 2))
    np.testing.assert_array_equal(slot, np.full((2, 2), 0.1, F32))
    for writes in (lambda: np.add.at(slot, 0, F32(1)), lambda: np.add(slot, F32(1), out=slot)):
        with pytest.raises(TypeError, match=r"slot slotted/accumulator is not changed in place; .*slot\.assign"):
            writes()
    slot.assign(np.full((2, 2), 5, F32))

    def step() -> list[Any]:
        optimizer.apply_gradients([(np.ones((2, 2), F32), w)])
        return [optimizer.get_slot(w, "accumulator").numpy()[0, 0], optimizer.iterations, np.array(w)[0, 0]]

    accumulator, iterations, value = two.run(step)
    assert [float(a) for a in two.experimental_local_results(accumulator)] == [9.0, 9.0]
    assert iterations == 1
    np.testing.assert_allclose(two.experimental_local_results(value), -2 / 3, rtol=1e-6)
    assert slot.numpy().tolist() == [[9, 9], [9, 9]]
    np.testing.assert_allclose(w.numpy(), -2 / 3, rtol=1e-6)


def test_a_merge_function_may_change_an_optimizer(two: cs.CentralStorageStrategy) -> None:
    w, optimizer = weight(two, learning_rate=1.0, momentum=0.5)

    def merge(strategy: Any) -> None:
        optimizer.learning_rate = 4.0
        optimizer.get_slot(w, "momentum").assign(np.full(2, 3, F32))

    two.run(lambda: cs.get_replica_context().merge_call(merge))
    assert optimizer.learning_rate == 4.0
    assert optimizer.get_slot(w, "momentum").numpy().tolist() == [3.0, 3.0]


def test_missing_gradients_warn_and_nothing_else_is_lost(two: cs.CentralStorageStrategy) -> None:
    w, optimizer = weight(two, learning_rate=1.0)
    other, _ = weight(two)

    def step() -> list[str]:
        import warnings

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.apply_gradients([(np.ones(2, F32), w), (None, other)])
        return [str(warning.message) for warning in caught]

    (message,) = two.run(step)
    assert other.name in message
    assert w.numpy().tolist() == [-2.0, -2.0]
    with pytest.raises(ValueError, match="every gradient is None"):
        two.run(lambda: optimizer.apply_gradients([(None, w)]))


def test_an_optimizer_serves_one_strategy(two: cs.CentralStorageStrategy) -> None:
    w, _ = weight(two)
    optimizer = cs.optimizers.SGD(1.0)
    assert moves(two, w, optimizer, 1) == [1.0]
    with cs.CentralStorageStrategy(["cpu:0"], in_process=True) as other:
        foreign, _ = weight(other)
        with pytest.raises(ContextError, match="belongs to another strategy"):
            moves(other, foreign, optimizer, 1)


def test_decay_and_the_new_schedules_are_followed_at_every_step(two: cs.CentralStorageStrategy) -> None:
    rates: list[tuple[dict[str, Any], Any]] = [
        ({"learning_rate": 1.0, "decay": 0.5}, lambda t: 1 / (1 + 0.5 * t)),
        ({"learning_rate": schedules.InverseTimeDecay(1.0, 2, 3.0)}, lambda t: 1 / (1 + 1.5 * t)),
        (
            {"learning_rate": schedules.InverseTimeDecay(1.0, 2, 3.0), "decay": 0.5},
            lambda t: 1 / (1 + 1.5 * t) / (1 + 0.5 * t),
        ),
        ({"learning_rate": (restarts := schedules.CosineDecayRestarts(1.0, 2, t_mul=1.0))}, restarts),
    ]
    for given, rate in rates:
        with two.scope():
            w, sgd = cs.Variable(np.zeros((), np.float64)), cs.optimizers.SGD(**given)
        for _ in range(4):
            two.run(lambda: sgd.apply_gradients([(np.float64(-0.5), w)]))  # noqa: B023  (sent at once)
        assert float(w.numpy()) == pytest.approx(sum(rate(t) for t in range(4)))


def test_a_kept_count_ends_a_loop_and_is_saved(two: cs.CentralStorageStrategy, tmp_path: Any) -> None:
    with two.scope():
        w, adam = cs.Variable(np.zeros(2, F32)), cs.optimizers.Adam(0.5)
    step, rate = adam.iterations, adam.lr
    for _ in range(9):
        if step >= 3:
            break
        two.run(lambda: adam.apply_gradients([(np.ones(2, F32), w)]))
    assert (int(step), adam.iterations, w.version) == (3, 3, 3)
    path = cs.train.Checkpoint(adam=adam, w=w).save(tmp_path / "ckpt")
    weights = adam.get_weights()
    adam.set_weights([np.zeros_like(weight) for weight in weights])
    rate.assign(0.25)
    assert (step, adam.get_slot(w, "m").numpy().tolist()) == (0, [0, 0])
    cs.train.Checkpoint(adam=adam, w=w).restore(path).assert_consumed()
    assert (step, rate) == (3, 0.5)
    for found, wanted in zip(adam.get_weights(), weights, strict=True):
        assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("decaying", "plain", "given"),
    [
        ("AdamW", "Adam", {}),
        ("AdamW", "Adam", {"amsgrad": True}),
        ("AdamW", "Adam", {"global_clipnorm": 0.5}),
        ("AdamW", "Adam", {"clipvalue": 0.25}),
        ("Lion", "Lion", {}),
        ("Lion", "Lion", {"clipnorm": 0.5}),
        ("LAMB", "LAMB", {}),
        ("LAMB", "LAMB", {"lazy": True}),
    ],
)
def test_a_variable_that_is_excluded_from_weight_decay_is_updated_without_it(
    decaying: str, plain: str, given: dict[str, Any], two: cs.CentralStorageStrategy
) -> None:
    shapes = {"kernel": (3, 2), "bias": (5,), "scale": (4,), "table": (6, 2), "table_bias": (6, 2)}

    def train(kind: str, **more: Any) -> dict[str, list[np.ndarray]]:
        with two.scope():
            made = {name: cs.Variable(np.ones(shape, F32), name=f"{kind}/{name}") for name, shape in shapes.items()}
            optimizer = getattr(cs.optimizers, kind)(0.1, **given, **more)

        def step(t: int) -> None:
            random = np.random.default_rng([t, int(cs.get_replica_context().replica_id_in_sync_group)])
            pairs: list[tuple[Any, cs.Variable]] = []
            for name, variable in made.items():
                gradient = random.normal(size=variable.shape).astype(F32)
                is_sparse = name.startswith("table")
                pairs.append((cs.IndexedSlices(gradient[:2], [1, 4]) if is_sparse else gradient, variable))
            optimizer.apply_gradients(pairs)

        for t in range(3):
            two.run(step, (t,))
        return {
            name: [w.numpy(), *(optimizer.get_slot(w, slot).numpy() for slot in optimizer.slot_names)]
            for name, w in made.items()
        }

    without, with_decay = train(plain), train(decaying, weight_decay=0.5)
    found = train(decaying, weight_decay=0.5, exclude_from_weight_decay=["bias", "scale"])
    for name, arrays in found.items():
        wanted = (without if "bias" in name or name == "scale" else with_decay)[name]
        assert [array.tobytes() for array in arrays] == [array.tobytes() for array in wanted], name
        assert without[name][0].tobytes() != with_decay[name][0].tobytes()


def test_a_variable_that_is_excluded_from_weight_decay_stays_so_under_another_name(
    two: cs.CentralStorageStrategy,
) -> None:
    with two.scope():
        earlier, bias = (cs.Variable(np.ones(3, F32), name="excluded") for _ in range(2))
        adamw = cs.optimizers.AdamW(0.1, weight_decay=0.5)
        adamw.exclude_from_weight_decay([bias])
    assert bias.name == "excluded_1"
    del earlier
    two.run(lambda: adamw.apply_gradients([(np.zeros(3, F32), bias)]))
    assert (bias.name, bias.numpy().tolist()) == ("excluded", [1, 1, 1])
    assert adamw.get_config()["exclude_from_weight_decay"] == ["^excluded$"]
