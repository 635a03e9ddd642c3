"""tf-central-storage: TensorFlow's CentralStorageStrategy over two logical CPUs of one process, the optimizers of
``tf.compat.v1`` (faster than Keras's) inside ``tf.function``; where steps may be sent ahead, so is the loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from program import Trial, main
from works import ACCUMULATOR, BETA_1, BETA_2, EPSILON, RATES, REPLICAS, Apply, Digits, Embedding, Read, Work

v1 = tf.compat.v1.train
Strategy = tf.distribute.experimental.CentralStorageStrategy

#: Up to so many bytes the loop over steps is inside ``tf.function``. Larger steps last far longer than a call, and the
#: loop may hold the sums of gradients of ten iterations at a time.
NBYTES_IN_LOOP = 16_000_000


class ApplyTrial:
    """Gradients are tensors that are there already."""

    def __init__(self, strategy: Strategy, work: Apply, steps: int) -> None:
        self.work, self.done = work, 0
        with strategy.scope():
            self.variable = variable = tf.Variable(work.initial())
            rate = RATES[work.rule]
            optimizer = (
                v1.GradientDescentOptimizer(rate)
                if work.rule == "sgd"
                else v1.AdamOptimizer(rate, BETA_1, BETA_2, EPSILON)
            )
        self.gradients = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(work.gradient(context.replica_id_in_sync_group))
        )

        def apply(gradient: tf.Tensor) -> None:
            optimizer.apply_gradients([(gradient, variable)])

        @tf.function
        def step(gradients: tf.Tensor) -> None:
            strategy.run(apply, args=(gradients,))

        @tf.function
        def many(gradients: tf.Tensor, count: tf.Tensor) -> None:
            for _ in tf.range(count):
                strategy.run(apply, args=(gradients,))

        self.step, self.many = step, many

    def run(self, steps: int) -> None:
        if steps > 1 and self.work.nbytes <= NBYTES_IN_LOOP:
            self.many(self.gradients, tf.constant(steps))
        else:
            for _ in range(steps):
                self.step(self.gradients)
        self.done += steps

    def check(self) -> None:
        self.work.check(self.variable.numpy(), self.done)


class ReadTrial:
    """Both replicas take the value of every variable, as tensors on their devices."""

    def __init__(self, strategy: Strategy, work: Read, steps: int) -> None:
        self.strategy, self.work = strategy, work
        with strategy.scope():
            self.variables = variables = [tf.Variable(value) for value in work.initial()]

        @tf.function
        def read() -> list[tf.Tensor]:
            return strategy.run(lambda: [variable.read_value() for variable in variables])

        self.read = read

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.values = self.read()

    def check(self) -> None:
        self.values = None
        for variable in self.variables:
            variable.assign_add(tf.ones_like(variable))
        arrays = [self.strategy.experimental_local_results(value)[1].numpy() for value in self.read()]
        self.work.check(arrays)


class DigitsTrial:
    """Each replica has its half of every batch."""

    def __init__(self, strategy: Strategy, work: Digits, steps: int) -> None:
        self.work, self.done = work, 0
        with strategy.scope():
            self.variables = variables = [tf.Variable(value) for value in work.initial()]
            optimizer = v1.GradientDescentOptimizer(RATES["sgd"])
        batches = work.batches()
        images, labels = (np.stack(part) for part in zip(*batches, strict=True))  # [batches, rows, ...]
        half = images.shape[1] // REPLICAS
        self.data = (
            strategy.experimental_distribute_values_from_function(
                lambda context: tf.constant(images[:, context.replica_id_in_sync_group * half :][:, :half])
            ),
            strategy.experimental_distribute_values_from_function(
                lambda context: tf.constant(labels[:, context.replica_id_in_sync_group * half :][:, :half])
            ),
        )
        count = len(batches)

        def train(images: tf.Tensor, labels: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
            x, y = images[number % count], labels[number % count]
            w1, b1, w2, b2 = variables
            with tf.GradientTape() as tape:
                scores = tf.nn.relu(x @ w1 + b1) @ w2 + b2
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=scores)
                loss = tf.reduce_sum(losses) / (half * REPLICAS)
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        @tf.function
        def step(images: tf.Tensor, labels: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
            return strategy.reduce("SUM", strategy.run(train, args=(images, labels, number)), axis=None)

        @tf.function
        def many(images: tf.Tensor, labels: tf.Tensor, begin: tf.Tensor, end: tf.Tensor) -> tf.Tensor:
            losses = tf.TensorArray(tf.float32, size=end - begin)
            for number in tf.range(begin, end):
                loss = strategy.reduce("SUM", strategy.run(train, args=(images, labels, number)), axis=None)
                losses = losses.write(number - begin, loss)
            return losses.stack()

        self.step, self.many = step, many

    def run(self, steps: int) -> None:
        if self.work.is_ahead:
            self.many(*self.data, tf.constant(self.done), tf.constant(self.done + steps)).numpy()
        else:
            for number in range(self.done, self.done + steps):
                self.step(*self.data, tf.constant(number)).numpy()
        self.done += steps

    def check(self) -> None:
        self.work.check([variable.numpy() for variable in self.variables], self.done)


class EmbeddingTrial:
    """The gradient of a look-up is IndexedSlices; the loop is inside."""

    def __init__(self, strategy: Strategy, work: Embedding, steps: int) -> None:
        self.work, self.done, self.ids = work, 0, work.ids(steps)
        with strategy.scope():
            self.table = table = tf.Variable(work.initial())
            optimizer = v1.AdagradOptimizer(RATES["adagrad"], initial_accumulator_value=ACCUMULATOR)
        self.drawn = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(self.ids[:, context.replica_id_in_sync_group])
        )

        def train(ids: tf.Tensor, number: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                rows = tf.nn.embedding_lookup(table, ids[number])
            optimizer.apply_gradients([(tape.gradient(rows, table, output_gradients=rows), table)])

        @tf.function
        def many(ids: tf.Tensor, begin: tf.Tensor, end: tf.Tensor) -> None:
            for number in tf.range(begin, end):
                strategy.run(train, args=(ids, number))

        self.many = many

    def run(self, steps: int) -> None:
        self.many(self.drawn, tf.constant(self.done), tf.constant(self.done + steps))
        self.done += steps

    def check(self) -> None:
        self.work.check(Rows(self.table), self.ids[: self.done])


class Rows:
    """Of a table that is not copied as a whole."""

    def __init__(self, table: tf.Variable) -> None:
        self.table = table

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        return tf.gather(self.table, rows).numpy()


TRIALS: dict[type[Work], Callable[..., Trial]] = {
    Apply: ApplyTrial,
    Read: ReadTrial,
    Digits: DigitsTrial,
    Embedding: EmbeddingTrial,
}


@contextmanager
def opened(work: Work, steps: int) -> Iterator[Trial]:
    yield TRIALS[type(work)](STRATEGY, work, steps)


if __name__ == "__main__":
    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
    STRATEGY = Strategy([f"/cpu:{replica}" for replica in range(REPLICAS)], "/cpu:0")
    main(opened)
