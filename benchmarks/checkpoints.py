"""How long a checkpoint holds up a training, beside one copy of the same memory by NumPy.

    .venv/bin/python benchmarks/checkpoints.py

``large`` is one variable with the slots of Adam, ``small`` are many variables with theirs. Copies and saves take turns.
``in a thread`` is the time until ``save(options=CheckpointOptions(enable_async=True))`` returns, ``at once`` that of a
save without a thread, and ``restore`` that of a restore. The goals are about the medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import report

import central_storage as cs

GOALS = {
    ("large", "in a thread"): 1.2,
    ("small", "in a thread"): 20.0,
    ("small", "at once"): 20.0,
    ("small", "restore"): 20.0,
}
IN_THREAD = cs.train.CheckpointOptions(enable_async=True)


class Work:
    """Variables of float32 with the slots of Adam: ``count`` of this shape."""

    def __init__(self, strategy: cs.CentralStorageStrategy, count: int, shape: tuple[int, ...]) -> None:
        with strategy.scope():
            variables = [cs.Variable(np.zeros(shape, np.float32)) for _ in range(count)]
            adam = cs.optimizers.Adam(1e-3)

        def step() -> None:
            gradients = cs.gradient_buffers(variables)
            for gradient in gradients:
                gradient[...] = 1e-3
            adam.apply_gradients(zip(gradients, variables, strict=True))

        strategy.run(step)
        self.checkpoint = cs.train.Checkpoint(variables=variables, adam=adam)
        self.arrays = [np.ones(shape, np.float32) for _ in range(3 * count)]

    def copy(self) -> object:
        """One copy of as much memory, in as many arrays."""
        return [array.copy() for array in self.arrays]


def seconds(call: Callable[[], object]) -> float:
    """How long it takes; the end of what it returns does not count."""
    begun = time.perf_counter()
    kept = call()
    taken = time.perf_counter() - begun
    del kept
    return taken


def measured(work: Work, rounds: int) -> dict[str, list[float]]:
    """Seconds of each, which take turns. The first round does not count."""
    found: dict[str, list[float]] = {"copy": [], "in a thread": [], "at once": [], "restore": []}
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/checkpoint"
        for number in range(rounds + 1):
            taken = {
                "copy": seconds(work.copy),
                "in a thread": seconds(lambda: work.checkpoint.write(path, IN_THREAD)),
            }
            work.checkpoint.sync()
            taken["at once"] = seconds(lambda: work.checkpoint.write(path))
            taken["restore"] = seconds(lambda: work.checkpoint.read(path).assert_consumed())
            for what, each in taken.items() if number else ():
                found[what].append(each)
    return found


def lines(name: str, found: dict[str, list[float]]) -> list[str]:
    """A line of the table for each."""
    median = {what: statistics.median(each) for what, each in found.items()}
    return [f"| {name} | {what} | {each * 1e3:.2f} | {each / median['copy']:.2f} |" for what, each in median.items()]


def verdicts(name: str, found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """How many times as long each takes as a copy."""
    copy = statistics.median(found["copy"])
    goals = [
        report.Goal(f"{what}, {name}", "<=", bound, "a copy", ours=what)
        for (of, what), bound in GOALS.items()
        if of == name
    ]
    return [goal.verdict(goal.ratio(statistics.median(found[goal.ours]), copy)) for goal in goals]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default: 5)")
    parser.add_argument("--mebibytes", type=int, default=256, help="of the large variable and its slots (default: 256)")
    parser.add_argument("--variables", type=int, default=10_000, help="small variables, of 1 KiB (default: 10000)")
    options = parser.parse_args()
    with cs.CentralStorageStrategy(["cpu:0"]) as strategy:
        works = {
            "large": Work(strategy, 1, ((options.mebibytes << 20) // 12,)),
            "small": Work(strategy, options.variables, (16, 16)),
        }
        found = {name: measured(work, options.rounds) for name, work in works.items()}
    print("| work | what | ms | copies |\n|---|---|---|---|")
    for name, each in found.items():
        print("\n".join(lines(name, each)))
    print(report.goals_table([verdict for name, each in found.items() for verdict in verdicts(name, each)]))


if __name__ == "__main__":
    main()
