"""What a run costs that returns a large array: held where the worker has placed it, copied, and the copy alone.

    python benchmarks/returns.py

One replica returns the same array again and again, and the script adds it up. The fastest of several interleaved
rounds.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

import central_storage as cs
from central_storage.controller import result_leases

SIZES = (1, 16, 100)
KINDS = {"held": result_leases.MOST, "copied": 0}


@cs.function
def returned(mbytes: int) -> Any:
    """An array that the replica has already."""
    kept = globals().setdefault("_kept", {})
    if mbytes not in kept:
        kept[mbytes] = np.ones(mbytes << 18, np.float32)
    return kept[mbytes]


def measure(strategy: cs.CentralStorageStrategy, mbytes: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Seconds of the run and of adding up, by kind: fastest of the rounds."""
    best: dict[str, tuple[float, float]] = {}

    def note(kind: str, run: float, use: float) -> None:
        least = best.get(kind, (run, use))
        best[kind] = min(least[0], run), min(least[1], use)

    for _ in range(rounds):
        array: Any = None
        for kind, most in KINDS.items():
            result_leases.MOST = most
            for _ in range(3):  # of which the first finds the places of the other kind
                begun = time.perf_counter()
                array = strategy.run(returned, args=(mbytes,))
                over = time.perf_counter()
                array.sum()
                note(kind, over - begun, time.perf_counter() - over)
        begun = time.perf_counter()
        copy = np.array(array)
        over = time.perf_counter()
        copy.sum()
        note("the copy alone", over - begun, time.perf_counter() - over)
        del copy
    result_leases.MOST = KINDS["held"]
    return best


def main() -> None:
    """Print one line for each size."""
    parser = argparse.ArgumentParser(description="what a run costs that returns a large array")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="MB")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    with cs.CentralStorageStrategy(["cpu:0"]) as strategy:
        for mbytes in given.sizes:
            found = measure(strategy, mbytes, given.rounds)
            parts = [f"{kind} {run * 1e3:.2f} + {use * 1e3:.2f}" for kind, (run, use) in found.items()]
            print(f"{mbytes} MB, ms of the run + of adding up: {', '.join(parts)}")


if __name__ == "__main__":
    main()
