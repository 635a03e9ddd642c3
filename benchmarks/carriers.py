"""Small steps by mailbox and over ZeroMQ alone, side by side: alone on the machine, and with foreign processes that
keep every core busy. A table of medians in µs, with the wake-ups (threads that went to sleep and were woken) and the
doorbells of each step. Two services live at a time and take turns, so that both see the same machine.

    .venv/bin/python benchmarks/carriers.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

import central_storage as cs

CARRIERS = {"mailboxes": "on", "zmq": "off"}
MB = 1 << 20


class Service:
    """A strategy of two replicas with what its steps need."""

    def __init__(self, strategy: cs.CentralStorageStrategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.weights = cs.Variable(np.zeros(MB // 4, np.float32))
            self.optimizer = cs.optimizers.SGD(0.01)

    @property
    def works(self) -> dict[str, Callable[[int], None]]:
        return {"empty run": self.empty, "sgd-1MB, run": self.runs, "sgd-1MB, run_steps": self.series}

    def step(self, element: object = None) -> None:
        (gradient,) = cs.gradient_buffers([self.weights])
        self.optimizer.apply_gradients([(gradient, self.weights)])

    def empty(self, count: int) -> None:
        for _ in range(count):
            self.strategy.run(_nothing)

    def runs(self, count: int) -> None:
        for _ in range(count):
            self.strategy.run(self.step)

    def series(self, count: int) -> None:
        elements = self.strategy.experimental_distribute_dataset([np.zeros(2)] * count)
        for _ in self.strategy.run_steps(self.step, elements):
            pass

    def pids(self) -> list[int]:
        """The script, the server and the workers."""
        counters = self.strategy.statistics()
        return [os.getpid(), counters.pid, *(replica.pid for replica in counters.replicas)]


def _nothing() -> None:
    pass


@contextmanager
def side_by_side() -> Iterator[dict[str, Service]]:
    """A service for each carrier."""
    with ExitStack() as stack:
        services = {}
        for carrier, mailboxes in CARRIERS.items():
            os.environ["CS_MAILBOXES"] = mailboxes
            services[carrier] = Service(stack.enter_context(cs.CentralStorageStrategy(["cpu:0", "cpu:1"])))
        yield services


def sleeps(pids: list[int]) -> int:
    """How often any thread of these processes went to sleep."""
    return sum(
        int(line.split()[1])
        for pid in pids
        for task in Path(f"/proc/{pid}/task").iterdir()
        for line in (task / "status").read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches")
    )


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that compute and want nothing else."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200, help="a round")
    options = parser.parse_args()
    with side_by_side() as services:
        print("| work | others | carrier | µs a step | best..worst round | wake-ups a step | doorbells a step |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for others in (0, os.cpu_count() or 1):
            with busy(others):
                for work in services["zmq"].works:
                    measure(work, others, services, options.rounds, options.steps)


def measure(work: str, others: int, services: dict[str, Service], rounds: int, steps: int) -> None:
    """Print a line for each carrier."""
    for service in services.values():
        service.works[work](steps // 4)
    seconds: dict[str, list[float]] = {carrier: [] for carrier in services}
    woken, rung = dict.fromkeys(services, 0), dict.fromkeys(services, 0)
    for _ in range(rounds):
        for carrier, service in services.items():
            pids, before = service.pids(), service.strategy.statistics().doorbells
            slept, begun = sleeps(pids), time.perf_counter()
            service.works[work](steps)
            seconds[carrier].append((time.perf_counter() - begun) / steps)
            woken[carrier] += sleeps(pids) - slept
            rung[carrier] += service.strategy.statistics().doorbells - before
    for carrier, taken in seconds.items():
        us = [round(each * 1e6) for each in taken]
        count = rounds * steps
        print(
            f"| {work} | {others or 'none'} | {carrier} | {statistics.median(us):.0f} | {min(us)}..{max(us)} "
            f"| {woken[carrier] / count:.1f} | {rung[carrier] / count:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
