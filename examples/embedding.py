"""A matrix factorisation: two tables, sparse gradients, a learning-rate schedule, a metric, and steps sent ahead.

Users and items have secret vectors. A rating is the product of two of them, with noise. The program learns the vectors
from some of the ratings, and measures how well they predict the others.

cs-launch --devices cpu:0,cpu:1 examples/embedding.py        # the launcher starts the service
python examples/embedding.py --devices gpu:0,gpu:1           # the script does; the tables stay in the machine's memory
"""

from __future__ import annotations

import argparse

import numpy as np

import central_storage as cs

NOISE = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", help="one replica per device, e.g. cpu:0,cpu:1 (default: the launcher's)")
    parser.add_argument("--users", type=int, default=10_000)
    parser.add_argument("--items", type=int, default=1_000)
    parser.add_argument("--rank", type=int, default=4, help="length of a vector")
    parser.add_argument("--ratings", type=int, default=400_000)
    parser.add_argument("--batch", type=int, default=4_000, help="ratings of a global batch")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()

    random = np.random.default_rng(0)
    true_users = random.normal(size=(options.users, options.rank)).astype(np.float32)
    true_items = random.normal(0, options.rank**-0.5, (options.items, options.rank)).astype(np.float32)

    def pairs(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        users, items = random.integers(options.users, size=count), random.integers(options.items, size=count)
        return users, items, np.einsum("nk,nk->n", true_users[users], true_items[items])

    users, items, ratings = pairs(options.ratings)
    ratings += random.normal(0, NOISE, options.ratings).astype(np.float32)

    strategy = cs.CentralStorageStrategy(options.devices.split(",") if options.devices else None, "cpu:0")
    steps = -(-options.ratings // options.batch)
    with strategy.scope():
        user_vectors = random.normal(0, 0.5, true_users.shape).astype(np.float32)
        item_vectors = random.normal(0, 0.5, true_items.shape).astype(np.float32)
        # Their gradients are rows, so they need no gradient buffers.
        user_table = cs.Variable(user_vectors, name="users", sparse=True)
        item_table = cs.Variable(item_vectors, name="items", sparse=True)
        rate = cs.optimizers.schedules.ExponentialDecay(0.5, decay_steps=steps, decay_rate=0.8)
        optimizer = cs.optimizers.Adagrad(rate)
        squared_error = cs.metrics.Mean(name="error")

    @cs.function
    def step(batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        users, items, ratings = batch
        # Only these rows are read, and only their gradients are sent.
        u, i = cs.nn.embedding_lookup(user_table, users), cs.nn.embedding_lookup(item_table, items)
        error = (u * i).sum(axis=1) - ratings
        gradients = cs.IndexedSlices(error[:, None] * i, users, user_table.shape)
        item_gradients = cs.IndexedSlices(error[:, None] * u, items, item_table.shape)
        optimizer.apply_gradients([(gradients, user_table), (item_gradients, item_table)])
        squared_error.update_state(error**2)

    data = cs.data.Dataset.from_tensor_slices((users, items, ratings)).shuffle(options.ratings, seed=0)
    for epoch in range(options.epochs):
        squared_error.reset_state()
        batches = strategy.experimental_distribute_dataset(data.batch(options.batch))
        for _ in strategy.run_steps(step, batches, progress=f"epoch {epoch}"):
            pass
        now = float(rate(optimizer.iterations))
        print(
            f"epoch {epoch}  rate {now:.3f}  error {float(squared_error.result()) ** 0.5:.4f} on the training ratings"
        )

    users, items, truth = pairs(20_000)
    learned = np.einsum(
        "nk,nk->n", cs.nn.embedding_lookup(user_table, users), cs.nn.embedding_lookup(item_table, items)
    )
    once = 2 * (user_table.numpy().nbytes + item_table.numpy().nbytes)  # the tables, and Adagrad's slots
    replicas = strategy.num_replicas_in_sync
    print(
        f"memory: {once / 1e6:.1f} MB for tables and optimizer, held once; {replicas * once / 1e6:.1f} MB if each of "
        f"{replicas} replicas held its own"
    )
    error, spread = np.sqrt(np.mean((learned - truth) ** 2)), np.sqrt(np.mean(truth**2))
    print(f"ratings never seen: error {error:.4f}, spread {spread:.4f}, ratio {error / spread:.4f}")


if __name__ == "__main__":
    main()
