"""A recommender in TensorFlow: each step reads and updates a few rows of two tables of vectors.

ratings.py is the same program over Central Storage.
"""

import argparse

import numpy as np
import tensorflow as tf
from data import ratings

EPOCHS, BATCH = 10, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", help="write losses and tables to this file")
    options = parser.parse_args()
    rated, begin = ratings(users=2000, items=300, rank=8, count=20_000)

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0")
    with strategy.scope():
        users, items = [tf.Variable(table) for table in begin]
        seen = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.SUM)
        optimizer = tf.compat.v1.train.AdagradOptimizer(0.3, initial_accumulator_value=1e-4)

    def step(batch):
        who, what, rating = batch
        with tf.GradientTape() as tape:
            u, i = tf.nn.embedding_lookup(users, who), tf.nn.embedding_lookup(items, what)
            error = tf.reduce_sum(u * i, axis=1) - rating
            loss = tf.reduce_sum(error**2) / BATCH
        gradients = tape.gradient(loss, [users, items])  # IndexedSlices
        optimizer.apply_gradients(zip(gradients, [users, items]))
        seen.assign_add(tf.cast(tf.size(rating), tf.float32))
        return loss

    @tf.function
    def train(batch):
        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

    data = tf.data.Dataset.from_tensor_slices(rated).batch(BATCH)
    losses = []
    for epoch in range(EPOCHS):
        for batch in strategy.experimental_distribute_dataset(data):
            losses.append(train(batch).numpy())
        print(f"epoch {epoch}  loss {losses[-1]:.4f}  ratings {seen.numpy():.0f}")

    if options.save:
        np.savez(options.save, losses=np.array(losses), users=users.numpy(), items=items.numpy(), seen=seen.numpy())


if __name__ == "__main__":
    main()
