"""What surviving the server's death costs an update: the compiled kernels with undo slots and without, and an
experiment.

    python benchmarks/undo.py

Ratios to the plain kernel, of medians over interleaved rounds, for Adam in float32 with two replicas' gradients. The
experiment is the *sliding* update: each share of a variable has one chunk of slack, and the new chunk is written where
the old one before it was, so nothing is copied, but a variable moves with every update. It is here to be measured and
has no way to recover.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np

from cs_server import fused, kernels, undo
from cs_server.updates import RULES, scalars

GIVEN = {"learning_rate": 0.01, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}
RULE = RULES["adam"]
CHUNK = kernels.CHUNK_NBYTES // 4
REPLICAS = 2

_step = numba.njit(error_model="numpy", forceinline=True)(RULE.step)


@numba.njit(error_model="numpy", nogil=True)
def slide(w: Any, a: Any, b: Any, addresses: Any, numbers: Any, chunk: int, down: bool, progress: Any) -> None:
    """One update of arrays with a chunk of slack in front (``down``) or behind."""
    length = w.shape[0] - chunk
    scratch = np.empty(chunk, w.dtype)
    count = (length + chunk - 1) // chunk
    for k in range(count):
        number = k if down else count - 1 - k
        start = number * chunk
        stop = min(start + chunk, length)
        g = fused._summed(addresses, w, scratch, start, stop)  # noqa: SLF001  (what the kernels do, too)
        old = chunk if down else 0
        new = chunk - old
        ow, oa, ob = w[start + old : stop + old], a[start + old : stop + old], b[start + old : stop + old]
        nw, na, nb = w[start + new : stop + new], a[start + new : stop + new], b[start + new : stop + new]
        for i in range(ow.shape[0]):
            nw[i], na[i], nb[i] = _step(ow[i], g[i], oa[i], ob[i], *numbers)
        fused._tell(progress, k + 1)  # noqa: SLF001


def shared(count: int) -> np.ndarray:
    """Shared memory, as a server has it: ``count`` float32."""
    descriptor = os.memfd_create("bench")
    try:
        os.ftruncate(descriptor, 4 * count)
        array = np.frombuffer(mmap.mmap(descriptor, 4 * count), np.float32)
    finally:
        os.close(descriptor)
    array[:] = 0.5
    return array


def sides(nbytes: int, threads: int) -> dict[str, Callable[[], None]]:
    """The updates to compare, over memory of their own."""
    count = nbytes // 4 // threads
    pool = ThreadPoolExecutor(threads)
    whole = np.array([[0, count]])
    numbers = scalars(RULE, GIVEN, 1, np.dtype(np.float32))
    shares = []
    for _ in range(threads):
        arrays = [shared(count + CHUNK) for _ in range(3 + REPLICAS)]
        lane = undo.Lane(shared(undo.used_nbytes(1) // 4).view(np.uint8))
        shares.append((arrays, np.array([g.ctypes.data for g in arrays[3:]]), lane, np.zeros(1, np.int64)))
    is_down = False
    tag = 0

    def spread(work: Callable[[Any], None]) -> None:
        if threads == 1:
            work(shares[0])
        else:
            list(pool.map(work, shares))

    def update(share: Any, lane: undo.Lane) -> None:
        w, a, b, *gradients = (array[:count] for array in share[0])
        kernels.apply_dense(RULE, whole, w, (a, b), tuple(gradients), GIVEN, 1, lane)

    def plain() -> None:
        spread(lambda share: update(share, undo.Lane()))

    def with_undo() -> None:
        nonlocal tag
        tag += 1

        def work(share: Any) -> None:
            share[2].enter(tag)
            update(share, share[2])

        spread(work)

    def sliding() -> None:
        nonlocal is_down
        is_down = not is_down
        spread(lambda share: slide(*share[0][:3], share[1], numbers, CHUNK, is_down, share[3]))

    return {"plain": plain, "undo": with_undo, "sliding": sliding}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    print("| Adam, float32 | threads | plain, ms | undo | sliding |\n| --- | --- | --- | --- | --- |")
    for threads in (1, 2):
        for megabytes in (1, 16, 100):
            updates = sides(megabytes << 20, threads)
            repeats = max(1, 32 // megabytes)
            seconds: dict[str, list[float]] = {name: [] for name in updates}
            for number in range(rounds + 1):
                for name, update in updates.items():
                    begun = time.perf_counter()
                    for _ in range(repeats):
                        update()
                    if number:  # the first touches memory and compiles
                        seconds[name].append((time.perf_counter() - begun) / repeats)
            medians = {name: statistics.median(found) for name, found in seconds.items()}
            ratios = " | ".join(f"{medians[name] / medians['plain']:.2f}" for name in ("undo", "sliding"))
            print(f"| {megabytes} MB | {threads} | {1e3 * medians['plain']:.2f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
