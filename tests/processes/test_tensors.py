"""``numpy()`` on whatever TensorFlow gives a tensor for: in the script and in replica functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.harness.replicas import context

import central_storage as cs

F32 = np.float32


@pytest.fixture(scope="module")
def model(two: cs.CentralStorageStrategy) -> cs.Variable:
    with two.scope():
        return cs.Variable(np.ones((3, 2), F32), name="of tensors", aggregation=cs.VariableAggregation.SUM)


def optimizer(two: cs.CentralStorageStrategy) -> cs.optimizers.Optimizer:
    with two.scope():
        return cs.optimizers.Adam()


def accumulator(two: cs.CentralStorageStrategy) -> cs.optimizers.GradientAccumulator:
    with two.scope():
        made = cs.optimizers.GradientAccumulator()
    two.run(lambda x: made([x]), (shares(two),))
    return made


def shares(two: cs.CentralStorageStrategy) -> cs.PerReplica:
    return cs.PerReplica([F32([1, 2]), F32([3, 4])])


@pytest.mark.parametrize(
    "give",
    [
        lambda s, v: s.reduce("SUM", shares(s), axis=None),
        lambda s, v: s.reduce("MEAN", shares(s), axis=0),
        lambda s, v: s.reduce("MEAN", F32([1, 2]), axis=None),
        lambda s, v: s.gather(shares(s), axis=0),
        lambda s, v: s.run(lambda x: x + 1, (shares(s),)),
        lambda s, v: s.run(lambda x: x.sum(), (shares(s),)),
        lambda s, v: s.run(lambda: {"loss": F32(1), "large": np.zeros(300_000, F32)}),
        lambda s, v: s.run(lambda: cs.IndexedSlices([[1.0]], [0], (3, 1))).values[0].values,
        lambda s, v: s.experimental_distribute_values_from_function(lambda _: cs.constant(1.0)),
        lambda s, v: next(iter(s.experimental_distribute_dataset(cs.data.Dataset.range(4).batch(4)))),
        lambda s, v: next(iter(s.experimental_distribute_dataset([(np.zeros(4), {"y": np.ones((4, 2))})]))),
        lambda s, v: next(iter(s.distribute_datasets_from_function(lambda c: cs.data.Dataset.range(4).batch(2)))),
        lambda s, v: next(iter(cs.data.Dataset.range(4))),
        lambda s, v: next(iter(cs.data.Dataset.from_tensor_slices((np.zeros((4, 2)), np.zeros(4))).batch(2))),
        lambda s, v: s.extended.update(v, lambda v: 2 * v.read_value()),
        lambda s, v: s.extended.update(v, lambda v: 2 * v.read_value(), group=False)[0],
        lambda s, v: s.extended.update_non_slot("cpu:0", lambda: np.ones(2)),
        lambda s, v: optimizer(s).get_slot(v, "m").value(),
        lambda s, v: accumulator(s).gradients,
        lambda s, v: cs.train.Checkpoint(v=v).save_counter,
        lambda s, v: cs.optimizers.SGD(0.1).iterations.value(),
        lambda s, v: cs.optimizers.SGD(0.1).learning_rate.read_value(),
        lambda s, v: cs.optimizers.schedules.CosineDecay(0.1, 10)(3),
        lambda s, v: cs.data.Dataset.range(4).cardinality(),
        lambda s, v: cs.data.experimental.cardinality(cs.data.Dataset.range(4)),
        lambda s, v: s.experimental_distribute_dataset(cs.data.Dataset.range(4).batch(2)).cardinality,
        lambda s, v: s.distribute_datasets_from_function(lambda c: cs.data.Dataset.range(4).batch(2)).cardinality,
        lambda s, v: cs.distribute.get_strategy().run(lambda x: x + 1, (np.ones(2),)),
        lambda s, v: cs.data.Dataset.range(4).reduce(np.int64(0), lambda a, b: a + b),
        lambda s, v: v.value(),
        lambda s, v: v.read_value(),
        lambda s, v: v[0],
        lambda s, v: v[0, 0],
        lambda s, v: v.sparse_read([0, 1]),
        lambda s, v: s.extended.read_var(v),
        lambda s, v: s.extended.reduce_to("SUM", shares(s), "cpu:0"),
        lambda s, v: s.extended.reduce_to("SUM", shares(s), shares(s)),
        lambda s, v: s.extended.broadcast_to([1, 2], "cpu:0"),
        lambda s, v: cs.nn.embedding_lookup(v, [0]),
        lambda s, v: cs.nn.compute_average_loss([1.0, 2.0], global_batch_size=2),
        lambda s, v: cs.convert_to_tensor([1, 2]),
    ],
)
def test_in_the_script(
    give: Callable[[cs.CentralStorageStrategy, cs.Variable], Any], two: cs.CentralStorageStrategy, model: cs.Variable
) -> None:
    leaves = cs.nest.flatten(two.experimental_local_results(give(two, model)))
    assert leaves
    for leaf in leaves:
        assert isinstance(leaf, cs.Tensor)
        assert type(leaf.numpy()) is np.ndarray if leaf.ndim else isinstance(leaf.numpy(), np.generic)


def test_in_a_replica(two: cs.CentralStorageStrategy, model: cs.Variable) -> None:
    captured = cs.constant([1.0, 2.0])

    @cs.function
    def step(share: Any, plain: Any, nest: Any) -> Any:
        here = context()
        merged = here.merge_call(lambda s, x: s.reduce("SUM", x, axis=None), (share,))
        seen = [
            share,
            plain,
            nest["x"],
            captured,
            here.replica_id_in_sync_group,
            here.all_reduce("SUM", share),
            here.all_gather(share, axis=0),
            merged,
            model.value(),
            model[0],
            cs.nn.compute_average_loss(share, global_batch_size=4),
            cs.nn.scale_regularization_loss(share),
            cs.nn.embedding_lookup(model, [0]),
            cs.convert_to_tensor(1.5),
        ]
        writable = share.numpy()
        writable += 1
        return [type(each).__name__ for each in seen], [np.asarray(each.numpy()).ndim for each in seen]

    names, axes = two.run(step, (shares(two), F32([5]), {"x": np.zeros((200, 200))}))
    assert set(names) == {"Tensor"}
    assert axes == [1, 1, 2, 1, 0, 1, 1, 1, 2, 1, 0, 0, 2, 0]


def test_the_number_of_a_replica_is_an_index_and_a_key(two: cs.CentralStorageStrategy) -> None:
    def step(rows: Any) -> Any:
        number = context().replica_id_in_sync_group
        return {0: "first", 1: "second"}[number], ["a", "b"][number], rows[number], {number: "key"}[int(number)]

    words, letters, rows, key = two.run(step, (F32([10, 20]),))
    assert (words.values, letters.values, key) == (("first", "second"), ("a", "b"), "key")
    assert [float(row) for row in rows.values] == [10, 20]


def test_metrics_give_tensors_also_of_a_class_of_the_user(two: cs.CentralStorageStrategy) -> None:
    class Largest(cs.metrics.Metric):
        def __init__(self) -> None:
            super().__init__("largest")
            self.n = self.add_weight("n")

        def update_state(self, x: Any) -> None:
            self.n.assign_add(x.max())

        def result(self) -> Any:
            return self.n / 2

    with two.scope():
        metrics = [Largest(), cs.metrics.Mean(), cs.metrics.Sum(), cs.metrics.AUC(), cs.metrics.Accuracy()]
    two.run(lambda x: metrics[0].update_state(x), (shares(two),))
    assert [type(metric.result()) for metric in metrics] == [cs.Tensor] * len(metrics)
    assert metrics[0].result().numpy() == 3


def test_the_text_of_a_variable_shows_its_value(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        v = cs.Variable([1.0, 2.0], name="shown", aggregation=cs.VariableAggregation.SUM)
        text = repr(v)

    def step() -> tuple[str, str]:
        before = repr(v)
        v.assign_add(np.ones(2, F32))
        return before, repr(v)

    assert text == "<cs.Variable 'shown' shape=(2,) dtype=float32, numpy=array([1., 2.], dtype=float32)>"
    assert two.run(step) == (text, text.replace("[1., 2.]", "[3., 4.]"))
    assert "numpy=array([1, 2]" in repr(cs.Variable([1, 2]))
    with two.scope():
        large = cs.Variable(np.zeros(20 << 20, F32))
    assert repr(large).endswith("80 MiB that numpy() reads>")


def test_the_text_of_a_variable_never_raises() -> None:
    with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
        v = cs.Variable(1.0)
    assert "was shut down" in repr(v)


@pytest.mark.parametrize("more", [lambda it: next(it), lambda it: it.get_next()])
@pytest.mark.parametrize("distributed", [True, False])
def test_the_end_of_the_data_is_one_class(more: Callable[[Any], Any], distributed: bool, two: Any) -> None:
    data: Any = cs.data.Dataset.range(4).batch(2)
    iterator = iter(two.experimental_distribute_dataset(data) if distributed else data)
    for _ in range(2):
        more(iterator)
    with pytest.raises(cs.errors.OutOfRangeError, match="ended"):
        more(iterator)
    assert not iterator.get_next_as_optional().has_value()
    assert list(iterator) == []


def test_what_ends_inside_a_generator(two: cs.CentralStorageStrategy) -> None:
    def asking() -> Any:
        yield iter(cs.data.Dataset.range(0)).get_next()

    def taking() -> Any:
        yield next(iter(cs.data.Dataset.range(0)))

    def delegating() -> Any:
        value = yield from iter(cs.data.Dataset.range(1))
        assert value is None

    with pytest.raises(cs.errors.OutOfRangeError):  # it is no StopIteration, which Python would not let through
        next(asking())
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(taking())
    assert len(list(delegating())) == 1
