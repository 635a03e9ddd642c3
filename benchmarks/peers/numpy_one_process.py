"""numpy-one-process: plain NumPy, one process and one thread; gradients of both replicas are one, batches are whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from program import Trial, main
from works import (
    ACCUMULATOR,
    BETA_1,
    BETA_2,
    EPSILON,
    RATES,
    Apply,
    Digits,
    Embedding,
    Read,
    Work,
    loss_and_gradients,
)


class Rule:
    """SGD or Adam as one writes it in NumPy, without needless copies."""

    def __init__(self, name: str, weight: np.ndarray) -> None:
        self.name, self.weight, self.done = name, weight, 0
        self.first = np.empty_like(weight)
        if name == "adam":
            self.second, self.mean, self.square = np.empty_like(weight), np.zeros_like(weight), np.zeros_like(weight)

    def apply(self, gradient: np.ndarray) -> None:
        self.done += 1
        if self.name == "sgd":
            np.multiply(gradient, RATES["sgd"], out=self.first)
            self.weight -= self.first
            return
        self.mean *= BETA_1
        np.multiply(gradient, 1 - BETA_1, out=self.first)
        self.mean += self.first
        self.square *= BETA_2
        np.multiply(gradient, gradient, out=self.first)
        self.first *= 1 - BETA_2
        self.square += self.first
        rate = RATES["adam"] * np.sqrt(1 - BETA_2**self.done) / (1 - BETA_1**self.done)
        np.sqrt(self.square, out=self.first)
        self.first += EPSILON
        np.multiply(self.mean, np.float32(rate), out=self.second)
        self.second /= self.first
        self.weight -= self.second


class SparseAdagrad:
    """Gradients of equal rows are summed by sorting them."""

    def __init__(self, table: np.ndarray) -> None:
        self.table, self.sums = table, np.full_like(table, ACCUMULATOR)

    def apply(self, ids: np.ndarray, gradients: np.ndarray) -> None:
        order = np.argsort(ids)
        in_order = ids[order]
        starts = np.flatnonzero(np.diff(in_order, prepend=-1))
        rows = in_order[starts]
        gradient = np.add.reduceat(gradients[order], starts)
        sums = self.sums[rows] + gradient * gradient
        self.sums[rows] = sums
        self.table[rows] -= RATES["adagrad"] * gradient / np.sqrt(sums)


class ApplyTrial:
    """The sum of both gradients is there already."""

    def __init__(self, work: Apply, steps: int) -> None:
        self.work, self.gradient = work, work.gradients_sum()
        self.rule = Rule(work.rule, work.initial())

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.rule.apply(self.gradient)

    def check(self) -> None:
        self.work.check(self.rule.weight, self.rule.done)


class DigitsTrial:
    """The whole batch at once."""

    def __init__(self, work: Digits, steps: int) -> None:
        self.work, self.done, self.batches = work, 0, work.batches()
        self.weights = work.initial()
        self.gradients = [np.empty_like(weight) for weight in self.weights]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            x, y = self.batches[self.done % len(self.batches)]
            loss_and_gradients(x, y, len(y), self.weights, self.gradients)
            for weight, gradient in zip(self.weights, self.gradients, strict=True):
                gradient *= RATES["sgd"]
                weight -= gradient
            self.done += 1

    def check(self) -> None:
        self.work.check(self.weights, self.done)


class EmbeddingTrial:
    """Both replicas' rows at once."""

    def __init__(self, work: Embedding, steps: int) -> None:
        self.work, self.done, self.ids = work, 0, work.ids(steps)
        self.rule = SparseAdagrad(work.initial().copy())

    def run(self, steps: int) -> None:
        for _ in range(steps):
            drawn = self.ids[self.done].ravel()
            self.rule.apply(drawn, self.rule.table[drawn])
            self.done += 1

    def check(self) -> None:
        self.work.check(self.rule.table, self.ids[: self.done])


TRIALS: dict[type[Work], Callable[..., Trial]] = {Apply: ApplyTrial, Digits: DigitsTrial, Embedding: EmbeddingTrial}


@contextmanager
def opened(work: Work, steps: int) -> Iterator[Trial]:
    assert not isinstance(work, Read), "in one process there is nothing to read"
    yield TRIALS[type(work)](work, steps)


if __name__ == "__main__":
    main(opened)
