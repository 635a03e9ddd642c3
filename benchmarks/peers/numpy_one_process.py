"""numpy-one-process: plain NumPy, one process; gradients of both replicas are one, batches are whole."""

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


class ApplyTrial:
    """The rule as one writes it in NumPy, without needless copies."""

    def __init__(self, work: Apply, steps: int) -> None:
        self.work, self.done = work, 0
        self.weight, self.gradient = work.initial(), work.gradients_sum()
        self.first, self.second = np.empty_like(self.weight), np.empty_like(self.weight)
        if work.rule == "adam":
            self.mean, self.square = np.zeros_like(self.weight), np.zeros_like(self.weight)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.done += 1
            if self.work.rule == "sgd":
                np.multiply(self.gradient, RATES["sgd"], out=self.first)
                self.weight -= self.first
            else:
                self._adam()

    def _adam(self) -> None:
        self.mean *= BETA_1
        np.multiply(self.gradient, 1 - BETA_1, out=self.first)
        self.mean += self.first
        self.square *= BETA_2
        np.multiply(self.gradient, self.gradient, out=self.first)
        self.first *= 1 - BETA_2
        self.square += self.first
        rate = RATES["adam"] * np.sqrt(1 - BETA_2**self.done) / (1 - BETA_1**self.done)
        np.sqrt(self.square, out=self.first)
        self.first += EPSILON
        np.multiply(self.mean, np.float32(rate), out=self.second)
        self.second /= self.first
        self.weight -= self.second

    def check(self) -> None:
        self.work.check(self.weight, self.done)


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
    """Equal rows are summed by sorting them."""

    def __init__(self, work: Embedding, steps: int) -> None:
        self.work, self.done, self.ids = work, 0, work.ids(steps)
        self.table = work.initial()
        self.sums = np.full_like(self.table, ACCUMULATOR)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            drawn = self.ids[self.done].ravel()
            order = np.argsort(drawn)
            rows, starts = np.unique(drawn[order], return_index=True)
            gradient = np.add.reduceat(self.table[drawn[order]], starts)
            sums = self.sums[rows] + gradient * gradient
            self.sums[rows] = sums
            self.table[rows] -= RATES["adagrad"] * gradient / np.sqrt(sums)
            self.done += 1

    def check(self) -> None:
        self.work.check(self.table, self.ids[: self.done])


TRIALS: dict[type[Work], Callable[..., Trial]] = {Apply: ApplyTrial, Digits: DigitsTrial, Embedding: EmbeddingTrial}


@contextmanager
def opened(work: Work, steps: int) -> Iterator[Trial]:
    assert not isinstance(work, Read), "in one process there is nothing to read"
    yield TRIALS[type(work)](work, steps)


if __name__ == "__main__":
    main(opened)
