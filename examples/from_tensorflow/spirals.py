"""A custom training loop over Central Storage: a small network separates the arms of a spiral.

spirals_tensorflow.py is the same program in TensorFlow.
"""

import argparse

import numpy as np
from data import spirals

import central_storage as cs

EPOCHS, BATCH, ROWS = 20, 96, 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", help="write losses and weights to this file")
    options = parser.parse_args()
    x, y, initial = spirals(ROWS)

    strategy = cs.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0")
    with strategy.scope():
        w1, b1, w2, b2 = [cs.Variable(value) for value in initial]
        rate = cs.optimizers.schedules.ExponentialDecay(0.02, decay_steps=100, decay_rate=0.7)
        optimizer = cs.optimizers.Adam(rate, epsilon=1e-7)

    @cs.function
    def step(inputs):
        features, labels = inputs
        rows = np.arange(len(labels))
        # Forward, as in TensorFlow.
        hidden = np.maximum(features @ w1 + b1, 0)
        logits = hidden @ w2 + b2
        chances = np.exp(logits - logits.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        losses = -np.log(chances[rows, labels])
        loss = cs.nn.compute_average_loss(losses, global_batch_size=BATCH)
        # Backward: TensorFlow's tape does this.
        chances[rows, labels] -= 1
        d_logits = chances / BATCH
        d_hidden = (d_logits @ np.asarray(w2).T) * (hidden > 0)
        gradients = [features.T @ d_hidden, d_hidden.sum(axis=0), hidden.T @ d_logits, d_logits.sum(axis=0)]
        optimizer.apply_gradients(zip(gradients, [w1, b1, w2, b2]))
        return loss

    def train(inputs):
        per_replica = strategy.run(step, args=(inputs,))
        return strategy.reduce("SUM", per_replica, axis=None)

    data = strategy.experimental_distribute_dataset(cs.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))
    losses = []
    for epoch in range(EPOCHS):
        for inputs in data:  # strategy.run_steps(step, data) sends steps ahead and is faster
            losses.append(train(inputs))
        print(f"epoch {epoch}  loss {losses[-1]:.4f}")

    if options.save:
        weights = {f"w{k}": v.numpy() for k, v in enumerate((w1, b1, w2, b2))}
        np.savez(options.save, losses=np.array(losses), **weights)


if __name__ == "__main__":
    main()
