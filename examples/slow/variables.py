"""A linear model of eight weights for each of 2,000 sensors. Each sensor has a variable of its own; with --mended, all
have one variable together.

cs-launch --devices cpu:0,cpu:1 examples/slow/variables.py
"""

import argparse

import numpy as np

import central_storage as cs

SENSORS, INPUTS, ROWS, BATCH = 2_000, 8, 512, 128

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=1000)
parser.add_argument("--mended", action="store_true", help="keep the weights of all sensors in one variable")
options = parser.parse_args()

rng = np.random.default_rng(0)
x = rng.normal(size=(ROWS, SENSORS, INPUTS)).astype(np.float32)
y = x.sum(axis=2)

strategy = cs.CentralStorageStrategy()
with strategy.scope():
    if options.mended:
        weights = cs.Variable(np.zeros((SENSORS, INPUTS), np.float32), name="weights")
    else:
        weights = [cs.Variable(np.zeros(INPUTS, np.float32), name=f"sensor{n}") for n in range(SENSORS)]
    optimizer = cs.optimizers.SGD(learning_rate=0.1)


@cs.function
def step_of_many(batch):
    x, y = batch
    total, pairs = 0.0, []
    for n, w in enumerate(weights):
        error = x[:, n] @ w - y[:, n]
        pairs.append((error @ x[:, n] / BATCH, w))
        total += (error**2).sum() / (BATCH * SENSORS)
    optimizer.apply_gradients(pairs)
    return total


@cs.function
def step_of_one(batch):
    x, y = batch
    error = np.einsum("rsi,si->rs", x, weights) - y
    optimizer.apply_gradients([(np.einsum("rs,rsi->si", error, x) / BATCH, weights)])
    return (error**2).sum() / (BATCH * SENSORS)


step = step_of_one if options.mended else step_of_many
batches = strategy.experimental_distribute_dataset(cs.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))
for epoch in range(options.epochs):
    losses = [strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None) for batch in batches]
    print(f"epoch {epoch}  loss {np.mean(losses):.4f}")
