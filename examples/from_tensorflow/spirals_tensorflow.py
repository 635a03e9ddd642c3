"""A custom training loop in TensorFlow: a small network separates the arms of a spiral.

spirals.py is the same program over Central Storage.
"""

import argparse

import numpy as np
import tensorflow as tf
from data import spirals

EPOCHS, BATCH, ROWS = 20, 96, 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", help="write losses and weights to this file")
    options = parser.parse_args()
    x, y, initial = spirals(ROWS)

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0")
    with strategy.scope():
        w1, b1, w2, b2 = [tf.Variable(value) for value in initial]
        rate = tf.keras.optimizers.schedules.ExponentialDecay(0.02, decay_steps=100, decay_rate=0.7)
        step_number = tf.Variable(0, dtype=tf.int64, trainable=False)
        optimizer = tf.compat.v1.train.AdamOptimizer(lambda: rate(step_number), epsilon=1e-7)

    def step(inputs):
        features, labels = inputs
        with tf.GradientTape() as tape:
            hidden = tf.nn.relu(features @ w1 + b1)
            logits = hidden @ w2 + b2
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
        variables = [w1, b1, w2, b2]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    @tf.function
    def train(inputs):
        per_replica = strategy.run(step, args=(inputs,))
        return strategy.reduce("SUM", per_replica, axis=None)

    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))
    losses = []
    for epoch in range(EPOCHS):
        for inputs in data:
            losses.append(train(inputs).numpy())
            step_number.assign_add(1)
        print(f"epoch {epoch}  loss {losses[-1]:.4f}")

    if options.save:
        weights = {f"w{k}": v.numpy() for k, v in enumerate((w1, b1, w2, b2))}
        np.savez(options.save, losses=np.array(losses), **weights)


if __name__ == "__main__":
    main()
