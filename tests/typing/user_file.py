"""A user's file: typed code over the whole public API, which must pass mypy --strict and pyright. It is not run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import central_storage as cs

Floats = NDArray[np.float32]


class Model:
    def __init__(self) -> None:
        self.w = cs.Variable(np.zeros((4, 3), np.float32), name="w", aggregation=cs.VariableAggregation.MEAN)
        self.b = cs.Variable(lambda: np.zeros(3, np.float32), trainable=False, dtype=np.float32)
        self.table = cs.Variable(np.zeros((9, 3), np.float32), sparse=True)
        self.optimizer: cs.optimizers.Optimizer = cs.optimizers.Adam(
            cs.optimizers.schedules.ExponentialDecay(0.1, 100, 0.9), clipnorm=1.0
        )
        self.accuracy = cs.metrics.SparseCategoricalAccuracy()

    def __call__(self, x: Floats) -> Floats:
        result: Floats = x @ self.w + self.b
        return result


def train(strategy: cs.CentralStorageStrategy, dataset: cs.data.Dataset) -> float:
    with strategy.scope() as entered:
        assert entered.num_replicas_in_sync == strategy.num_replicas_in_sync
        model = Model()

    @cs.function
    def step(batch: tuple[Floats, NDArray[np.int64]]) -> Floats:
        x, y = batch
        context = cs.get_replica_context()
        assert context is not None
        replica: int = int(context.replica_id_in_sync_group)
        logits = model(x)
        (gradient,) = cs.gradient_buffers([model.w])
        np.matmul(x.T, logits, out=gradient)
        model.optimizer.apply_gradients([(gradient, model.w), (cs.IndexedSlices(x, np.arange(len(x))), model.b)])
        groups = [(model.optimizer, [(gradient, model.w)])]
        cs.optimizers.apply_gradients(groups, global_clipnorm=1.0, weight=0.5, clip_epsilon=1e-6)
        model.accuracy.update_state(y, logits)
        total = context.all_reduce(cs.ReduceOp.SUM, logits.sum())
        gathered = context.all_gather(logits, axis=0)
        merged = context.merge_call(lambda s, value: s.reduce("MEAN", value, axis=None), args=(logits,))
        return np.asarray(total + gathered.sum() + merged + replica, np.float32)

    distributed: cs.DistributedDataset = strategy.experimental_distribute_dataset(dataset.batch(8))
    last = 0.0
    for element in distributed:
        result = strategy.run(step, args=(element,), kwargs={}, options=cs.RunOptions())
        last = float(strategy.reduce(cs.ReduceOp.MEAN, result, axis=None))
    with strategy.run_steps(step, distributed, rates={model.optimizer: [0.1, {"learning_rate": 0.2}]}) as steps:
        for result in steps:
            locals_: tuple[Any, ...] = strategy.experimental_local_results(result)
            assert len(locals_) == strategy.num_replicas_in_sync
    with cs.summary.TensorBoard("curves", strategy, service_every=None) as writer:
        epochs = cs.progress(range(3), "training", units="epochs")
        for epoch in epochs:
            ahead = strategy.run_steps(step, distributed, progress=f"epoch {epoch + 1} of {len(epochs)}")
            print(len(ahead), len(distributed))
            for number, result in enumerate(cs.progress(ahead, total=None)):
                writer.scalar("loss", result, number)
            epochs.show(loss=last)
    iterator: Iterator[Any] = iter(distributed)
    next(iterator)
    return last


def values(strategy: cs.CentralStorageStrategy) -> NDArray[Any]:
    def value_fn(context: cs.ValueContext) -> int:
        return context.replica_id_in_sync_group + context.num_replicas_in_sync

    def dataset_fn(context: cs.InputContext) -> cs.data.Dataset:
        return cs.data.Dataset.range(8).batch(context.get_per_replica_batch_size(4))

    value = strategy.experimental_distribute_values_from_function(value_fn)
    assert isinstance(value, cs.PerReplica | int)
    for element in strategy.distribute_datasets_from_function(dataset_fn, cs.InputOptions()):
        strategy.gather(element, axis=0)
    variable = cs.Variable(np.zeros(3))
    number: float = float(variable[0])
    shape: tuple[int, ...] = variable.shape
    variable.assign_add(np.ones(shape)).assign_sub([number] * 3)
    variable.scatter_add(cs.IndexedSlices(np.ones(1), np.array([0])))
    return variable.numpy()


def save(strategy: cs.CentralStorageStrategy, directory: str) -> None:
    variables: tuple[cs.Variable, ...] = tuple(strategy.variables)
    checkpoint = cs.train.Checkpoint(**{variable.name: variable for variable in variables})
    manager = cs.train.CheckpointManager(checkpoint, directory, max_to_keep=2)
    path: str | None = manager.save()
    checkpoint.restore(path)
    written: str = checkpoint.write(directory)
    checkpoint.read(written).assert_consumed()
    strategy.save(directory)
    strategy.restore(directory)


def watch() -> dict[str, NDArray[Any]]:
    with cs.connect() as observer:
        return {record.spec.name: observer.get(record.spec.name) for record in observer.variables()}


def record(strategy: cs.CentralStorageStrategy) -> None:
    with strategy.timeline("timeline.json"), cs.span("epoch"):
        strategy.run(lambda: None)
    forward = cs.span("forward")
    with forward:
        pass


async def watch_too() -> int:
    async with cs.aio.connect() as observer:
        return (await observer.statistics()).commits


def main() -> None:
    try:
        with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0", seed=1) as strategy:
            x = np.zeros((16, 4), np.float32)
            train(strategy, cs.data.Dataset.from_tensor_slices((x, np.zeros(16, np.int64))).shuffle(16, seed=0))
            values(strategy)
            save(strategy, "checkpoints")
    except (cs.errors.ReplicaLostError, cs.errors.MergeMismatchError) as error:
        raise SystemExit(str(error)) from error
