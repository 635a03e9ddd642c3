"""What the service costs on this machine, beside plain NumPy in one process that does the same work.

    make bench        (or: python benchmarks/bench.py --rounds 9)

Both sides take turns, round by round, so that whatever else the machine does hits both. The table shows medians with
the smallest and largest round, and ratios of the medians; benchmarks/results.json holds every round. Carry ratios to
other machines, never milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numba
import numpy as np
import psutil
import zmq

import central_storage as cs
from cs_server.updates import RULES, reference

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

import digits  # noqa: E402  (an example, not a package)

DEVICES = ["cpu:0", "cpu:1"]
ADAM = {"learning_rate": 0.002, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": False}
BATCH, HIDDEN = 128, 256
REPEATS = 200
MEGABYTES = (1, 16, 100)

COLD = """
import numpy as np
import central_storage as cs
strategy = cs.CentralStorageStrategy(["cpu:0", "cpu:1"])
with strategy.scope():
    v = cs.Variable(np.zeros(1000, np.float32))
    optimizer = cs.optimizers.Adam()
strategy.run(lambda: optimizer.apply_gradients([(np.ones(1000, np.float32), v)]))
print("stepped", flush=True)
strategy.shutdown()
"""
COLD_NUMPY = "import numpy as np\nprint('stepped', flush=True)\n"


@dataclass
class Side:
    """One way of doing the work: called once a round, it returns its figure."""

    name: str
    measure: Callable[[], float]
    rounds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    def __str__(self) -> str:
        return f"{_short(self.median)} [{_short(min(self.rounds))} … {_short(max(self.rounds))}]"


@dataclass
class Case:
    """A comparison. The second side is what the first is held against, where there is one."""

    title: str
    unit: str
    sides: list[Side]


def measure(cases: list[Case], rounds: int) -> None:
    """All sides of all cases in turn, ``rounds`` times, after one round that is not counted."""
    for number in range(rounds + 1):
        if sys.stderr.isatty():
            end = "\n" if number == rounds else ""
            print(f"\rround {number}/{rounds}", end=end, file=sys.stderr, flush=True)
        for case in cases:
            for side in case.sides:
                figure = side.measure()
                if number:
                    side.rounds.append(figure)


def seconds_each(times: int, action: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        action()
    return (time.perf_counter() - begun) / times


# --- the cases --------------------------------------------------------------------------------------------------------


def digits_step(strategy: cs.CentralStorageStrategy) -> Case:
    """The step of examples/digits.py, batch after batch."""
    x, y, _, _ = digits.split_digits()
    x, y = x[:BATCH], y[:BATCH]
    random = np.random.default_rng(1)
    shapes = ((64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,))
    initial = [random.normal(0, 0.1, shape).astype(np.float32) for shape in shapes]
    with strategy.scope():
        variables = [cs.Variable(value) for value in initial]
        optimizer = cs.optimizers.Adam(**ADAM)

    @cs.function
    def step(batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> np.float32:
        gradients = cs.gradient_buffers(variables)
        loss = digits.loss_and_gradients(*batch, [np.asarray(v) for v in variables], gradients)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    whole = digits.with_weights(x, y)
    [batch] = strategy.experimental_distribute_dataset([whole])
    parameters = [value.copy() for value in initial]
    gradients = [np.empty_like(value) for value in initial]
    apply = _plain_adam(parameters)

    def plain() -> None:
        digits.loss_and_gradients(*whole, parameters, gradients)
        apply(gradients)

    return Case(
        "digits, 64-256-10, batch 128, Adam",
        "steps/s",
        [
            Side("service", lambda: 1 / seconds_each(REPEATS, lambda: strategy.run(step, args=(batch,)))),
            Side("NumPy, one process", lambda: 1 / seconds_each(REPEATS, plain)),
        ],
    )


def empty_run(strategy: cs.CentralStorageStrategy) -> Case:
    """What a run costs that does nothing."""
    nothing = cs.function(lambda: None)
    return Case(
        "empty run", "ms", [Side("service", lambda: 1e3 * seconds_each(REPEATS, lambda: strategy.run(nothing)))]
    )


def adam_step(strategy: cs.CentralStorageStrategy, megabytes: int) -> Case:
    """Gradients of that size lie in place in both workers; they are summed and applied. NumPy applies one gradient."""
    size = megabytes * 1_000_000 // 4
    with strategy.scope():
        variable = cs.Variable(np.zeros(size, np.float32))
        optimizer = cs.optimizers.Adam(**ADAM)

    @cs.function
    def step(fill: bool) -> None:
        [gradient] = cs.gradient_buffers([variable])
        if fill:
            gradient[...] = 1e-3
        optimizer.apply_gradients([(gradient, variable)])

    for _ in range(4):  # both sets of buffers have pages and values from here on
        strategy.run(step, args=(True,))
    apply = _plain_adam([np.zeros(size, np.float32)])
    gradient = np.full(size, 1e-3, np.float32)
    times = max(2, 100 // megabytes)
    return Case(
        f"Adam on {megabytes} MB, gradient in place",
        "ms",
        [
            Side("service, 2 gradients", lambda: 1e3 * seconds_each(times, lambda: strategy.run(step, args=(False,)))),
            Side("NumPy, 1 gradient", lambda: 1e3 * seconds_each(times, lambda: apply([gradient]))),
        ],
    )


def cold_start() -> Case:
    """From starting ``python`` until the first step is done."""
    return Case(
        "first step from a cold python",
        "s",
        [Side("service", lambda: _until_stepped(COLD)), Side("import numpy", lambda: _until_stepped(COLD_NUMPY))],
    )


def memory(strategy: cs.CentralStorageStrategy) -> list[dict[str, Any]]:
    """What each process holds, in bytes: ``uss`` is its own alone, ``pss`` shares what is mapped by several."""
    counters = strategy.statistics()
    supervisor = psutil.Process(counters.pid).ppid()
    pids = {"this script, with NumPy": os.getpid(), "supervisor": supervisor, "server": counters.pid}
    pids |= {f"worker w{replica.replica}": replica.pid for replica in counters.replicas}
    found = []
    for name, pid in pids.items():
        info = psutil.Process(pid).memory_full_info()
        found.append({"process": name, "pid": pid, "uss": info.uss, "pss": info.pss})
    return found


def _plain_adam(parameters: list[np.ndarray]) -> Callable[[list[np.ndarray]], None]:
    rule = RULES["adam"]
    slots = [tuple(np.full_like(p, value) for value in rule.initial(ADAM)) for p in parameters]
    count = 0

    def apply(gradients: list[np.ndarray]) -> None:
        nonlocal count
        count += 1
        for parameter, gradient, state in zip(parameters, gradients, slots, strict=True):
            reference(rule, parameter, [gradient], state, ADAM, count)

    return apply


def _until_stepped(program: str) -> float:
    begun = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - begun
        process.wait()
    if line != "stepped\n" or process.returncode:
        raise RuntimeError(f"a cold start failed with exit code {process.returncode}: {line!r}")
    return seconds


# --- the report -------------------------------------------------------------------------------------------------------


def show(cases: list[Case], processes: list[dict[str, Any]], rounds: int) -> None:
    print(f"\nmedian [smallest … largest] of {rounds} rounds\n")
    for case in cases:
        first, *others = case.sides
        print(f"{case.title} ({case.unit})")
        print(f"    {first.name:<24}{first}")
        for other in others:
            print(f"    {other.name:<24}{other}    service / this: {first.median / other.median:.2f}")
    print("\nmemory after all this (MB)           own    share")
    for entry in processes:
        print(f"    {entry['process']:<24}{entry['uss'] / 1e6:>9.1f}{entry['pss'] / 1e6:>9.1f}")


def save(cases: list[Case], processes: list[dict[str, Any]], path: Path) -> None:
    machine = {
        "cpus": os.cpu_count(),
        "memory_nbytes": psutil.virtual_memory().total,
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "libzmq": zmq.zmq_version(),
        "load_average": os.getloadavg(),
    }
    results = [
        {
            "title": case.title,
            "unit": case.unit,
            "sides": [{"name": side.name, "median": side.median, "rounds": side.rounds} for side in case.sides],
        }
        for case in cases
    ]
    path.write_text(json.dumps({"machine": machine, "cases": results, "memory": processes}, indent=1) + "\n")
    print(f"\nwritten to {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count, at least 5 (default: 7)")
    parser.add_argument("--results", type=Path, default=HERE / "results.json", help="where every round is written")
    options = parser.parse_args()
    if options.rounds < 5:
        parser.error("a median of fewer than 5 rounds says little")
    with cs.CentralStorageStrategy(DEVICES) as strategy:
        cases = [digits_step(strategy), empty_run(strategy), *(adam_step(strategy, size) for size in MEGABYTES)]
        cases.append(cold_start())
        measure(cases, options.rounds)
        processes = memory(strategy)
    show(cases, processes, options.rounds)
    save(cases, processes, options.results)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
