"""P9: the same seed makes the same bits, and a training that goes on from a checkpoint those of one that was never
interrupted.

Two services make the same trainings. In the second one replicas come to their merge points after other pauses, so in
another order, and steps are sent ahead where the first one waited for each, or the other way round.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import central_storage as cs

__all__ = ["pairs"]

REPLICAS = 2
_ROWS = 32
#: Steps of a training, of which a checkpoint is made in the middle.
_STEPS = 20
_RULES = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "Ftrl", "Nadam", "RMSprop", "RowwiseAdagrad")
#: A replica pauses for up to so long, seconds.
_PAUSE = 0.002


@dataclass(frozen=True)
class _Recipe:
    """What a training is made from."""

    seed: int
    rule: str
    elements: int
    is_resumed: bool


class _Training:
    """One training of a service."""

    def __init__(self, strategy: cs.CentralStorageStrategy, recipe: _Recipe) -> None:
        self._strategy, self._recipe = strategy, recipe
        rng = np.random.default_rng(recipe.seed)
        with strategy.scope():
            self.dense = cs.Variable(rng.normal(size=recipe.elements).astype(np.float32))
            self.table = cs.Variable(rng.normal(size=(_ROWS, 4)))
            self.seen = cs.Variable(0.0, aggregation=cs.VariableAggregation.MEAN, dtype=np.float64)
            self.optimizer: Any = getattr(cs.optimizers, recipe.rule)(learning_rate=0.01)
        # A shuffle without a seed goes on as it was; made again it has to have one.
        order = cs.data.Dataset.range(_STEPS).shuffle(_STEPS, seed=None if recipe.is_resumed else recipe.seed)
        data = strategy.experimental_distribute_dataset(order.map(lambda k: np.full(REPLICAS, k)))
        self.elements = iter(data)
        self.checkpoint = cs.train.Checkpoint(
            dense=self.dense, table=self.table, seen=self.seen, optimizer=self.optimizer, elements=self.elements
        )

    def train(self, count: int, ahead: int) -> list[bytes]:
        """So many steps from here on; what the replicas made of each, as bytes."""
        dense, table, seen, optimizer, recipe = self.dense, self.table, self.seen, self.optimizer, self._recipe

        def step(element: Any) -> float:
            context = cs.get_replica_context()
            assert context is not None
            k, replica = int(np.ravel(element)[0]), int(context.replica_id_in_sync_group)
            time.sleep(_PAUSE * os.urandom(1)[0] / 255)
            rng = np.random.default_rng([recipe.seed, k, replica])
            gradient = rng.normal(size=dense.shape).astype(np.float32) * np.asarray(dense)
            gradient += np.random.normal(size=dense.shape).astype(np.float32)
            rows = rng.integers(0, _ROWS, 3)
            optimizer.apply_gradients(
                [(gradient, dense), (cs.IndexedSlices(np.asarray(table)[rows] * rng.normal(size=(3, 1)), rows), table)]
            )
            loss = float(context.all_reduce("MEAN", np.array(float(np.square(gradient).sum()))))
            seen.assign(loss)
            return loss

        if ahead:
            results = list(self._strategy.run_steps(step, self.elements, count, lookahead=ahead))
        else:
            results = [self._strategy.run(step, args=(next(self.elements),)) for _ in range(count)]
        return [np.array(self._strategy.experimental_local_results(result)).tobytes() for result in results]

    def state(self, directory: Path) -> bytes:
        """Every variable and slot: what a checkpoint of now holds."""
        path = Path(self.checkpoint.save(directory / "state"))
        header = int.from_bytes(path.read_bytes()[:8], "little")
        return path.read_bytes()[8 + header :]


@contextmanager
def _service(seed: int) -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy([f"cpu:{replica}" for replica in range(REPLICAS)], seed=seed) as strategy:
        yield strategy


def pairs(rng: random.Random, count: int) -> list[str]:
    """Make ``count`` trainings twice, half of them the second time from a checkpoint; what differs, in words."""
    seed, ahead = rng.getrandbits(32), rng.choice([0, 2])
    recipes = [
        _Recipe(rng.getrandbits(32), rng.choice(_RULES), rng.choice([7, 1000, 100_000]), n >= count // 2)
        for n in range(count)
    ]
    found = []
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        directory = Path(name)
        once = []
        with _service(seed) as strategy:
            for number, recipe in enumerate(recipes):
                training = _Training(strategy, recipe)
                said = training.train(_STEPS // 2, ahead)
                if recipe.is_resumed:
                    training.checkpoint.save(directory / f"{number}")
                said += training.train(_STEPS // 2, ahead)
                once.append((said, training.state(directory)))
        with _service(seed) as strategy:
            for number, (recipe, (said, state)) in enumerate(zip(recipes, once, strict=True)):
                training, first = _Training(strategy, recipe), 0
                if recipe.is_resumed:
                    first = _STEPS // 2
                    with strategy.scope():
                        path = directory / f"{number}-1.safetensors"
                        training.checkpoint.restore(path).assert_existing_objects_matched()
                again = training.train(_STEPS - first, 2 - ahead)
                what = f"{recipe.rule} over {recipe.elements} elements, {'resumed' if first else 'made again'}"
                different = [k for k in range(first, _STEPS) if said[k] != again[k - first]]
                if different:
                    found.append(f"{what}: step {different[0]} has other results")
                if training.state(directory) != state:
                    found.append(f"{what}: the variables end otherwise")
    return found
