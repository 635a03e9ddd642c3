"""Several optimizers in one update of a real service: weights, one bound, rows, what is refused, and nothing twice."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.harness.replicas import context, replica

import central_storage as cs
from cs_proto.errors import ContextError, InvalidArgumentError, MergeMismatchError
from cs_server.rules import RULES, reference

F32 = np.float32
SHAPES = ((5, 3), (7,), ())


class Model:
    """A variable for each of three optimizers, and a table."""

    def __init__(self, strategy: cs.CentralStorageStrategy) -> None:
        with strategy.scope():
            self.variables = [cs.Variable(np.ones(shape, F32)) for shape in SHAPES]
            self.table = cs.Variable(np.ones((6, 2), F32))
            self.optimizers = [cs.optimizers.Adam(0.1), cs.optimizers.SGD(0.5), cs.optimizers.AdamW(0.2)]
            self.of_rows = cs.optimizers.Adagrad(0.1)

    def groups(self, step: int, which: int | None = None) -> list[Any]:
        """What a replica brings."""
        rank = replica() if which is None else which
        gradients = brought(step, rank)
        pairs = [[(gradient, variable)] for gradient, variable in zip(gradients, self.variables, strict=True)]
        rows = cs.IndexedSlices(np.full((2, 2), step + rank + 1, F32), np.array([rank, 3]))
        return [*zip(self.optimizers, pairs, strict=True), (self.of_rows, [(rows, self.table)])]

    def values(self) -> list[bytes]:
        return [variable.numpy().tobytes() for variable in (*self.variables, self.table)]

    @property
    def counts(self) -> list[int]:
        return [int(optimizer.iterations) for optimizer in (*self.optimizers, self.of_rows)]


def brought(step: int, rank: int) -> list[np.ndarray]:
    random = np.random.default_rng([step, rank])
    return [np.asarray(random.standard_normal(shape), F32) for shape in SHAPES]


def test_they_have_the_bits_of_separate_applies_and_count_once(two: cs.CentralStorageStrategy) -> None:
    together, alone = Model(two), Model(two)

    def step(k: int) -> None:
        cs.optimizers.apply_gradients(together.groups(k))
        for optimizer, pairs in alone.groups(k):
            optimizer.apply_gradients(pairs)

    for k in range(5):
        two.run(step, (k,))
    assert together.values() == alone.values()
    assert together.counts == alone.counts == [5] * 4
    assert [variable.version for variable in together.variables] == [5] * 3


def test_one_apply_is_one_merge_point_and_its_sets_are_asked_for_once(two: cs.CentralStorageStrategy) -> None:
    model = Model(two)

    def step(k: int) -> None:
        cs.optimizers.apply_gradients(model.groups(k))

    two.run(step, (0,))
    before = two.controller.statistics()
    for k in range(1, 6):
        two.run(step, (k,))
    after = two.controller.statistics()
    assert [now.applies - then.applies for now, then in zip(after.replicas, before.replicas, strict=True)] == [5, 5]
    assert after.commits - before.commits == 5
    assert after.messages - before.messages == 2 * 5 + 2 - 1  # the returns, and the two questions of this test


def test_weights_make_the_mean_over_the_rows_of_an_uneven_batch(two: cs.CentralStorageStrategy) -> None:
    model = Model(two)
    weights = [(3, 1), (4, 0), (0, 4), (2, 2)]

    def step(k: int) -> None:
        share = weights[k][replica()] / 4
        groups = model.groups(k)
        if not share:
            for gradient, _ in (pair for _, pairs in groups[:3] for pair in pairs):
                gradient.fill(np.nan)
            groups[3][1][0][0].values[:] = np.nan
        cs.optimizers.apply_gradients(groups, weight=share)

    expected = [np.ones(shape, F32) for shape in SHAPES]
    slots = [
        tuple(np.zeros(shape, F32) for _ in o.slot_names) for o, shape in zip(model.optimizers, SHAPES, strict=True)
    ]
    for k, counts in enumerate(weights):
        two.run(step, (k,))
        for which, optimizer in enumerate(model.optimizers):
            gradients = [brought(k, rank)[which] for rank in (0, 1)]
            given = {key: value for key, value in optimizer.get_config().items() if key != "name"}
            scale = (*(count / 4 for count in counts), 1.0)
            reference(RULES[optimizer._rule], expected[which], gradients, slots[which], given, k + 1, scale)
    for variable, value in zip(model.variables, expected, strict=True):
        assert variable.numpy().tobytes() == value.tobytes()
    assert np.isfinite(model.table.numpy()).all()
    assert model.table.numpy()[5].tolist() == [1, 1]


def test_without_any_weight_the_gradients_are_zero_and_the_steps_are_taken(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        w, sgd = cs.Variable(np.ones(3, F32)), cs.optimizers.SGD(1.0)
    two.run(lambda: cs.optimizers.apply_gradients([(sgd, [(np.full(3, np.nan, F32), w)])], weight=0))
    assert (w.numpy().tolist(), int(sgd.iterations)) == ([1, 1, 1], 1)


def test_a_nan_with_a_weight_is_kept(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        w, sgd = cs.Variable(np.ones(3, F32)), cs.optimizers.SGD(1.0)
    two.run(lambda: cs.optimizers.apply_gradients([(sgd, [(np.full(3, np.nan, F32), w)])], weight=1e-3))
    assert np.isnan(w.numpy()).all()


@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 0.5])
def test_one_norm_over_all_groups(epsilon: float, two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        variables = [cs.Variable(np.zeros(n, F32)) for n in (3, 4, 5)]
        optimizers = [cs.optimizers.SGD(-1.0) for _ in variables]

    def step() -> None:
        gradients = [np.full(variable.shape, n + 1, F32) for n, variable in enumerate(variables)]
        pairs = zip(gradients, variables, strict=True)
        groups = [(optimizer, [pair]) for optimizer, pair in zip(optimizers, pairs, strict=True)]
        cs.optimizers.apply_gradients(groups, global_clipnorm=2.0, weight=0.5 + replica(), clip_epsilon=epsilon)

    two.run(step)
    norm = math.sqrt(3 * 2.0**2 + 4 * 4.0**2 + 5 * 6.0**2)
    for n, variable in enumerate(variables):
        np.testing.assert_allclose(variable.numpy(), 2 * (n + 1) * min(1.0, 2.0 / (norm + epsilon)), rtol=1e-6)


def test_the_groups_do_not_change_a_bit_of_the_clipped_step(two: cs.CentralStorageStrategy) -> None:
    shapes = [(7, 11), (300,), (64,), (1,)]
    with two.scope():
        one = [cs.Variable(np.ones(shape, F32)) for shape in shapes]
        many = [cs.Variable(np.ones(shape, F32)) for shape in shapes]
        adam, adams = cs.optimizers.Adam(0.1), [cs.optimizers.Adam(0.1) for _ in shapes]

    def step(k: int) -> None:
        random = np.random.default_rng([k, replica()])
        gradients = [random.standard_normal(shape).astype(F32) for shape in shapes]
        pairs = list(zip(gradients, one, strict=True))
        cs.optimizers.apply_gradients([(adam, pairs)], global_clipnorm=1.0)
        others = zip(adams, zip(gradients, many, strict=True), strict=True)
        cs.optimizers.apply_gradients([(each, [pair]) for each, pair in others], global_clipnorm=1.0)

    for k in range(3):
        two.run(step, (k,))
    for left, right in zip(one, many, strict=True):
        assert left.numpy().tobytes() == right.numpy().tobytes()


def test_buffers_are_not_copied_whatever_the_order(two: cs.CentralStorageStrategy) -> None:
    model = Model(two)

    def step(order: list[int], is_handed_out: bool) -> None:
        gradients = brought(0, replica())
        if is_handed_out:
            buffers = cs.gradient_buffers(model.variables)
            for buffer, gradient in zip(buffers, gradients, strict=True):
                buffer[...] = gradient
            gradients = buffers
        groups = [(model.optimizers[n], [(gradients[n], model.variables[n])]) for n in order]
        cs.optimizers.apply_gradients(groups)
        assert all(not gradient.flags.writeable for gradient in gradients) == is_handed_out

    for order in ([0, 1, 2], [2, 0, 1]):
        two.run(step, (order, True))
    assert model.counts == [2, 2, 2, 0]
    found, model = model.values(), Model(two)
    for order in ([0, 1, 2], [2, 0, 1]):
        two.run(step, (order, False))
    assert model.values() == found


def test_steps_ahead_nested_runs_and_threads_have_the_same_bits(two: cs.CentralStorageStrategy) -> None:
    def trained(strategy: cs.CentralStorageStrategy, way: str) -> list[bytes]:
        model = Model(strategy)

        def step(k: Any) -> None:
            number = int(np.ravel(k)[0])
            cs.optimizers.apply_gradients(model.groups(number), global_clipnorm=2.0, weight=(number + replica()) / 8)

        def outer(k: int) -> None:
            context().merge_call(lambda strategy: strategy.run(step, (k,)))

        if way == "ahead":
            data = strategy.experimental_distribute_dataset([np.full(2, k) for k in range(6)])
            for _ in strategy.run_steps(step, data):
                pass
        else:
            for k in range(6):
                strategy.run(outer if way == "nested" else step, (k,))
        assert model.counts == [6] * 4
        return model.values()

    expected = trained(two, "run")
    assert trained(two, "ahead") == expected
    assert trained(two, "nested") == expected
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        assert trained(strategy, "run") == expected


def test_constraints_follow_the_update_of_all(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        v = cs.Variable(np.zeros(2, F32), constraint=lambda value: np.maximum(value, 0))
        w = cs.Variable(np.zeros(2, F32))
        optimizers = [cs.optimizers.SGD(1.0), cs.optimizers.SGD(1.0)]

    def step() -> None:
        gradient = np.array([1, -1], F32)
        groups = [(optimizer, [(gradient, x)]) for optimizer, x in zip(optimizers, (v, w), strict=True)]
        cs.optimizers.apply_gradients(groups)

    two.run(step)
    assert (v.numpy().tolist(), w.numpy().tolist()) == ([0, 2], [-2, 2])


def test_an_accumulator_feeds_several_optimizers(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        v, w = cs.Variable(np.zeros(2, F32)), cs.Variable(np.zeros(3, F32))
        optimizers = [cs.optimizers.SGD(1.0), cs.optimizers.SGD(10.0)]
        accumulator = cs.optimizers.GradientAccumulator()

    def step() -> None:
        accumulator([np.ones(2, F32), np.ones(3, F32)])
        if accumulator.step == 2:
            one, other = accumulator.gradients
            groups = [(optimizers[0], [(one, v)]), (optimizers[1], [(other, w)])]
            cs.optimizers.apply_gradients(groups, weight=0.5)
            accumulator.reset()

    for _ in range(4):
        two.run(step)
    assert (v.numpy().tolist(), w.numpy().tolist()) == ([-4] * 2, [-40] * 3)


def test_groups_without_pairs_take_no_step(two: cs.CentralStorageStrategy) -> None:
    model = Model(two)
    first, second, third = model.optimizers

    def step() -> None:
        cs.optimizers.apply_gradients(
            [(first, []), (second, [(np.ones(7, F32), model.variables[1])]), (third, iter(()))]
        )
        cs.optimizers.apply_gradients([(first, [])])
        cs.optimizers.apply_gradients([])

    two.run(step)
    assert model.counts == [0, 1, 0, 0]


def test_gradients_that_are_none_are_skipped_with_a_warning(two: cs.CentralStorageStrategy) -> None:
    model = Model(two)
    first, second, _ = model.optimizers
    v, w, _ = model.variables

    def step(gradient: Any) -> None:
        cs.optimizers.apply_gradients([(first, [(None, v)]), (second, [(gradient, w)])])

    two.run(step, (np.ones(7, F32),))
    assert model.counts == [0, 1, 0, 0]
    with pytest.raises(ValueError, match="apply_gradients: every gradient is None"):
        two.run(step, (None,))


@pytest.mark.parametrize("value", [-1, -1e-9, math.nan, math.inf, "1", True, np.ones(2), 1j, 10**400], ids=repr)
@pytest.mark.parametrize("name", ["weight", "global_clipnorm", "clip_epsilon"])
def test_numbers_out_of_range_are_refused_by_name(name: str, value: Any, two: cs.CentralStorageStrategy) -> None:
    model = shared_model(two)

    def step() -> None:
        cs.optimizers.apply_gradients(model.groups(0), **{name: value})

    with pytest.raises(
        InvalidArgumentError, match=f"apply_gradients: {name} must be a finite number of at least 0, not"
    ):
        two.run(step)
    assert model.counts == [0] * 4


_models: dict[int, Model] = {}


def shared_model(strategy: cs.CentralStorageStrategy) -> Model:
    return _models.setdefault(id(strategy), Model(strategy))


@pytest.mark.parametrize("value", [np.float32(0.5), np.array(0.5), np.int64(1), 1])
def test_numbers_of_every_kind_are_taken(value: Any, two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        w, sgd = cs.Variable(np.zeros(1, F32)), cs.optimizers.SGD(1.0)
    two.run(lambda: cs.optimizers.apply_gradients([(sgd, [(np.ones(1, F32), w)])], value * 8, value))
    assert w.numpy().tolist() == [-2 * float(value)]


def test_what_cannot_be_applied_together_is_refused(two: cs.CentralStorageStrategy) -> None:
    model = shared_model(two)
    one, other, _ = model.optimizers
    w, gradient = model.variables[1], np.ones(7, F32)
    with two.scope():
        integers = cs.Variable(np.zeros(7, np.int32))
        unused = cs.Variable(np.zeros(7, F32))
    cases: list[tuple[Any, type[Exception], str]] = [
        ([(one, [(gradient, w)]), (other, [(gradient, w)])], ValueError, "a variable appears twice"),
        ([(one, [(gradient, w)]), (one, [(gradient, unused)])], ValueError, "optimizer Adam appears twice"),
        ([(gradient, w)], InvalidArgumentError, "takes pairs of an optimizer and its pairs"),
        ([one], InvalidArgumentError, "takes pairs of an optimizer and its pairs"),
        ([(one, [gradient])], InvalidArgumentError, "takes pairs, as in"),
        ([(one, [(gradient, 7)])], InvalidArgumentError, "Adam updates Variables, not int"),
        ([(one, [(gradient[:3], w)])], InvalidArgumentError, "has shape"),
        (
            [(other, [(gradient, unused)]), (one, [(gradient.astype(np.int32), integers)])],
            InvalidArgumentError,
            "int32",
        ),
    ]
    for groups, kind, message in cases:
        with pytest.raises(kind, match=message):
            two.run(lambda groups=groups: cs.optimizers.apply_gradients(groups))
    assert model.counts == [0] * 4
    assert not other.slots()
    with pytest.raises(ContextError, match="inside a replica function"):
        cs.optimizers.apply_gradients([(one, [(gradient, w)])])
    with cs.CentralStorageStrategy(in_process=True) as elsewhere:
        with elsewhere.scope():
            theirs = cs.optimizers.SGD(1.0)
        with pytest.raises(ContextError, match="belongs to another strategy"):
            two.run(lambda: cs.optimizers.apply_gradients([(one, [(gradient, w)]), (theirs, [])]))


def test_without_a_service_it_says_what_is_missing() -> None:
    w, sgd = cs.Variable(np.zeros(1, F32)), cs.optimizers.SGD(1.0)
    with pytest.raises(ContextError, match="the default strategy has no server"):
        cs.optimizers.apply_gradients([(sgd, [(np.ones(1, F32), w)])], weight=0.5)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"global_clipnorm": 1.0}, {"global_clipnorm": 2.0}),
        ({"global_clipnorm": 1.0}, {}),
        ({"global_clipnorm": 1.0, "clip_epsilon": 1e-6}, {"global_clipnorm": 1.0}),
    ],
)
def test_replicas_agree_on_the_bound(
    one: dict[str, float], other: dict[str, float], two: cs.CentralStorageStrategy
) -> None:
    model = shared_model(two)
    given = cs.PerReplica([one, other])
    with pytest.raises(MergeMismatchError) as caught:
        two.run(lambda bounds: cs.optimizers.apply_gradients(model.groups(0), **bounds), (given,))
    for bounds in (one, other):
        if bounds:
            assert f"global_clipnorm={bounds['global_clipnorm']}" in str(caught.value)
            assert f"clip_epsilon={bounds.get('clip_epsilon', 0.0)}" in str(caught.value)
    assert "apply_gradients of optimizers" in str(caught.value)
    assert model.counts == [0] * 4


def test_replicas_agree_on_the_groups(two: cs.CentralStorageStrategy) -> None:
    model = shared_model(two)

    def step() -> None:
        cs.optimizers.apply_gradients(model.groups(0)[: 3 + replica()])

    with pytest.raises(MergeMismatchError, match="apply_gradients of optimizers"):
        two.run(step)
    assert model.counts == [0] * 4


def test_an_update_is_read_in_the_same_run(two: cs.CentralStorageStrategy) -> None:
    model = Model(two)

    def step() -> float:
        cs.optimizers.apply_gradients(model.groups(0), weight=0.5)
        cs.optimizers.apply_gradients(model.groups(1), global_clipnorm=0.1)
        return float(model.variables[2].numpy())

    values = two.experimental_local_results(two.run(step))
    assert values == (model.variables[2].numpy(),) * 2
    assert model.counts == [2] * 4
