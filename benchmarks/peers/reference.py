"""reference: two processes, shared memory, a spinning barrier, fused kernels and nothing else.

No owner, no messages, no names, no protection from anything: the limit for a design that keeps variables in shared
memory. Each process computes its gradient where both read it; after the barrier each applies the rule to its half.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numba
import numpy as np
from program import Trial, main
from works import (
    ACCUMULATOR,
    BETA_1,
    BETA_2,
    EPSILON,
    RATES,
    REPLICAS,
    Apply,
    Digits,
    Embedding,
    Read,
    Work,
    loss_and_gradients,
)

LOOKS = 2000  # at the other's word before the core is offered to somebody else
SLOTS = 1 << 15  # of the hash table; a step draws a quarter of that

compiled = numba.njit(cache=True, fastmath={"contract"}, error_model="numpy")


@compiled
def apply_sgd(w, g, h, rate):
    for i in range(w.shape[0]):
        w[i] -= rate * (g[i] + h[i])


@compiled
def apply_adam(w, m, v, g, h, rate, b1, c1, b2, c2, epsilon):
    for i in range(w.shape[0]):
        gradient = g[i] + h[i]
        m[i] = b1 * m[i] + c1 * gradient
        v[i] = b2 * v[i] + c2 * gradient * gradient
        w[i] -= rate * m[i] / (np.sqrt(v[i]) + epsilon)


@compiled
def look_up(table, ids, rows):
    for n in range(ids.shape[0]):
        source, target = table[ids[n]], rows[n]
        for i in range(target.shape[0]):
            target[i] = source[i]


@compiled
def apply_sparse_adagrad(table, sums, ids, gradients, rank, places, chain, rate):
    """The rows whose number is even or odd, as the rank is; equal ones are chained by a hash table, then summed."""
    for slot in range(places.shape[0]):
        places[slot] = -1
    gradient = np.empty(table.shape[1], np.float32)
    mask, total = places.shape[0] - 1, ids.shape[0]
    for n in range(total):  # chain[n] is the last before n of the same row; the table holds the last of each row
        chain[n] = -1
        if ids[n] & 1 == rank:
            slot = (ids[n] * 40503) & mask
            while places[slot] >= 0 and ids[places[slot]] != ids[n]:
                slot = (slot + 1) & mask
            chain[n] = places[slot]
            places[slot] = n
    for slot in range(places.shape[0]):
        n = places[slot]
        if n < 0:
            continue
        w, a, g = table[ids[n]], sums[ids[n]], gradients[n]
        for i in range(w.shape[0]):
            gradient[i] = g[i]
        n = chain[n]
        while n >= 0:
            g = gradients[n]
            for i in range(w.shape[0]):
                gradient[i] += g[i]
            n = chain[n]
        for i in range(w.shape[0]):
            a[i] += gradient[i] * gradient[i]
            w[i] -= rate * gradient[i] / np.sqrt(a[i])


class Pair:
    """This process and its twin, which is forked when all memory is made. Either may wait for the other."""

    def __init__(self) -> None:
        self.rank, self.words, self.turn = 0, self.zeros((REPLICAS, 16), np.int64), 0  # a cache line and more for each

    @staticmethod
    def zeros(shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
        """Shared by both."""
        return np.frombuffer(mmap.mmap(-1, int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape)

    def shared(self, value: np.ndarray) -> np.ndarray:
        """A copy that both share."""
        array = self.zeros(value.shape)
        array[...] = value
        return array

    def meet(self) -> None:
        """Wait, spinning, until the other is here too."""
        self.turn += 1
        self.words[self.rank, 0] = self.turn
        word, looks = self.words[1 - self.rank], 0
        while word[0] < self.turn:
            looks += 1
            if looks > LOOKS:
                os.sched_yield()

    def half(self, array: np.ndarray) -> np.ndarray:
        """The part of a 1-D array that this process writes."""
        middle = len(array) // 2 & ~15
        return array[middle:] if self.rank else array[:middle]


class ApplyTrial:
    """Both gradients lie in shared memory."""

    def __init__(self, pair: Pair, work: Apply, steps: int) -> None:
        self.pair, self.work, self.done = pair, work, 0
        self.weight = pair.shared(work.initial())
        self.gradients = [pair.shared(work.gradient(replica)) for replica in range(REPLICAS)]
        self.elsewhere = [work.gradient(replica) for replica in range(REPLICAS)] if work.is_copied else []
        self.slots = [pair.shared(np.zeros_like(self.weight)) for _ in range(2 if work.rule == "adam" else 0)]

    def run(self, steps: int) -> None:
        pair, half = self.pair, self.pair.half
        arrays = [half(self.weight), *map(half, self.slots), *map(half, self.gradients)]
        numbers = [np.float32(n) for n in (BETA_1, 1 - BETA_1, BETA_2, 1 - BETA_2, EPSILON)]
        for _ in range(steps):
            self.done += 1
            if self.elsewhere:
                self.gradients[pair.rank][...] = self.elsewhere[pair.rank]
            pair.meet()
            if self.work.rule == "sgd":
                apply_sgd(*arrays, np.float32(RATES["sgd"]))
            else:
                rate = RATES["adam"] * np.sqrt(1 - BETA_2**self.done) / (1 - BETA_1**self.done)
                apply_adam(*arrays, np.float32(rate), *numbers)
            pair.meet()

    def check(self) -> None:
        self.work.check(self.weight, self.done)


class ReadTrial:
    """Variables are mapped: to read them is to ask whether one may."""

    def __init__(self, pair: Pair, work: Read, steps: int) -> None:
        self.pair, self.work = pair, work
        values = work.initial()
        self.slab = pair.shared(np.concatenate(values))
        self.bounds = np.cumsum([0, *map(len, values)]).tolist()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.pair.meet()
            self.views = [self.slab[start:stop] for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]
            self.pair.meet()

    def check(self) -> None:
        self.pair.meet()
        if self.pair.rank == 0:
            self.slab += 1
        self.pair.meet()
        self.work.check(self.views)


class DigitsTrial:
    """Each computes the gradient of its half of the batch."""

    def __init__(self, pair: Pair, work: Digits, steps: int) -> None:
        self.pair, self.work, self.done, self.batches = pair, work, 0, work.batches()
        initial = work.initial()
        self.bounds = np.cumsum([0, *(value.size for value in initial)]).tolist()
        self.shapes = [value.shape for value in initial]
        self.slab = pair.shared(np.concatenate([value.ravel() for value in initial]))
        self.gradients = [pair.shared(np.zeros_like(self.slab)) for _ in range(REPLICAS)]

    def run(self, steps: int) -> None:
        pair, rows = self.pair, len(self.batches[0][1])
        mine = slice(pair.rank * rows // REPLICAS, (pair.rank + 1) * rows // REPLICAS)
        weights, gradients = self.views(self.slab), self.views(self.gradients[pair.rank])
        halves = [pair.half(array) for array in (self.slab, *self.gradients)]
        for _ in range(steps):
            x, y = self.batches[self.done % len(self.batches)]
            loss_and_gradients(x[mine], y[mine], rows, weights, gradients)
            pair.meet()
            apply_sgd(*halves, np.float32(RATES["sgd"]))
            pair.meet()
            self.done += 1

    def views(self, slab: np.ndarray) -> list[np.ndarray]:
        parts = zip(self.bounds, self.bounds[1:], self.shapes, strict=False)
        return [slab[start:stop].reshape(shape) for start, stop, shape in parts]

    def check(self) -> None:
        self.work.check(self.views(self.slab), self.done)


class EmbeddingTrial:
    """Rows are looked up into shared memory, where they are the gradients."""

    def __init__(self, pair: Pair, work: Embedding, steps: int) -> None:
        self.pair, self.work, self.done, self.ids = pair, work, 0, work.ids(steps)
        self.table = pair.shared(work.initial())
        self.sums = pair.zeros(self.table.shape)
        self.sums[...] = ACCUMULATOR
        self.gradients = pair.zeros((REPLICAS, work.drawn, work.width))

    def run(self, steps: int) -> None:
        pair, all_gradients = self.pair, self.gradients.reshape(-1, self.work.width)
        places, chain = np.empty(SLOTS, np.int64), np.empty(self.ids[0].size, np.int64)
        for _ in range(steps):
            ids = self.ids[self.done]
            look_up(self.table, ids[pair.rank], self.gradients[pair.rank])
            pair.meet()
            rate = np.float32(RATES["adagrad"])
            apply_sparse_adagrad(self.table, self.sums, ids.ravel(), all_gradients, pair.rank, places, chain, rate)
            pair.meet()
            self.done += 1

    def check(self) -> None:
        self.work.check(self.table, self.ids[: self.done])


TRIALS: dict[type[Work], Callable[..., Trial]] = {
    Apply: ApplyTrial,
    Read: ReadTrial,
    Digits: DigitsTrial,
    Embedding: EmbeddingTrial,
}


class Both:
    """The trial in this process, with the twin doing the same beside it."""

    def __init__(self, pair: Pair, trial: Trial) -> None:
        self.pair, self.trial, self.orders = pair, trial, pair.zeros((1,), np.int64)

    def run(self, steps: int) -> None:
        self.orders[0] = steps
        self.pair.meet()
        self.trial.run(steps)

    def check(self) -> None:
        self.orders[0] = -1
        self.pair.meet()
        self.trial.check()

    def follow(self) -> None:
        """What the twin does with its life."""
        while True:
            self.pair.meet()
            if self.orders[0] < 0:
                return self.trial.check()
            self.trial.run(int(self.orders[0]))


@contextmanager
def opened(work: Work, steps: int) -> Iterator[Trial]:
    pair = Pair()
    both = Both(pair, TRIALS[type(work)](pair, work, steps))
    twin = os.fork()
    if twin == 0:
        pair.rank, code = 1, 1
        try:
            both.follow()
            code = 0
        finally:
            os._exit(code)
    yield both
    assert os.waitstatus_to_exitcode(os.waitpid(twin, 0)[1]) == 0


if __name__ == "__main__":
    main(opened)
