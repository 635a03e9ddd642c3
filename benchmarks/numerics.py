"""What a look for bad numbers in gradients adds to a step of Adam (``check_numerics``).

    .venv/bin/python benchmarks/numerics.py
    .venv/bin/python benchmarks/numerics.py --copied

Two replicas bring gradients that lie in their buffers, so a step is little more than the update of the server. With
``--copied`` they bring arrays of at most 4 MB, which are copied to their buffers. One service carries out all steps;
``off``, ``warn`` and ``raise`` take turns. The goals are about the medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import report

import central_storage as cs
from central_storage.core.check_numerics import CHECKS

SIZES = {"1MB": 1 << 20, "400MB": 400 << 20}
# Bytes of each variable, where gradients are copied.
COPIED_NBYTES = 4 << 20
MOST = {"warn": 1.02, "raise": 1.15}  # of a step without a look


class Steps:
    """Steps of Adam on so many bytes in float32: one variable, or several where gradients are copied."""

    def __init__(self, strategy: cs.CentralStorageStrategy, nbytes: int, *, copied: bool = False) -> None:
        self.strategy = strategy
        each = min(nbytes, COPIED_NBYTES) if copied else nbytes
        with strategy.scope():
            variables = [cs.Variable(np.zeros(each // 4, np.float32)) for _ in range(nbytes // each)]
            optimizer = cs.optimizers.Adam(1e-3)
        given: list[np.ndarray] = []  # each worker has its own

        @cs.function
        def step(must_fill: bool) -> None:
            if not copied:
                gradients = cs.gradient_buffers(variables)
            else:
                if not given:
                    given.extend([np.empty(variable.shape, np.float32) for variable in variables])
                gradients = given
            if must_fill:
                for gradient in gradients:
                    gradient[:] = 1e-3
            optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))

        self.step = step
        self.run(2, must_fill=True)

    def run(self, count: int, *, must_fill: bool = False) -> list[float]:
        """Seconds of each of these steps."""
        taken = []
        for _ in range(count):
            begun = time.perf_counter()
            self.strategy.run(self.step, args=(must_fill,))
            taken.append(time.perf_counter() - begun)
        return taken


def measured(steps: Steps, rounds: int, count: int) -> dict[str, list[float]]:
    """Seconds of each step by check. The checks take turns, and the first round does not count."""
    found: dict[str, list[float]] = {check: [] for check in CHECKS}
    for number in range(rounds + 1):
        for check in CHECKS:
            steps.strategy.controller.check_numerics = check  # type: ignore[attr-defined]
            taken = steps.run(count)
            found[check] += taken if number else []
    return found


def lines(size: str, found: dict[str, list[float]]) -> list[str]:
    """A line of the table for each check."""
    median = {check: statistics.median(seconds) for check, seconds in found.items()}
    return [
        f"| {size} | {check} | {seconds * 1e3:.3f} | {seconds / median['off']:.3f} |"
        for check, seconds in median.items()
    ]


def verdicts(size: str, found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """How many times as long a step with a look takes as one without."""
    off = statistics.median(found["off"])
    goals = [report.Goal(f"Adam, {size}", "<=", bound, "off", ours=check) for check, bound in MOST.items()]
    return [goal.verdict(goal.ratio(statistics.median(found[goal.ours]), off)) for goal in goals]


def main() -> None:
    """Print the table and the goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--steps", type=int, help="a round (default: 300 of the small one, 4 of the large one)")
    parser.add_argument("--copied", action="store_true", help="gradients that do not lie in their buffers")
    options = parser.parse_args()
    goals = []
    print("| size | check_numerics | ms a step | of off |\n| --- | --- | --- | --- |")
    for size in options.sizes:
        with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
            count = options.steps or (300 if size == "1MB" else 4)
            found = measured(Steps(strategy, SIZES[size], copied=options.copied), options.rounds, count)
        print("\n".join(lines(size, found)), flush=True)
        goals += verdicts(size, found)
    print(report.goals_table(goals))


if __name__ == "__main__":
    main()
