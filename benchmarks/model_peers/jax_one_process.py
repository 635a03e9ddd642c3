"""jax-one-process: one process, and as many threads as JAX takes by itself; a step is one compiled function."""

from __future__ import annotations

import sys
from itertools import cycle

import jax
import optax

from model_peers.jax_training import TRAININGS, Training
from model_peers.obeying import obey


class Alone:
    def __init__(self, training: Training) -> None:
        self.batches = cycle(training.batches())
        self.model = training.made()
        optimizer = training.optimizer(optax)
        self.state = optimizer.init(self.model)

        @jax.jit
        def step(model, state, *batch):
            loss, gradients = jax.value_and_grad(training.loss)(model, *batch)
            updates, state = optimizer.update(gradients, state, model)
            return optax.apply_updates(model, updates), state, loss

        self.step = step

    def run(self, steps: int) -> float:
        for _ in range(steps):
            self.model, self.state, loss = self.step(self.model, self.state, *next(self.batches))
            shown = float(loss)
        return shown


if __name__ == "__main__":
    obey(Alone(TRAININGS[sys.argv[1]]))
