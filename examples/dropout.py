"""A network with dropout, trained on two replicas. The evaluation after each epoch does not change the masks."""

import numpy as np

import central_storage as cs

RATE = 0.3

rows = np.random.default_rng(0)
x = rows.normal(size=(2000, 16)).astype(np.float32)
y = (x[:, :1] * x[:, 1:2] > 0).astype(np.float32)  # do the first two numbers have the same sign?

strategy = cs.CentralStorageStrategy(["cpu:0", "cpu:1"], seed=1)
with strategy.scope():
    w1 = cs.Variable(rows.normal(0, 0.3, (16, 64)).astype(np.float32), name="w1")
    w2 = cs.Variable(rows.normal(0, 0.2, (64, 1)).astype(np.float32), name="w2")
    optimizer = cs.optimizers.Adam(learning_rate=0.01)


def probability(hidden):
    return 1 / (1 + np.exp(-hidden @ np.asarray(w2)))


@cs.function
def train(batch):
    x, y = batch
    hidden = np.maximum(x @ np.asarray(w1), 0)
    # The mask of a step and replica is the same in every training with this seed, and after a restart.
    kept = (cs.random.generator().random(hidden.shape, np.float32) >= RATE) / np.float32(1 - RATE)
    error = (probability(hidden * kept) - y) / 100
    back = (error @ np.asarray(w2).T) * kept * (hidden > 0)
    optimizer.apply_gradients([(x.T @ back, w1), ((hidden * kept).T @ error, w2)])
    return (error**2).sum()


@cs.function
def evaluate(batch):
    x, y = batch
    return ((probability(np.maximum(x @ np.asarray(w1), 0)) > 0.5) == y).sum()


batches = strategy.experimental_distribute_dataset(cs.data.Dataset.from_tensor_slices((x, y)).batch(100))
for epoch in range(10):
    for batch in batches:
        strategy.run(train, args=(batch,))
    right = sum(int(strategy.reduce("SUM", strategy.run(evaluate, args=(batch,)), axis=None)) for batch in batches)
    print(f"epoch {epoch}  right {right / len(x):.1%}")
