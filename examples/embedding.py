"""A table of which each step touches a few rows: sparse gradients, a schedule, a metric, many steps ahead.

Learns one number for each of 10,000 users and items from their noisy sums.

python examples/embedding.py                  # two workers on CPUs
python examples/embedding.py gpu:0,gpu:1      # on two GPUs; the tables stay with the server
"""

import sys

import numpy as np

import central_storage as cs

random = np.random.default_rng(0)
USERS, ITEMS, RATINGS = 10_000, 1_000, 100_000
user_truth, item_truth = random.normal(size=USERS), random.normal(size=ITEMS)
users, items = random.integers(USERS, size=RATINGS), random.integers(ITEMS, size=RATINGS)
ratings = (user_truth[users] + item_truth[items]).astype(np.float32)

devices = sys.argv[1] if len(sys.argv) > 1 else "cpu:0,cpu:1"
strategy = cs.CentralStorageStrategy(devices.split(","), "cpu:0")
with strategy.scope():
    user_table = cs.Variable(np.zeros((USERS, 1), np.float32), name="users")
    item_table = cs.Variable(np.zeros((ITEMS, 1), np.float32), name="items")
    rate = cs.optimizers.schedules.ExponentialDecay(0.5, decay_steps=200, decay_rate=0.7)
    optimizer = cs.optimizers.Adagrad(rate)
    mean_error = cs.metrics.Mean(name="error")


@cs.function
def step(batch):
    u, i, rating = batch
    # Only these rows are read, and only they travel back.
    error = cs.nn.embedding_lookup(user_table, u)[:, 0] + cs.nn.embedding_lookup(item_table, i)[:, 0] - rating
    gradient = error[:, None]
    optimizer.apply_gradients(
        [
            (cs.IndexedSlices(gradient, u, user_table.shape), user_table),
            (cs.IndexedSlices(gradient, i, item_table.shape), item_table),
        ]
    )
    mean_error.update_state(np.abs(error))


data = cs.data.Dataset.from_tensor_slices((users, items, ratings)).shuffle(RATINGS, seed=0).batch(1000)
for epoch in range(10):
    mean_error.reset_state()
    for _ in strategy.run_steps(step, strategy.experimental_distribute_dataset(data)):
        pass
    print(f"epoch {epoch}  rate {float(rate(optimizer.iterations)):.3f}  mean error {float(mean_error.result()):.4f}")
