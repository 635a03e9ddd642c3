"""The data of both models, digits of scikit-learn and Python's own manual; and their checkpoints."""

from __future__ import annotations

import math
import os
import pickle
from pydoc_data.topics import topics
from typing import Any

import jax
import numpy as np


class Batches:
    """Global batches of rows of these arrays, in another order in each epoch."""

    def __init__(self, rows: int, *arrays: np.ndarray) -> None:
        self.rows, self.arrays = rows, arrays
        self.epoch = 0

    def __len__(self) -> int:
        return math.ceil(len(self.arrays[0]) / self.rows)

    def __iter__(self) -> Any:
        order = np.random.default_rng(self.epoch).permutation(len(self.arrays[0]))
        for first in range(0, len(order), self.rows):
            yield tuple(array[order[first : first + self.rows]] for array in self.arrays)


def digits(rows: int) -> tuple[Batches, tuple[np.ndarray, np.ndarray]]:
    """Batches of 1,500 images and labels, and the other 297; images are float32 ``[rows, 64]`` in [0, 1]."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    return Batches(rows, images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def manual(rows: int, length: int, pieces: int) -> tuple[Batches, str]:
    """Batches of pieces of Python's manual, int32 ``[rows, length + 1]`` of characters, and the characters."""
    text = "\n".join(topics[name] for name in sorted(topics))
    characters = "".join(sorted(set(text)))
    numbers = np.searchsorted(list(characters), list(text[: pieces * length + 1])).astype(np.int32)
    return Batches(rows, np.stack([numbers[n * length : (n + 1) * length + 1] for n in range(pieces)])), characters


def resume(path: str, batches: Batches, model: Any) -> tuple[Any, Any]:
    """The parameters and the optimizer's state in the file, if there is one, and else ``model`` and None."""
    if not os.path.exists(path):
        return model, None
    with open(path, "rb") as file:
        epoch, model, state = pickle.load(file)
    batches.epoch = int(epoch)
    return model, state


def end_epoch(path: str, batches: Batches, said: str, model: Any, state: Any) -> None:
    """Print what is said about an epoch. Write the parameters and optax's state; the file is replaced as a whole."""
    print(f"epoch {batches.epoch}  {said}", flush=True)
    batches.epoch += 1
    if path:
        with open(f"{path}.new", "wb") as file:
            pickle.dump(jax.tree.map(np.asarray, (batches.epoch, model, state)), file)
        os.replace(f"{path}.new", path)
