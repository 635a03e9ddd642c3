"""A training whose result is known: ``cs-ctl doctor`` runs it under ``cs-launch`` over every transport.

``python -m central_storage.ctl.trial_script FILE`` trains with two replicas and writes what it found to ``FILE`` as
JSON. The functions of the replicas are defined in this script, as in a user's.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from central_storage.observer.blocking import Observer, Session
from central_storage.optimizers.sgd import SGD
from central_storage.strategy.service_strategy import CentralStorageStrategy
from central_storage.variables.variable import Variable

__all__ = ["STEPS", "expected", "main"]

#: Steps of the training, each with one element for each replica.
STEPS = 100
# Elements of the variable: several pages.
_LENGTH = 10_000
_RATE, _MOMENTUM = 0.125, 0.5


def main(path: str) -> None:
    """Train in the service of ``cs-launch`` and write what was found to ``path``."""
    start, target, elements = _data()
    strategy = CentralStorageStrategy()
    with strategy.scope():
        w = Variable(start, name="w")
        optimizer = SGD(_RATE, momentum=_MOMENTUM)

    def step(element: Any) -> float:
        difference = np.asarray(w) - target
        optimizer.apply_gradients([(difference * np.asarray(element)[0], w)])
        return float(np.abs(difference).max())

    def look() -> list[int]:
        """The sum of the bytes that this process sees, and whether it maps the memory in which they lie."""
        with open("/proc/self/maps") as maps:
            return [zlib.crc32(np.asarray(w).tobytes()), int("parameters" in maps.read())]

    begun = time.perf_counter()
    results = strategy.run_steps(step, strategy.experimental_distribute_dataset(list(elements)))
    losses = [[float(loss) for loss in strategy.experimental_local_results(result)] for result in results]
    seconds = time.perf_counter() - begun
    seen = [[int(number) for number in found] for found in strategy.experimental_local_results(strategy.run(look))]
    trained, mine = w.numpy(), look()
    with Observer(Session(strategy.address, timeout=10.0, maps=False)) as observer:
        of_server = zlib.crc32(observer.get("w").tobytes())
    names = ("script", *(f"w{rank}" for rank in range(len(seen))), "server")
    found = {
        "seconds": seconds,
        "digest": _digest(trained, losses),
        "posted": strategy.statistics().posted,
        "sums": dict(zip(names, [mine[0], *(each[0] for each in seen), of_server], strict=True)),
        "maps": {name: bool(each[1]) for name, each in zip(names[:-1], [mine, *seen], strict=True)},
    }
    Path(path).write_text(json.dumps(found))


def expected() -> str:
    """The digest of the right result, computed by NumPy alone."""
    w, target, elements = _data()
    rate, momentum, moved = np.float32(_RATE), np.float32(_MOMENTUM), np.zeros_like(w)
    losses = []
    for element in elements:
        difference = w - target
        losses.append([float(np.abs(difference).max())] * len(element))
        gradient = difference * element[0] + difference * element[1]
        moved = momentum * moved - rate * gradient
        w = w + moved
    return _digest(w, losses)


def _data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first value of the variable, what it should become, and the elements: a row for each step."""
    rng = np.random.default_rng(19)
    start, target = rng.standard_normal((2, _LENGTH), dtype=np.float32)
    return start, target, rng.random((STEPS, 2), dtype=np.float32)


def _digest(w: np.ndarray, losses: list[list[float]]) -> str:
    return hashlib.sha256(w.tobytes() + np.array(losses).tobytes()).hexdigest()


if __name__ == "__main__":
    main(sys.argv[1])
