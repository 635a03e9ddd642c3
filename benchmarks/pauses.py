"""Steps of a script that computes between them: whether any step is much longer than the others.

    .venv/bin/python benchmarks/pauses.py

The script computes 0, 50 and 500 µs between steps of SGD on 1 MB, with ``run`` and with ``run_steps``; first alone on
the machine, then beside two foreign processes that compute all the time. A service with mailboxes and one over ZeroMQ
alone take turns. A step of ``run`` lasts from the call to its results, without the pause. One of ``run_steps`` lasts
from one result to the next, with the pause, in which the workers go on. The goals are about the steps beside the
foreign processes: with mailboxes, they may take no longer than over ZeroMQ.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import carriers
import numpy as np
import report

PAUSES = (0, 50, 500)  # µs
FOREIGN = 2
#: Of the mailboxes' steps to those over ZeroMQ: as long, and what chance adds between two equal services.
MOST = {"median": 1.15, "p99": 1.25}


def compute(microseconds: int) -> None:
    """Keep the script busy for so long."""
    end = time.perf_counter_ns() + microseconds * 1000
    while time.perf_counter_ns() < end:
        pass


def runs(service: carriers.Service, pause: int, steps: int) -> list[float]:
    """Seconds of each step of ``run``."""
    taken = []
    for _ in range(steps):
        compute(pause)
        begun = time.perf_counter()
        service.strategy.run(service.step)
        taken.append(time.perf_counter() - begun)
    return taken


def series(service: carriers.Service, pause: int, steps: int) -> list[float]:
    """Seconds of each step of ``run_steps``."""
    elements = service.strategy.experimental_distribute_dataset([np.zeros(2)] * (steps + 1))
    whens = []
    for _ in service.strategy.run_steps(service.step, elements):
        whens.append(time.perf_counter())
        compute(pause)
    return [after - before for before, after in pairwise(whens)]


WAYS = {"run": runs, "run_steps": series}


def measured(
    services: dict[str, carriers.Service], way: str, pause: int, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Seconds of each step by carrier. The carriers take turns, after some steps of each that do not count."""
    for service in services.values():
        WAYS[way](service, pause, max(2, steps // 4))
    found: dict[str, list[float]] = {carrier: [] for carrier in services}
    for _ in range(rounds):
        for carrier, service in services.items():
            found[carrier].extend(WAYS[way](service, pause, steps))
    return found


def figures(seconds: Sequence[float]) -> dict[str, float]:
    """Median, the 99th percentile and the longest."""
    return {"median": statistics.median(seconds), "p99": float(np.quantile(seconds, 0.99)), "longest": max(seconds)}


def lines(others: int, way: str, pause: int, found: dict[str, list[float]]) -> list[str]:
    """A line of the table for each carrier."""
    shown = []
    for carrier, seconds in found.items():
        all_steps = figures(seconds)
        cells = " | ".join(f"{each * 1e6:.0f}" for each in all_steps.values())
        ratio = all_steps["p99"] / all_steps["median"]
        shown.append(f"| {others or 'none'} | {way} | {pause} | {carrier} | {cells} | {ratio:.1f} |")
    return shown


def verdicts(way: str, pause: int, found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """How many times as long steps with mailboxes last as those over ZeroMQ."""
    ours, others = figures(found["mailboxes"]), figures(found["zmq"])
    goals = [report.Goal(f"{way}, {pause} µs", "<=", bound, "over ZeroMQ", what) for what, bound in MOST.items()]
    return [goal.verdict(goal.ratio(ours[goal.what], others[goal.what])) for goal in goals]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--steps", type=int, default=100, help="a round")
    options = parser.parse_args()
    goals = []
    with carriers.side_by_side() as services:
        print("| others | way | pause, µs | carrier | median, µs | p99, µs | longest, µs | p99 / median |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for others in (0, FOREIGN):
            with carriers.busy(others):
                for way in WAYS:
                    for pause in PAUSES:
                        found = measured(services, way, pause, options.rounds, options.steps)
                        print("\n".join(lines(others, way, pause, found)), flush=True)
                        if others:
                            goals += verdicts(way, pause, found)
    print(f"\nbeside {FOREIGN} foreign processes, with mailboxes and over ZeroMQ\n{report.goals_table(goals)}")


if __name__ == "__main__":
    main()
