"""Trains the model of ``model.py``, a logistic regression that separates two clouds of points.

python examples/two_files/train.py
"""

from __future__ import annotations

import model
import numpy as np

import central_storage as cs


def clouds(rows: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """Points [rows, 2] and their classes [rows], 0.0 or 1.0."""
    random = np.random.default_rng(0)
    y = random.integers(0, 2, rows)
    x = random.normal(0, 1, (rows, 2)) + 3 * y[:, None] + (10, -5)
    return x.astype(np.float32), y.astype(np.float32)


def main() -> None:
    x, y = clouds()
    scaling = model.Scaling(x.mean(axis=0), x.std(axis=0))
    dataset = cs.data.Dataset.from_tensor_slices((x, y)).batch(100)
    for epoch in range(20):
        loss = 0.0
        for batch in model.strategy.experimental_distribute_dataset(dataset):
            losses = model.strategy.run(model.train_step, args=(batch, 100, scaling))
            loss += float(model.strategy.reduce("SUM", losses, axis=None)) / 4
        if epoch % 5 == 4:
            print(f"epoch {epoch + 1}  loss {loss:.3f}")

    [everything] = model.strategy.experimental_distribute_dataset([(x, y)])
    right = model.strategy.run(model.count_right, args=(everything, scaling))
    print(f"{model.strategy.experimental_local_results(right)[0] / len(x):.1%} told right")


if __name__ == "__main__":
    main()
