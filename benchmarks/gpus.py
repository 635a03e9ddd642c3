"""Where variables should lie if the replicas compute on a GPU: a step with large gradients, by place of the variables.

    .venv/bin/python benchmarks/gpus.py

Two replicas on one GPU fill their gradient buffers, so a step is little more than the transport and the update. The
variables lie in host memory, on the GPU, or on the GPU with ``server_recovery=False``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import numpy as np

import central_storage as cs

RULES = {"SGD": cs.optimizers.SGD, "Adam": cs.optimizers.Adam}
#: By name: whether the variables lie on the GPU of the replicas, and ``server_recovery``.
PLACES = {"host memory": (False, True), "the GPU": (True, True), "the GPU, no recovery": (True, False)}


def seconds_of(strategy: cs.CentralStorageStrategy, rule: str, megabytes: int, steps: int) -> list[float]:
    """Seconds of each step. The first five do not count."""
    with strategy.scope():
        variable, optimizer = cs.Variable(np.zeros(megabytes * 250_000, np.float32)), RULES[rule](1e-3)

    def step() -> None:
        gradients = cs.gradient_buffers([variable])
        gradients[0].fill(1.0)
        optimizer.apply_gradients([(gradients[0], variable)])

    found = []
    for _ in range(steps + 5):
        begun = time.perf_counter()
        strategy.run(step)
        found.append(time.perf_counter() - begun)
    return found[5:]


def line(device: str, rule: str, megabytes: int, steps: int) -> str:
    """A line of the table."""
    medians = []
    for is_there, recovers in PLACES.values():
        with cs.CentralStorageStrategy([device] * 2, device if is_there else "cpu:0", server_recovery=recovers) as made:
            medians.append(statistics.median(seconds_of(made, rule, megabytes, steps)))
    return " | ".join([f"| {rule}, {megabytes} MB", *(f"{seconds * 1e3:.2f} ms" for seconds in medians)]) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="gpu:0", help="of both replicas (default: gpu:0)")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 100, 400], help="MB of float32")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(arguments)
    print(" | ".join(["| step", *PLACES]) + " |\n" + "| --- " * (1 + len(PLACES)) + "|")
    for megabytes in options.sizes:
        for rule in RULES:
            print(line(options.device, rule, megabytes, options.steps), flush=True)


if __name__ == "__main__":
    main()
