"""A recommender over Central Storage: each step reads and updates a few rows of two tables of vectors.

ratings_tensorflow.py is the same program in TensorFlow.
"""

import argparse

import numpy as np
from data import ratings

import central_storage as cs

EPOCHS, BATCH = 10, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", help="write losses and tables to this file")
    options = parser.parse_args()
    rated, begin = ratings(users=2000, items=300, rank=8, count=20_000)

    strategy = cs.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0")
    with strategy.scope():
        users, items = [cs.Variable(table) for table in begin]
        seen = cs.Variable(0.0, trainable=False, aggregation=cs.VariableAggregation.SUM)
        optimizer = cs.optimizers.Adagrad(0.3, initial_accumulator_value=1e-4)

    @cs.function
    def step(batch):
        who, what, rating = batch
        u, i = cs.nn.embedding_lookup(users, who), cs.nn.embedding_lookup(items, what)
        error = (u * i).sum(axis=1) - rating
        loss = (error**2).sum() / BATCH
        d_error = 2 * error[:, None] / BATCH
        gradients = [cs.IndexedSlices(d_error * i, who, users.shape), cs.IndexedSlices(d_error * u, what, items.shape)]
        optimizer.apply_gradients(zip(gradients, [users, items]))
        seen.assign_add(np.asarray(rating.size, np.float32))
        return loss

    def train(batch):
        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

    data = cs.data.Dataset.from_tensor_slices(rated).batch(BATCH)
    losses = []
    for epoch in range(EPOCHS):
        for batch in strategy.experimental_distribute_dataset(data):  # strategy.run_steps is faster
            losses.append(train(batch))
        print(f"epoch {epoch}  loss {losses[-1]:.4f}  ratings {seen.numpy():.0f}")

    if options.save:
        np.savez(options.save, losses=np.array(losses), users=users.numpy(), items=items.numpy(), seen=seen.numpy())


if __name__ == "__main__":
    main()
