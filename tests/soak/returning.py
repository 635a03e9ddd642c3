"""How long a server that was killed is away, where it has 1 GiB of parameters: beside what reading 1 GiB takes."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import psutil

import central_storage as cs

__all__ = ["returns"]

_NBYTES = 1 << 30
_VARIABLES = 4


def returns(rng: random.Random, count: int, on_return: Callable[[float], None]) -> list[str]:
    """Kill a training's server ``count`` times at some instant of a step; a line with what that took.

    Calls ``on_return`` with each time from the kill to the next answer, seconds. Raises AssertionError where a variable
    does not hold what it should.
    """
    took: list[float] = []
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], max_restarts=100_000) as strategy:
        with strategy.scope():
            large = [
                cs.Variable(np.full(_NBYTES // _VARIABLES // 4, n, np.float32), trainable=False)
                for n in range(_VARIABLES)
            ]
            total = cs.Variable(np.zeros(1 << 16), aggregation=cs.VariableAggregation.SUM)

        def step() -> tuple[float, float]:
            total.assign_add(np.ones(total.shape))
            begun = time.perf_counter()
            read = sum(float(np.asarray(variable).max()) for variable in large)  # once over every byte
            return time.perf_counter() - begun, read

        def small() -> None:
            total.assign_add(np.ones(total.shape))

        said, steps = [strategy.experimental_local_results(strategy.run(step))], 1
        for _ in range(count):
            for _ in range(rng.randint(1, 20)):
                strategy.run(small)
                steps += 1
            server = psutil.Process(strategy.statistics().pid)
            begun = time.monotonic()
            server.send_signal(signal.SIGKILL)
            strategy.run(small)
            steps += 1
            took.append(time.monotonic() - begun)
            on_return(took[-1])
            said.append(strategy.experimental_local_results(strategy.run(step)))  # on a machine as busy as then
            steps += 1
        assert (total.numpy() == 2 * steps).all(), f"{steps} steps, and the total is {np.unique(total.numpy())[:5]}"
        assert all(read == sum(range(_VARIABLES)) for pairs in said for _, read in pairs), "1 GiB has changed"
    reading = median(seconds for pairs in said[1:] for seconds, _ in pairs)
    return [
        f"1 GiB of parameters: {count} times the next step was answered {median(took):.2f} s after the server was "
        f"killed (median; at most {max(took):.2f} s, {sum(t <= 2.0 for t in took)} times within 2 s): "
        f"{median(took) / reading:.1f} times the {reading:.2f} s in which a replica reads 1 GiB"
    ]
