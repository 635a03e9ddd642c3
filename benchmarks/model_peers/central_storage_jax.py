"""central-storage: the same for models of JAX."""

from __future__ import annotations

import sys
from itertools import cycle, islice

import central_storage as cs
import central_storage.jax as csj
from model_peers.jax_training import TRAININGS, Training
from model_peers.obeying import obey


class Central:
    def __init__(self, strategy: cs.CentralStorageStrategy, training: Training, is_ahead: bool) -> None:
        self.strategy, self.batches, self.is_ahead = strategy, cycle(training.batches()), is_ahead
        with strategy.scope():
            model = csj.centralize(training.made())
        self.step = csj.step(model, training.optimizer(csj.optim))(training.loss)

    def run(self, steps: int) -> float:
        batches = csj.batches(self.strategy, list(islice(self.batches, steps)))
        losses = self.step.ahead(batches) if self.is_ahead else map(self.step, batches)
        return float(list(losses)[-1])


if __name__ == "__main__":
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        obey(Central(strategy, TRAININGS[sys.argv[1]], is_ahead="ahead" in sys.argv[2:]))
