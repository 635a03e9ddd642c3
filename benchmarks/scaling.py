"""How the cost of a step grows: with replicas, with variables, with bytes.

    python benchmarks/scaling.py

Prints four tables and draws scaling.svg of the first three. A step is one of ``run_steps``: every replica brings a
gradient of the full size, born in place, Adam is applied to their sum, all may go on. Beside it stands the limit: the
compiled rule over the same memory in one process, on as many threads as the service gives it, with nobody to wait for.
Medians of interleaved trials. Goals stand below the first two tables; those of replicas are for two cores. In the last
table a step is a ``run`` in which the variables are divided among several optimizers, whose steps are one update;
beside it stands one ``apply_gradients`` for each optimizer. Both are multiples of the step of one optimizer.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
import report

import central_storage as cs
from cs_server.compute import kernels
from cs_server.rules import RULES

HERE = Path(__file__).resolve().parent
SECONDS = 0.3  # that a trial is meant to take
REPLICAS = (1, 2, 4, 8)
VARIABLES = (1, 10, 100, 1_000, 10_000)
OPTIMIZERS = (1, 2, 3, 6, 12)
OPTIMIZERS_NBYTES, OPTIMIZERS_VARIABLES = 3_000_000, 24
SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 400_000_000)
NBYTES = 16_000_000  # where it is not the size that grows
NBYTES_ONE_THREAD = 1_000_000  # up to here a second thread costs more than it brings
#: Steps of so many replicas may take so many times the limit on two cores; this was measured when the goal was set.
MOST_REPLICAS = {4: 9.6 / 5.7, 8: 12.9 / 8.4}
MOST_VARIABLES = {1_000: 1.3}  # of the time of a step with one
COLOURS = ("#c0504d", "#4f81bd", "#8a8a8a", "#7a5195", "#2f7d4f", "#d98a1f", "#222222", "#17becf")
GIVEN = {"learning_rate": 0.001, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}


@dataclass(frozen=True)
class Axis:
    """What grows, and the seconds of a step at each of ``xs``; ``points`` are single ones, as (x, seconds)."""

    title: str
    unit: str
    xs: tuple[int, ...]
    lines: dict[str, list[float]]
    points: dict[str, list[tuple[int, float]]] = field(default_factory=dict)


def stepping(stack: ExitStack, replicas: int, variables: int, nbytes: int) -> Callable[[int], None]:
    """A service that is ready; call it with a number of steps."""
    strategy = stack.enter_context(cs.CentralStorageStrategy([f"cpu:{n}" for n in range(replicas)]))
    count = max(1, nbytes // 4 // variables)
    with strategy.scope():
        made = [cs.Variable(np.zeros(count, np.float32)) for _ in range(variables)]
        optimizer = cs.optimizers.Adam()

    @cs.function
    def step(must_fill: np.ndarray) -> None:
        gradients = cs.gradient_buffers(made)
        if must_fill[0]:
            for gradient in gradients:
                gradient[...] = 0.5
        optimizer.apply_gradients(zip(gradients, made, strict=True))

    def run(steps: int, must_fill: bool = False) -> None:
        elements = strategy.experimental_distribute_dataset([np.full(replicas, must_fill)] * steps)
        for _ in strategy.run_steps(step, elements):
            pass

    run(2, must_fill=True)  # of either set of gradient buffers
    return run


def empty_runs(stack: ExitStack, replicas: int) -> Callable[[int], None]:
    """The same, and each step is a ``run`` of a function that does nothing."""
    strategy = stack.enter_context(cs.CentralStorageStrategy([f"cpu:{n}" for n in range(replicas)]))
    nothing = cs.function(lambda: None)

    def run(steps: int) -> None:
        for _ in range(steps):
            strategy.run(nothing)

    return run


def divided(strategy: cs.CentralStorageStrategy, optimizers: int, is_together: bool) -> Callable[[int], None]:
    """Call it with a number of steps, in which so many optimizers update the variables of a model."""
    count = OPTIMIZERS_NBYTES // 4 // OPTIMIZERS_VARIABLES
    with strategy.scope():
        made = [cs.Variable(np.zeros(count, np.float32)) for _ in range(OPTIMIZERS_VARIABLES)]
        adams = [cs.optimizers.Adam() for _ in range(optimizers)]
    each = OPTIMIZERS_VARIABLES // optimizers

    @cs.function
    def step() -> None:
        pairs = list(zip(cs.gradient_buffers(made), made, strict=True))
        groups = [(adam, pairs[number * each : (number + 1) * each]) for number, adam in enumerate(adams)]
        if is_together:
            cs.optimizers.apply_gradients(groups)
        else:
            for adam, pairs_of_one in groups:
                adam.apply_gradients(pairs_of_one)

    def run(steps: int) -> None:
        for _ in range(steps):
            strategy.run(step)

    run(3)
    return run


def of_optimizers(rounds: int) -> str:
    """The table of steps of several optimizers."""
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        sides = {f"{n} together": divided(strategy, n, is_together=True) for n in OPTIMIZERS}
        found = medians(sides | {f"{n} alone": divided(strategy, n, is_together=False) for n in OPTIMIZERS}, rounds)
    one = found["1 together"]
    lines = [f"Optimizers, {OPTIMIZERS_NBYTES // 1_000_000} MB in {OPTIMIZERS_VARIABLES} variables\n"]
    lines.append(f"{'optimizers':>12}{'one update':>22}{'one after the other':>22}")
    lines += [
        f"{n:>12}" + "".join(f"{found[f'{n} {way}'] / one:>22.2f}" for way in ("together", "alone")) for n in OPTIMIZERS
    ]
    return "\n".join(lines) + "\n"


def alone(stack: ExitStack, replicas: int, nbytes: int) -> Callable[[int], None]:
    """The same, and a step is the rule alone."""
    threads = len(os.sched_getaffinity(0)) if nbytes > NBYTES_ONE_THREAD else 1
    pool = stack.enter_context(ThreadPoolExecutor(threads))
    count = max(1, nbytes // 4 // threads)
    shares = [[np.full(count, 0.5, np.float32) for _ in range(3 + replicas)] for _ in range(threads)]
    whole = np.array([[0, count]])

    def update(share: list[np.ndarray]) -> None:
        weights, mean, square, *gradients = share
        kernels.apply_dense(RULES["adam"], whole, weights, (mean, square), tuple(gradients), GIVEN, 1)

    def run(steps: int) -> None:
        for _ in range(steps):
            list(pool.map(update, shares)) if threads > 1 else update(shares[0])

    run(1)  # touches the memory and compiles
    return run


def medians(sides: dict[str, Callable[[int], None]], rounds: int) -> dict[str, float]:
    """Seconds of a step of each side, which take turns."""
    steps, found = dict.fromkeys(sides, 3), {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, run in sides.items():
            begun = time.perf_counter()
            run(steps[name])
            seconds = (time.perf_counter() - begun) / steps[name]
            steps[name] = min(1000, max(3, round(SECONDS / seconds)))
            if number:
                found[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def measured(title: str, unit: str, xs: tuple[int, ...], sides: Callable[[ExitStack, int], dict], rounds: int) -> Axis:
    """An axis, point by point, each with services of its own."""
    lines: dict[str, list[float]] = {}
    for x in xs:
        with ExitStack() as stack:
            for name, seconds in medians(sides(stack, x), rounds).items():
                lines.setdefault(name, []).append(seconds)
    return Axis(title, unit, xs, lines)


def table(axis: Axis) -> str:
    """For people: a column for each line, and what one unit costs in the first."""
    rows = [f"{axis.title}\n", f"{axis.unit:>12}" + "".join(f"{name:>22}" for name in axis.lines)]
    for number, x in enumerate(axis.xs):
        rows.append(f"{x:>12,}" + "".join(f"{report.shown(line[number]):>22}" for line in axis.lines.values()))
    return "\n".join(rows) + "\n"


def replica_goals(axis: Axis, cores: int) -> list[dict[str, Any]]:
    """How many times the limit a step takes with more replicas than two cores."""
    found = []
    for replicas, bound in MOST_REPLICAS.items():
        place = axis.xs.index(replicas)
        goal = report.Goal(f"{replicas} replicas", "<=", bound, "limit of the step")
        ratio = goal.ratio(axis.lines["step"][place], axis.lines[goal.other][place])
        found.append(goal.verdict(ratio if cores == 2 else None))
    return found


def variable_goals(axis: Axis) -> list[dict[str, Any]]:
    """How many times as long as with one variable a step takes with many."""
    found = []
    for variables, bound in MOST_VARIABLES.items():
        goal = report.Goal(f"{variables:,} variables", "<=", bound, "1 variable")
        steps = [axis.lines["step"][axis.xs.index(count)] for count in (variables, 1)]
        found.append(goal.verdict(goal.ratio(*steps)))
    return found


def drawing(axes: list[Axis]) -> str:
    """The axes side by side, both scales logarithmic."""
    width, height, left, top, gap = 250, 220, 70, 40, 90
    names = max(len(axis.lines) + len(axis.points) for axis in axes)
    parts = [_drawn(axis, left + number * (width + gap), top, width, height) for number, axis in enumerate(axes)]
    size = f'width="{left + len(axes) * (width + gap)}" height="{top + height + 55 + 15 * names}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _drawn(axis: Axis, x0: int, top: int, width: int, height: int) -> str:
    """One axis, with its scales above its names."""
    parts = [f'<text x="{x0}" y="18" font-weight="bold">{escape(axis.title)}</text>']
    of_points = [seconds for points in axis.points.values() for _, seconds in points]
    values = [*of_points, *(value for line in axis.lines.values() for value in line)]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    first, last = math.log10(axis.xs[0]), math.log10(axis.xs[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (math.log10(x) - first) / (last - first), (math.log10(y) - low) / (high - low)
        return x0 + width * across, top + height * (1 - up)

    for power in range(low, high + 1):
        _, y = place(axis.xs[0], 10.0**power)
        parts.append(f'<path d="M{x0} {y:.1f}h{width}" stroke="#ddd"/>')
        parts.append(f'<text x="{x0 - 5}" y="{y + 4:.1f}" text-anchor="end">{report.shown(10.0**power)}</text>')
    for x in axis.xs:
        at, _ = place(x, 10.0**low)
        parts.append(f'<text x="{at:.1f}" y="{top + height + 15}" text-anchor="middle">{short(x)}</text>')
    parts.append(f'<text x="{x0 + width / 2}" y="{top + height + 30}" text-anchor="middle">{axis.unit}</text>')
    colours = iter(COLOURS)
    y = top + height + 48
    for name, seconds in axis.lines.items():
        colour = next(colours)
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in map(place, axis.xs, seconds))
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<path d="M{x0} {y - 4}h18" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x0 + 24}" y="{y}">{escape(name)}</text>')
        y += 15
    for name, points in axis.points.items():
        colour = next(colours)
        for at, up in (*(place(*point) for point in points), (x0 + 9, y - 4)):
            parts.append(f'<circle cx="{at:.1f}" cy="{up:.1f}" r="4" fill="{colour}" stroke="white"/>')
        parts.append(f'<text x="{x0 + 24}" y="{y}">{escape(name)}</text>')
        y += 15
    return "\n".join(parts)


def short(x: int) -> str:
    """``1k``, ``10M``."""
    for unit, factor in (("M", 1_000_000), ("k", 1_000)):
        if x >= factor:
            return f"{x // factor}{unit}"
    return str(x)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=HERE, help="the directory of scaling.svg")
    options = parser.parse_args()
    cores, processes = len(os.sched_getaffinity(0)), max(REPLICAS) + 2  # the script and the server beside the replicas
    spare = "" if cores > processes else f"; more cores than processes, {processes}: not measured"
    print(f"{cores} cores; with more replicas than cores, replicas take turns on them{spare}\n", flush=True)
    of_replicas = measured(
        f"Replicas, {NBYTES // 1_000_000} MB of variables",
        "replicas",
        REPLICAS,
        lambda stack, n: {
            "step": stepping(stack, n, 1, NBYTES),
            "empty run": empty_runs(stack, n),
            "limit of the step": alone(stack, n, NBYTES),
        },
        options.rounds,
    )
    print(f"{table(of_replicas)}\n{report.goals_table(replica_goals(of_replicas, cores))}\n", flush=True)
    of_variables = measured(
        f"Variables, {NBYTES // 1_000_000} MB in all",
        "variables",
        VARIABLES,
        lambda stack, n: {"step": stepping(stack, 2, n, NBYTES), "limit": alone(stack, 2, NBYTES)},
        options.rounds,
    )
    print(f"{table(of_variables)}\n{report.goals_table(variable_goals(of_variables))}\n", flush=True)
    of_sizes = measured(
        "Bytes, one variable, two replicas",
        "bytes",
        SIZES,
        lambda stack, n: {"step": stepping(stack, 2, 1, n), "limit": alone(stack, 2, n)},
        options.rounds,
    )
    print(table(of_sizes))
    print(of_optimizers(options.rounds))
    (options.results / "scaling.svg").write_text(drawing([of_replicas, of_variables, of_sizes]))
    print(f"drawn: {options.results}/scaling.svg")


if __name__ == "__main__":
    main()
