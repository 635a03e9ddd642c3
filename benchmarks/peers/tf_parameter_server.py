"""tf-ps: TensorFlow's ParameterServerStrategy: a coordinator, one parameter server, and a worker for each replica.

The strategy is asynchronous: the parameter server applies each gradient by itself when it comes, in no certain order.
So a step here is as many updates as there are replicas, and not one update by their sum. The check is weaker for that
reason: the updates are counted, and what depends on their order must be right to a tenth of the movement.

TF_TASKS in the environment has the addresses of all tasks by job, as JSON. The program is the coordinator, unless
TF_TASK names another task: ``ps/0``, ``worker/1``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from program import Trial, main
from works import ACCUMULATOR, BETA_1, BETA_2, EPSILON, RATES, REPLICAS, Apply, Embedding, Work

_TOLERANCE = 0.1  # of the largest movement
_SAMPLE = 4096  # elements that are compared: the work's arrays repeat a block of so many


class _PsTrial:
    """Steps of which each is one function for each replica; the coordinator waits for none until the end."""

    step: Callable[..., Any]

    def __init__(self, coordinator: Any) -> None:
        self.coordinator, self.done = coordinator, 0
        with coordinator.strategy.scope():
            self.updates = tf.Variable(0, dtype=tf.int64)

    def run(self, steps: int) -> None:
        for number in range(self.done, self.done + steps):
            for replica in range(REPLICAS):
                self.coordinator.schedule(self.step, args=self.arguments(number, replica))
        self.coordinator.join()
        self.done += steps

    def arguments(self, number: int, replica: int) -> tuple[Any, ...]:
        raise NotImplementedError

    def count(self) -> None:
        """Raise AssertionError unless each update was made once."""
        found = int(self.updates.numpy())
        assert found == self.done * REPLICAS, f"{found} updates for {self.done} steps"


class ApplyTrial(_PsTrial):
    """A worker reads the variable and sends back its gradient, which is made anew from a block in each step."""

    def __init__(self, coordinator: Any, work: Apply) -> None:
        super().__init__(coordinator)
        self.work = work
        with coordinator.strategy.scope():
            variable = tf.Variable(work.initial())
            mean, square = (tf.Variable(tf.zeros(variable.shape)) for _ in range(2))
        size, updates = work.nbytes // 4, self.updates
        repeats = -(-size // _SAMPLE)

        @tf.function
        def step(block: tf.Tensor, t: tf.Tensor) -> tf.Tensor:
            seen = tf.reduce_sum(variable.read_value())  # so that the variable comes to the worker
            gradient = tf.tile(block, [repeats])[:size]
            tf.raw_ops.ResourceApplyAdam(
                var=variable.handle,
                m=mean.handle,
                v=square.handle,
                beta1_power=BETA_1**t,
                beta2_power=BETA_2**t,
                lr=RATES["adam"],
                beta1=BETA_1,
                beta2=BETA_2,
                epsilon=EPSILON,
                grad=gradient,
                use_locking=True,
            )
            updates.assign_add(1)
            return seen

        self.variable, self.step = variable, step
        self.blocks = [work.gradient(replica)[:_SAMPLE] for replica in range(REPLICAS)]

    def arguments(self, number: int, replica: int) -> tuple[Any, ...]:
        return self.blocks[replica], np.float32(number * REPLICAS + replica + 1)

    def check(self) -> None:
        """As if the replicas took turns."""
        self.count()
        found, initial = self.variable.numpy(), self.work.initial()
        assert np.array_equal(found[:_SAMPLE], found[-(len(found) % _SAMPLE) - _SAMPLE :][:_SAMPLE])
        weight = initial[:_SAMPLE].astype(np.float64)
        mean, square = np.zeros_like(weight), np.zeros_like(weight)
        for t in range(1, self.done * REPLICAS + 1):
            gradient = self.blocks[(t - 1) % REPLICAS]
            mean = BETA_1 * mean + (1 - BETA_1) * gradient
            square = BETA_2 * square + (1 - BETA_2) * gradient.astype(np.float64) ** 2
            rate = RATES["adam"] * np.sqrt(1 - BETA_2**t) / (1 - BETA_1**t)
            weight = weight - rate * mean / (np.sqrt(square) + EPSILON)
        wrong, moved = np.abs(found[:_SAMPLE] - weight).max(), np.abs(weight - initial[:_SAMPLE]).max()
        assert wrong <= _TOLERANCE * moved, f"wrong by {wrong:.3g} where the weights moved by {moved:.3g}"


class EmbeddingTrial(_PsTrial):
    """Only rows travel: a worker looks them up, adds up the gradients of those that it drew twice, and sends them."""

    def __init__(self, coordinator: Any, work: Embedding, steps: int) -> None:
        super().__init__(coordinator)
        self.work, self.ids = work, work.ids(steps)
        with coordinator.strategy.scope():
            table = tf.Variable(work.initial())
            sums = tf.Variable(tf.fill(table.shape, ACCUMULATOR))
        updates = self.updates

        @tf.function
        def step(ids: tf.Tensor) -> None:
            rows = tf.nn.embedding_lookup(table, ids)
            drawn, places = tf.unique(ids)
            tf.raw_ops.ResourceSparseApplyAdagrad(
                var=table.handle,
                accum=sums.handle,
                lr=RATES["adagrad"],
                grad=tf.math.unsorted_segment_sum(rows, places, tf.size(drawn)),
                indices=drawn,
                use_locking=True,
            )
            updates.assign_add(1)

        self.table, self.step = table, step

    def arguments(self, number: int, replica: int) -> tuple[Any, ...]:
        return (self.ids[number, replica],)

    def check(self) -> None:
        """Of rows that one replica drew in one step alone: the others depend on the order."""
        self.count()
        per_update = np.concatenate([np.unique(ids) for ids in self.ids[: self.done].reshape(-1, self.work.drawn)])
        rows, updates = np.unique(per_update, return_counts=True)
        drawn, draws = np.unique(self.ids[: self.done], return_counts=True)
        once = updates == 1
        assert once.sum() > 100
        assert np.array_equal(rows, drawn)
        begun = self.work.initial()[rows[once]].astype(np.float64)
        gradient = draws[once][:, np.newaxis] * begun
        expected = begun - RATES["adagrad"] * gradient / np.sqrt(ACCUMULATOR + gradient**2)
        found = tf.gather(self.table, rows[once]).numpy()
        wrong, moved = np.abs(found - expected).max(), np.abs(expected - begun).max()
        assert wrong <= 1e-3 * moved, f"wrong by {wrong:.3g} where the rows moved by {moved:.3g}"


@contextmanager
def opened(work: Work, steps: int) -> Iterator[Trial]:
    if isinstance(work, Apply):
        yield ApplyTrial(COORDINATOR, work)
    else:
        yield EmbeddingTrial(COORDINATOR, work, steps)


if __name__ == "__main__":
    tasks = tf.train.ClusterSpec(json.loads(os.environ["TF_TASKS"]))
    job, _, index = os.environ.get("TF_TASK", "chief/0").partition("/")
    if job != "chief":
        tf.distribute.Server(tasks, job_name=job, task_index=int(index)).join()
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tasks, task_type=job, task_id=0, rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    COORDINATOR = tf.distribute.coordinator.ClusterCoordinator(strategy)
    main(opened)
