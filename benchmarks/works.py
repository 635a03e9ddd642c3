"""What is measured: the works by name, what goes into each, and what must be there after it, computed by NumPy.

Every peer gets its input here and hands its result back to ``check``, which raises AssertionError where it computed
something else. This module needs nothing but NumPy, since every peer's environment imports it. All arrays are float32
unless said; two replicas take part in everything, unless BENCHMARK_REPLICAS is another number.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np

#: The programs of benchmarks/cluster.py take part in other numbers, too.
REPLICAS = int(os.environ.get("BENCHMARK_REPLICAS", "2"))
RATES = {"sgd": 0.01, "adam": 0.002, "adagrad": 0.05}
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-7
ACCUMULATOR = 0.1  # what Adagrad's begins at
FIRST_STEP = "first-step"
EMPTY = "empty-run"
MANY = "adam-16MBx1000"
#: Where the driver puts the digits, for environments that have no scikit-learn.
DIGITS = "BENCHMARK_DIGITS"

_BLOCK = 4096  # large arrays repeat a block of so many elements, so that the truth about them is cheap
_TOLERANCE = 1e-3  # of the largest movement


@dataclass(frozen=True)
class Apply:
    """Two gradients of the variable's size come in, the rule is applied to their sum, all may go on."""

    rule: str
    nbytes: int
    is_copied: bool = False  # whether the gradients lie elsewhere than where the service wants them
    count: int = 1  # of variables of equal size, which are that large together

    def initial(self) -> np.ndarray:
        """The variable, of shape [nbytes / 4], in [-1, 1)."""
        return _repeated(_block(0, -1, 1), self.nbytes // 4)

    def gradient(self, replica: int) -> np.ndarray:
        """What the replica brings in every step, in [0.5, 1)."""
        return _repeated(_block(1 + replica, 0.5, 1), self.nbytes // 4)

    def gradients_sum(self) -> np.ndarray:
        """What somebody brings who works alone."""
        return _repeated(self._sum(np.float32), self.nbytes // 4)

    def check(self, weights: np.ndarray, steps: int) -> None:
        """Raise AssertionError unless these are the weights after so many steps in all."""
        initial = _block(0, -1, 1).astype(np.float64)
        gradient = self._sum(np.float64)
        weight, mean, square = initial, np.zeros(_BLOCK), np.zeros(_BLOCK)
        for t in range(1, steps + 1):
            if self.rule == "sgd":
                weight = weight - RATES["sgd"] * gradient
            else:
                mean = BETA_1 * mean + (1 - BETA_1) * gradient
                square = BETA_2 * square + (1 - BETA_2) * gradient**2
                rate = RATES["adam"] * np.sqrt(1 - BETA_2**t) / (1 - BETA_1**t)
                weight = weight - rate * mean / (np.sqrt(square) + EPSILON)
        assert weights.shape == (self.nbytes // 4,), weights.shape
        _compare(weights, weight, initial)

    @staticmethod
    def _sum(dtype: type[np.floating]) -> np.ndarray:
        """A block of the sum of all replicas' gradients."""
        return np.sum([_block(1 + replica, 0.5, 1) for replica in range(REPLICAS)], axis=0, dtype=dtype)


@dataclass(frozen=True)
class Read:
    """Both replicas are told to read all variables and have them as arrays."""

    nbytes: int
    count: int

    def initial(self) -> list[np.ndarray]:
        """So many variables of equal size."""
        return [_repeated(_block(n, -1, 1), self._size) for n in range(self.count)]

    def check(self, arrays: list[np.ndarray]) -> None:
        """Raise AssertionError unless this is what a replica reads after 1 has been added to every variable."""
        assert len(arrays) == self.count
        for n, array in enumerate(arrays):
            assert array.shape == (self._size,), array.shape
            initial = _block(n, -1, 1)
            _compare(array, initial + 1, initial, tolerance=1e-6)

    @property
    def _size(self) -> int:
        return self.nbytes // 4 // self.count


@dataclass(frozen=True)
class Digits:
    """A step of the handwritten digits, 64-256-10, 2 x 128 rows, SGD; the script gets the loss of every step."""

    is_ahead: bool  # whether the script may send steps before it has the results of those before

    def batches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Images [256, 64] and labels int64 [256], to be used in turn; a replica takes its half of the rows."""
        with np.load(os.environ[DIGITS]) as data:
            images, labels = data["images"], data["labels"]
        rows = 128 * REPLICAS
        return [(images[at : at + rows], labels[at : at + rows]) for at in range(0, len(images) - rows + 1, rows)]

    def initial(self) -> list[np.ndarray]:
        """Weights and biases of both layers."""
        random = np.random.default_rng(3)
        shapes = ((64, 256), (256,), (256, 10), (10,))
        return [random.normal(0, 0.1, shape).astype(np.float32) for shape in shapes]

    def check(self, weights: list[np.ndarray], steps: int) -> None:
        """Raise AssertionError unless these are the weights after so many steps in all."""
        batches, initial = self.batches(), self.initial()
        truth = [array.astype(np.float64) for array in initial]
        gradients = [np.empty_like(array) for array in truth]
        for step in range(steps):
            x, y = batches[step % len(batches)]
            loss_and_gradients(x.astype(np.float64), y, len(y), truth, gradients)
            for array, gradient in zip(truth, gradients, strict=True):
                array -= RATES["sgd"] * gradient
        for array, true, begun in zip(weights, truth, initial, strict=True):
            assert array.shape == true.shape
            # By the norm: rounding decides now and then whether a unit is on, and moves single weights visibly.
            wrong, moved = np.linalg.norm(array - true), np.linalg.norm(true - begun)
            assert wrong <= 1e-2 * moved, f"wrong by {wrong:.3g} where the weights moved by {moved:.3g}"


@dataclass(frozen=True)
class Embedding:
    """Each replica looks up 4,096 random rows of a table [rows, 64]; the loss is half of their squares' sum, so a row's
    gradient is the row, as often as it was drawn. Sparse Adagrad."""

    rows: int
    width: int = field(default=64, init=False)
    drawn: int = field(default=4096, init=False)

    def initial(self) -> np.ndarray:
        """The table, read-only: a row is the one before it, moved on by an element, so that it takes no memory."""
        return np.lib.stride_tricks.sliding_window_view(
            _repeated(_block(0, 0.5, 1), self.rows + self.width - 1), self.width
        )

    def ids(self, steps: int) -> np.ndarray:
        """The rows that are drawn, int64 [steps, replicas, drawn]."""
        return np.random.default_rng(7).integers(self.rows, size=(steps, REPLICAS, self.drawn))

    def check(self, table: Any, ids: np.ndarray) -> None:
        """Raise AssertionError unless ``table[rows]`` are these rows after steps in which ``ids`` were drawn."""
        initial = self.initial()
        touched, places = np.unique(ids, return_inverse=True)
        drawn = [np.unique(step, return_counts=True) for step in places.reshape(len(ids), -1)]
        found = table[touched]
        for at in range(0, self.width, 16):  # fresh memory is what costs the time, and so it takes little
            columns = slice(at, at + 16)
            begun = initial[touched, columns].astype(np.float64)
            weight, sums = begun.copy(), np.full(begun.shape, ACCUMULATOR)
            for rows, counts in drawn:
                gradient = counts[:, np.newaxis] * weight[rows]
                sums[rows] += gradient**2
                weight[rows] -= RATES["adagrad"] * gradient / np.sqrt(sums[rows])
            _compare(found[:, columns], weight, begun)
        others = np.setdiff1d(np.random.default_rng(8).integers(self.rows, size=10_000), touched)
        assert np.array_equal(table[others], initial[others]), "a row changed that was never drawn"


@dataclass(frozen=True)
class Empty:
    """A run in which a replica says its number and nothing else."""

    def check(self, said: list[int]) -> None:
        """Raise AssertionError unless this is what the replicas say."""
        assert said == list(range(REPLICAS)), said


Work = Apply | Read | Digits | Embedding | Empty

WORKS: dict[str, Work] = {
    "sgd-1MB": Apply("sgd", 1_000_000),
    "sgd-100MB": Apply("sgd", 100_000_000),
    "adam-1MB": Apply("adam", 1_000_000),
    "adam-16MB": Apply("adam", 16_000_000),
    MANY: Apply("adam", 16_000_000, count=1000),
    "adam-100MB": Apply("adam", 100_000_000),
    "adam-400MB": Apply("adam", 400_000_000),
    "adam-400MB-copied": Apply("adam", 400_000_000, is_copied=True),
    "read-1MBx1": Read(1_000_000, 1),
    "read-400MBx1": Read(400_000_000, 1),
    "read-400MBx1000": Read(400_000_000, 1000),
    "digits": Digits(is_ahead=False),
    "digits-many-steps": Digits(is_ahead=True),
    "embedding": Embedding(1_000_000),
    "embedding-1e5": Embedding(100_000),
    "embedding-1e7": Embedding(10_000_000),
    FIRST_STEP: Apply("adam", 4_000),
    EMPTY: Empty(),
}


def loss_and_gradients(
    x: np.ndarray, y: np.ndarray, rows: int, parameters: list[np.ndarray], out: list[np.ndarray]
) -> float:
    """The digits by hand: what these rows add to the mean loss of a batch of ``rows``; gradients go to ``out``."""
    w1, b1, w2, b2 = parameters
    hidden = np.maximum(x @ w1 + b1, 0)
    chances = hidden @ w2 + b2
    chances -= chances.max(axis=1, keepdims=True)
    np.exp(chances, out=chances)
    chances /= chances.sum(axis=1, keepdims=True)
    picked = np.arange(len(y)), y
    loss = -float(np.log(chances[picked]).sum()) / rows
    chances[picked] -= 1
    chances *= 1 / rows
    np.matmul(hidden.T, chances, out=out[2])
    chances.sum(axis=0, out=out[3])
    back = chances @ w2.T
    back *= hidden > 0
    np.matmul(x.T, back, out=out[0])
    back.sum(axis=0, out=out[1])
    return loss


def _block(seed: int, low: float, high: float) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, _BLOCK).astype(np.float32)


def _repeated(block: np.ndarray, size: int) -> np.ndarray:
    """``block`` again and again; np.resize takes three times as long."""
    return np.tile(block, -(-size // len(block)))[:size]


def _compare(found: np.ndarray, true: np.ndarray, begun: np.ndarray, tolerance: float = _TOLERANCE) -> None:
    """``found`` is ``true``, or many such one after the other, the last perhaps in part."""
    starts = range(0, len(found), len(true))
    differences = (np.abs(found[at : at + len(true)] - true[: len(found) - at]).max() for at in starts)
    wrong = np.max([*differences], initial=0)
    moved = np.abs(true - begun).max(initial=0)
    assert wrong <= tolerance * moved, f"wrong by {wrong:.3g} where the weights moved by {moved:.3g}"
