"""central-storage: two workers of one thread, variables and optimizer state once, in the parameter process."""

from __future__ import annotations

import sys
from itertools import cycle, islice

import central_storage as cs
import central_storage.torch as cst
from model_peers.obeying import obey
from model_peers.training import TRAININGS, Training


class Central:
    def __init__(self, strategy: cs.CentralStorageStrategy, training: Training, is_ahead: bool) -> None:
        self.strategy, self.batches, self.is_ahead = strategy, cycle(training.batches()), is_ahead
        with strategy.scope():
            model = cst.centralize(training.made())
        optimizers = training.optimizers(model, cst.optim)

        @cst.step(model, *optimizers)
        def step(*share):
            return training.loss(model, *share)

        self.step = step

    def run(self, steps: int) -> float:
        batches = cst.batches(self.strategy, islice(self.batches, steps))
        losses = self.step.ahead(batches) if self.is_ahead else map(self.step, batches)
        return float(list(losses)[-1])


if __name__ == "__main__":
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        obey(Central(strategy, TRAININGS[sys.argv[1]], is_ahead="ahead" in sys.argv[2:]))
