"""central-storage: this service, with all its protections; ``SERVER_RECOVERY=off`` and ``MAX_RESTARTS=0`` in the
environment take one off. With ``CS_ADDRESS`` it uses the service there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from program import WARM, Trial, main
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
    Empty,
    Read,
    Work,
    loss_and_gradients,
)

import central_storage as cs
from cs_runtime.trace import moments


class ApplyTrial:
    """``run_steps`` over a function whose gradients lie where the server reads them, or, copied, in the worker."""

    def __init__(self, strategy: cs.CentralStorageStrategy, work: Apply, steps: int) -> None:
        self.strategy, self.work, self.done = strategy, work, 0
        with strategy.scope():
            parts = np.split(work.initial(), work.count)
            self.variables = variables = [cs.Variable(part) for part in parts]
            rate = RATES[work.rule]
            optimizer = (
                cs.optimizers.SGD(rate)
                if work.rule == "sgd"
                else cs.optimizers.Adam(rate, beta_1=BETA_1, beta_2=BETA_2, epsilon=EPSILON)
            )
        kept: list[np.ndarray] = []  # a frozen function keeps what it captured, in each worker

        @cs.function
        def in_place(must_fill: np.ndarray) -> None:
            gradients = cs.gradient_buffers(variables)
            if must_fill[0]:
                whole = work.gradient(cs.get_replica_context().replica_id_in_sync_group)
                for gradient, part in zip(gradients, np.split(whole, work.count), strict=True):
                    gradient[...] = part
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        @cs.function
        def copied(must_fill: np.ndarray) -> None:
            if must_fill[0]:
                kept[:] = [work.gradient(cs.get_replica_context().replica_id_in_sync_group)]
            optimizer.apply_gradients([(kept[0], variables[0])])

        self.step = copied if work.is_copied else in_place

        @_once
        def compare(steps: int) -> None:
            values = [np.asarray(variable) for variable in variables]
            work.check(np.concatenate(values) if values[1:] else values[0], steps)

        self.compare = compare

    def run(self, steps: int) -> None:
        _send_ahead(self.strategy, self.step, [np.full(REPLICAS, self.done + n < WARM) for n in range(steps)])
        self.done += steps

    def check(self) -> None:
        self.strategy.run(self.compare, args=(self.done,))


class ReadTrial:
    """``run`` of a function that takes the view of every variable."""

    def __init__(self, strategy: cs.CentralStorageStrategy, work: Read, steps: int) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.variables = variables = [cs.Variable(value) for value in work.initial()]

        @cs.function
        def read() -> None:
            for variable in variables:
                np.asarray(variable)

        self.read = read
        self.compare = lambda: work.check([np.asarray(variable) for variable in variables])

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.strategy.run(self.read)

    def check(self) -> None:
        for variable in self.variables:
            variable.assign_add(np.ones(variable.shape, np.float32))
        self.strategy.run(self.compare)


class DigitsTrial:
    """``run``, or ``run_steps``, over a data set that brings every replica its rows."""

    def __init__(self, strategy: cs.CentralStorageStrategy, work: Digits, steps: int) -> None:
        self.strategy, self.work, self.done = strategy, work, 0
        self.batches = work.batches()
        rows = len(self.batches[0][1])
        with strategy.scope():
            self.variables = variables = [cs.Variable(value) for value in work.initial()]
            optimizer = cs.optimizers.SGD(RATES["sgd"])

        @cs.function
        def step(batch: tuple[np.ndarray, np.ndarray]) -> float:
            gradients = cs.gradient_buffers(variables)
            loss = loss_and_gradients(*batch, rows, [np.asarray(v) for v in variables], gradients)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss

        self.step = step

    def run(self, steps: int) -> None:
        batches = [self.batches[(self.done + n) % len(self.batches)] for n in range(steps)]
        if self.work.is_ahead:
            _send_ahead(self.strategy, self.step, batches)
        else:
            for batch in self.strategy.experimental_distribute_dataset(batches):
                self.strategy.run(self.step, args=(batch,))
        self.done += steps

    def check(self) -> None:
        self.work.check([variable.numpy() for variable in self.variables], self.done)


class EmbeddingTrial:
    """``run_steps`` over a function that looks rows up and brings back gradients of these rows alone."""

    def __init__(self, strategy: cs.CentralStorageStrategy, work: Embedding, steps: int) -> None:
        self.strategy, self.work, self.done = strategy, work, 0
        self.ids = work.ids(steps)
        with strategy.scope():
            self.table = table = cs.Variable(work.initial(), sparse=True)
            optimizer = cs.optimizers.Adagrad(RATES["adagrad"], initial_accumulator_value=ACCUMULATOR, epsilon=EPSILON)

        @cs.function
        def step(ids: np.ndarray) -> None:
            note = moments("worker")
            rows = cs.nn.embedding_lookup(table, ids)
            note("looked-up")
            gradient = cs.IndexedSlices(rows, ids, table.shape)
            note("sliced")
            optimizer.apply_gradients([(gradient, table)])
            note("applied")

        self.step = step
        self.compare = _once(lambda ids: work.check(_Rows(table), ids))

    def run(self, steps: int) -> None:
        _send_ahead(self.strategy, self.step, list(self.ids[self.done : self.done + steps].reshape(steps, -1)))
        self.done += steps

    def check(self) -> None:
        self.strategy.run(self.compare, args=(self.ids[: self.done],))


class _Rows:
    """A table that is only looked at by rows: a worker on another machine has no other way without a copy of it."""

    def __init__(self, table: cs.Variable) -> None:
        self._table = table

    def __getitem__(self, ids: np.ndarray) -> np.ndarray:
        return np.asarray(cs.nn.embedding_lookup(self._table, ids))


class EmptyTrial:
    """``run`` of a function that returns at once."""

    def __init__(self, strategy: cs.CentralStorageStrategy, work: Empty, steps: int) -> None:
        self.strategy, self.work = strategy, work
        self.say = cs.function(lambda: cs.get_replica_context().replica_id_in_sync_group)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.said = self.strategy.run(self.say)

    def check(self) -> None:
        self.work.check(list(self.strategy.experimental_local_results(self.said)))


TRIALS: dict[type[Work], Callable[..., Trial]] = {
    Apply: ApplyTrial,
    Read: ReadTrial,
    Digits: DigitsTrial,
    Embedding: EmbeddingTrial,
    Empty: EmptyTrial,
}


@contextmanager
def opened(work: Work, steps: int) -> Iterator[Trial]:
    if "CS_ADDRESS" in os.environ:
        with cs.CentralStorageStrategy() as strategy:
            yield TRIALS[type(work)](strategy, work, steps)
        return
    recovery = os.environ.get("SERVER_RECOVERY", "on") == "on"
    restarts = int(os.environ.get("MAX_RESTARTS", "3"))
    devices = [f"cpu:{replica}" for replica in range(REPLICAS)]
    with cs.CentralStorageStrategy(devices, server_recovery=recovery, max_restarts=restarts) as strategy:
        yield TRIALS[type(work)](strategy, work, steps)


def _once(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """By the first replica alone: of a variable there is one."""
    return lambda value: None if cs.get_replica_context().replica_id_in_sync_group else function(value)


def _send_ahead(strategy: cs.CentralStorageStrategy, step: Callable[..., Any], elements: list[Any]) -> None:
    for _ in strategy.run_steps(step, strategy.experimental_distribute_dataset(elements)):
        pass


if __name__ == "__main__":
    main(opened)
