"""What surviving the server's death costs an update: the compiled kernels with undo slots and without.

    python benchmarks/undo.py

Ratios to the plain kernel in float32 with two replicas' gradients, by how many bytes of each array are kept at a time.
Processor time of the fastest of several interleaved rounds: what else a machine does only adds to it.
"""

from __future__ import annotations

import argparse
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from cs_server.compute import kernels, undo
from cs_server.rules import RULES, Rule

GIVEN = {"learning_rate": 0.01, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}
REPLICAS = 2
SIZES = (512, 1024, 2048, 4096, 16 << 10, 64 << 10, 256 << 10)


def shared(nbytes: int) -> np.ndarray:
    """Shared memory, as a server has it."""
    descriptor = os.memfd_create("bench")
    try:
        os.ftruncate(descriptor, nbytes)
        array = np.frombuffer(mmap.mmap(descriptor, nbytes), np.float32)
    finally:
        os.close(descriptor)
    array[:] = 0.5
    return array


def sides(rule: Rule, nbytes: int, threads: int) -> dict[str, Callable[[], None]]:
    """The updates to compare, over memory of their own."""
    length = nbytes // 4 // threads
    pool = ThreadPoolExecutor(threads)
    whole = np.array([[0, length]])
    shares = [
        (
            [shared(4 * length) for _ in range(1 + len(rule.slots) + REPLICAS)],
            undo.Lane(shared(undo.used_nbytes(1)).view(np.uint8)),
        )
        for _ in range(threads)
    ]
    tags = count(1)

    def update(lane_of: Callable[[undo.Lane], undo.Lane], share: Any) -> None:
        (w, *others), lane = share
        slots, gradients = tuple(others[:-REPLICAS]), tuple(others[-REPLICAS:])
        numbers = kernels.UpdateNumbers(rule, w.dtype, REPLICAS)
        numbers.set(GIVEN, 1, ())
        kernels.BoundRanges(numbers, whole, w, slots, gradients, lane_of(lane)).update(is_scaled=False)()

    def spread(lane_of: Callable[[undo.Lane], undo.Lane]) -> None:
        list(pool.map(partial(update, lane_of), shares))

    def kept(size: int) -> None:
        kernels.KEPT_BLOCK_NBYTES, tag = size, next(tags)

        def entered(lane: undo.Lane) -> undo.Lane:
            lane.enter(tag)
            return lane

        spread(entered)

    return {"plain": lambda: spread(lambda lane: undo.Lane())} | {str(size): partial(kept, size) for size in SIZES}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    print(f"| | threads | plain, ms | {' | '.join(map(str, SIZES))} |\n|{' --- |' * (3 + len(SIZES))}")
    for name, threads, megabytes in [
        (n, t, m) for n in ("adam", "adagrad", "sgd") for t in (1, 2) for m in (1, 16, 100)
    ]:
        updates = sides(RULES[name], megabytes << 20, threads)
        repeats = max(1, 32 // megabytes)
        seconds: dict[str, list[float]] = {side: [] for side in updates}
        for number in range(rounds + 1):
            for side, update in updates.items():
                begun = time.process_time()
                for _ in range(repeats):
                    update()
                if number:  # the first touches memory and compiles
                    seconds[side].append((time.process_time() - begun) / repeats)
        fastest = {side: min(found) for side, found in seconds.items()}
        ratios = " | ".join(f"{fastest[str(size)] / fastest['plain']:.2f}" for size in SIZES)
        print(f"| {name}, {megabytes} MB | {threads} | {1e3 * fastest['plain']:.2f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
