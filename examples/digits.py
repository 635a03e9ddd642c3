"""Handwritten digits, two layers in NumPy or CuPy, trained by one parameter process and one worker per device.

cs-launch --devices cpu:0,cpu:1 examples/digits.py        # the launcher starts the service
python examples/digits.py --devices cpu:0,cpu:1           # the script starts it itself

With --run-steps the workers are always a few steps ahead of the script: the same bits, with less waiting.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
from sklearn.datasets import load_digits

import central_storage as cs


def split_digits(seed: int = 0, test_rows: int = 360) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Train images, train labels, test images, test labels; images are float32 [rows, 64] in [0, 1]."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))
    images, labels = (images[order] / 16).astype(np.float32), labels[order].astype(np.int64)
    return images[test_rows:], labels[test_rows:], images[:test_rows], labels[:test_rows]


def logits(x: np.ndarray, w1: np.ndarray, b1: np.ndarray, w2: np.ndarray, b2: np.ndarray) -> np.ndarray:
    """The network: a layer of ReLU units and a linear one."""
    return np.maximum(x @ w1 + b1, 0) @ w2 + b2


def with_weights(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The batch, and each row's weight in the mean of the batch. A replica cannot count: it sees only its own share."""
    return x, y, np.full(len(y), 1 / len(y), np.float32)


def loss_and_gradients(
    x: np.ndarray, y: np.ndarray, weights: np.ndarray, parameters: list[np.ndarray], out: list[np.ndarray]
) -> np.float32:
    """The summed cross-entropy of this share. Write its part of the gradients of the batch's mean loss to ``out``."""
    xp = cs.get_array_module()
    w1, b1, w2, b2 = parameters
    hidden = xp.maximum(x @ w1 + b1, 0)
    scores = hidden @ w2 + b2
    scores -= scores.max(axis=1, keepdims=True)
    chances = xp.exp(scores)
    chances /= chances.sum(axis=1, keepdims=True)
    picked = chances[xp.arange(len(y)), y]
    loss = -xp.log(picked).sum(dtype=np.float32)

    chances[xp.arange(len(y)), y] -= 1
    chances *= weights[:, np.newaxis]
    xp.matmul(hidden.T, chances, out=out[2])
    chances.sum(axis=0, out=out[3])
    back = chances @ w2.T
    back[hidden <= 0] = 0
    xp.matmul(x.T, back, out=out[0])
    back.sum(axis=0, out=out[1])
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", help="one replica per device, e.g. cpu:0,cpu:1 (default: the launcher's)")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch", type=int, default=128, help="rows of a global batch")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--run-steps", action="store_true", help="send steps ahead instead of one at a time")
    options = parser.parse_args()

    train_x, train_y, test_x, test_y = split_digits()
    strategy = cs.CentralStorageStrategy(options.devices.split(",") if options.devices else None)

    rng = np.random.default_rng(1)
    with strategy.scope():
        parameters = [
            cs.Variable(rng.normal(0, 0.1, (64, options.hidden)).astype(np.float32), name="w1"),
            cs.Variable(np.zeros(options.hidden, np.float32), name="b1"),
            cs.Variable(rng.normal(0, 0.1, (options.hidden, 10)).astype(np.float32), name="w2"),
            cs.Variable(np.zeros(10, np.float32), name="b2"),
        ]
        optimizer = cs.optimizers.Adam(learning_rate=0.002)

    @cs.function
    def step(batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> np.float32:
        gradients = cs.gradient_buffers(parameters)
        xp = cs.get_array_module()
        loss = loss_and_gradients(*batch, [xp.asarray(p) for p in parameters], gradients)
        optimizer.apply_gradients(zip(gradients, parameters, strict=True))
        return loss

    dataset = cs.data.Dataset.from_tensor_slices((train_x, train_y)).shuffle(len(train_x), seed=2).batch(options.batch)
    batches = strategy.experimental_distribute_dataset(dataset.map(with_weights))

    started, steps = time.perf_counter(), 0
    epochs = cs.progress(range(options.epochs), "training", units="epochs")  # a bar on a terminal, else plain lines
    for _ in epochs:
        total = 0.0
        if options.run_steps:
            results = strategy.run_steps(step, batches)
        else:
            results = (strategy.run(step, args=(batch,)) for batch in batches)
        for losses in results:
            total += float(strategy.reduce("SUM", losses, axis=None))
            steps += 1
        epochs.show(loss=total / len(train_x))
    seconds = time.perf_counter() - started

    report(strategy.statistics(), steps, seconds)
    accuracy = np.mean(logits(test_x, *[p.numpy() for p in parameters]).argmax(axis=1) == test_y)
    strategy.shutdown()
    print(f"test accuracy {accuracy:.4f}")


def report(counters: cs.Counters, steps: int, seconds: float) -> None:
    """Print the work of each process."""
    rate = steps / seconds
    print(f"this script (pid {os.getpid()}) sent {steps} steps in {seconds:.1f} s: {rate:.0f} steps a second")
    print(
        f"server (pid {counters.pid}) made {counters.commits} commits to {counters.variables} variables "
        f"({counters.parameter_nbytes / 1e3:.0f} kB, with {counters.slot_nbytes / 1e3:.0f} kB of slots beside them)"
    )
    for replica in counters.replicas:
        print(
            f"worker w{replica.replica} (pid {replica.pid}, {replica.device}) ran {replica.runs} steps "
            f"and brought {replica.applies} gradients"
        )


if __name__ == "__main__":
    main()
