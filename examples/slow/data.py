"""A small network on rows of text. Each batch is parsed anew while the workers wait; with --mended, all rows once.

cs-launch --devices cpu:0,cpu:1 examples/slow/data.py
"""

import argparse

import numpy as np

import central_storage as cs

ROWS, INPUTS, HIDDEN, BATCH = 8192, 128, 1024, 4096

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=1000)
parser.add_argument("--mended", action="store_true", help="parse the rows once, before the training")
options = parser.parse_args()

rng = np.random.default_rng(0)
numbers = rng.normal(size=(ROWS, INPUTS + 1)).round(4)
texts = np.array([",".join(map(str, row)) for row in numbers])  # as the lines of a CSV file


def parse(lines):
    table = np.array([[float(field) for field in line.split(",")] for line in lines], np.float32)
    return table[:, :-1], table[:, -1:]


if options.mended:
    data = cs.data.Dataset.from_tensor_slices(parse(texts)).shuffle(ROWS, seed=1).batch(BATCH)
else:
    data = cs.data.Dataset.from_tensor_slices(texts).shuffle(ROWS, seed=1).batch(BATCH).map(parse)

strategy = cs.CentralStorageStrategy()
with strategy.scope():
    w1 = cs.Variable(rng.normal(0, 0.1, (INPUTS, HIDDEN)).astype(np.float32), name="w1")
    w2 = cs.Variable(rng.normal(0, 0.1, (HIDDEN, 1)).astype(np.float32), name="w2")
    optimizer = cs.optimizers.Adam(learning_rate=0.001)


@cs.function
def step(batch):
    x, y = batch
    hidden = np.tanh(x @ w1)
    error = (hidden @ w2 - y) / BATCH
    back = (error @ np.asarray(w2).T) * (1 - hidden**2)
    optimizer.apply_gradients([(x.T @ back, w1), (hidden.T @ error, w2)])
    return (error**2).sum() * BATCH


batches = strategy.experimental_distribute_dataset(data)
for epoch in range(options.epochs):
    losses = [strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None) for batch in batches]
    print(f"epoch {epoch}  loss {np.mean(losses):.4f}")
