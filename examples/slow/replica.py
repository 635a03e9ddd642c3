"""A filter that predicts the next sample of recordings. The rows of a batch are sorted by length, so the last replica
gets the long ones; with --mended, the sorted rows are dealt to the replicas in turn.

cs-launch --devices cpu:0,cpu:1 examples/slow/replica.py
"""

import argparse

import numpy as np

import central_storage as cs

ROWS, LONGEST, TAPS, BATCH = 512, 10_000, 64, 64

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=1000)
parser.add_argument("--mended", action="store_true", help="give every replica long and short rows")
options = parser.parse_args()

rng = np.random.default_rng(0)
noise = rng.normal(size=(ROWS, LONGEST + 1)).astype(np.float32)
recordings = noise[:, 1:] - noise[:, :-1]
lengths = (LONGEST * rng.uniform(0.1, 1, ROWS) ** 2).astype(int)  # most are short; the rest of a row is padding

strategy = cs.CentralStorageStrategy()
with strategy.scope():
    taps = cs.Variable(np.zeros(TAPS, np.float32), name="taps")
    optimizer = cs.optimizers.SGD(learning_rate=0.1)


def shortest_first(recordings, lengths):
    order = np.argsort(lengths)
    return recordings[order], lengths[order]


def dealt(recordings, lengths):
    order = np.argsort(lengths)
    order = np.concatenate([order[r :: strategy.num_replicas_in_sync] for r in range(strategy.num_replicas_in_sync)])
    return recordings[order], lengths[order]


@cs.function
def step(batch):
    total, gradient = 0.0, np.zeros(TAPS, np.float32)
    for recording, length in zip(*batch, strict=True):
        windows = np.lib.stride_tricks.sliding_window_view(recording[:length], TAPS)[:-1]
        error = windows @ taps - recording[TAPS:length]
        gradient += error @ windows / (length * BATCH)
        total += (error**2).mean() / BATCH
    optimizer.apply_gradients([(gradient, taps)])
    return total


data = cs.data.Dataset.from_tensor_slices((recordings, lengths)).shuffle(ROWS, seed=1).batch(BATCH)
batches = strategy.experimental_distribute_dataset(data.map(dealt if options.mended else shortest_first))
for epoch in range(options.epochs):
    losses = [strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None) for batch in batches]
    print(f"epoch {epoch}  loss {np.mean(losses):.4f}")
