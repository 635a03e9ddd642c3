"""What `from_dlpack(variable)` costs beside one copy of the same bytes, in the script and in a replica.

    python benchmarks/dlpack.py

NumPy always, torch and JAX where they are installed. Every number is the fastest of several interleaved rounds divided
by the fastest copy into new memory (`np.array`) of the same rounds: 1 is one copy, 0 is none.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import central_storage as cs

#: The module of each consumer that has `from_dlpack`.
CONSUMERS = {"numpy": "numpy", "torch": "torch", "jax": "jax.numpy"}


def consumers() -> dict[str, Callable[[Any], Any]]:
    """The ``from_dlpack`` of each consumer that is installed."""
    found = {}
    for name, module in CONSUMERS.items():
        try:
            found[name] = importlib.import_module(module).from_dlpack
        except ImportError:
            continue
    return found


def measure(variable: cs.Variable, rounds: int) -> dict[str, float]:
    """The seconds that each consumer takes, and that one copy of the value takes: the fastest of ``rounds``."""
    value = np.asarray(variable)
    kinds: dict[str, Callable[[], Any]] = {"one copy": lambda: np.array(value)}
    for name, take in consumers().items():
        kinds[name] = lambda take=take: take(variable)
    best = dict.fromkeys(kinds, float("inf"))
    for _ in range(rounds):
        for name, take in kinds.items():
            begun = time.perf_counter()
            taken = take()
            best[name] = min(best[name], time.perf_counter() - begun)
            del taken
    return best


def main() -> None:
    """Print one line for the script and one for a replica."""
    parser = argparse.ArgumentParser(description="what from_dlpack(variable) costs beside one copy")
    parser.add_argument("--mbytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    with cs.CentralStorageStrategy(["cpu:0"]) as strategy:
        with strategy.scope():
            variable = cs.Variable(np.ones(given.mbytes * 250_000, np.float32))
        found = {
            "in the script": measure(variable, given.rounds),
            "in a replica": strategy.run(lambda: measure(variable, given.rounds)),
        }
    for where, seconds in found.items():
        copied = seconds.pop("one copy")
        ratios = ", ".join(f"{name} {taken / copied:.2f}" for name, taken in seconds.items())
        print(f"{where}, {given.mbytes} MB, as a multiple of one copy ({copied * 1e3:.1f} ms): {ratios}")


if __name__ == "__main__":
    main()
