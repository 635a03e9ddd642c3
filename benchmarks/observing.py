"""What it costs a training that somebody looks at it.

    .venv/bin/python benchmarks/observing.py

One training with two replicas makes steps of about 1 ms and of about 10 ms, under ``cs-launch --metrics-port``. Turns
with an observer and without one alternate. The step time of a turn is its time divided by its steps, so a short delay
counts, too. A turn with an observer is compared with the mean of the turns before and after it. ``nobody`` looks in
the first row: what that row shows is chance. An observer starts before its turn, so its start does not count; but
``cs-ctl status`` starts for each look.

*Processor* compares the processor time of a step: that of all processes of the training, and of the observer. It varies
less than the time that passes. Where the training has all cores, it is what the observer costs; where cores are free,
an observer costs less.

Most of this time is that of the workers, and the same matrices take some percent more or less from turn to turn. No
observer asks a worker for anything. So *added* counts only what the observer takes, and what script, server and
supervisor take more than without it, as a part of the processor time of all. The goals are about it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import report

import central_storage as cs
from central_storage.launch.service_file import ServiceFile

SIZES = (1, 10)  # ms
MOST = 1.01  # of the processor time of a step at which nobody looks
BIN = Path(sys.executable).parent
# Asks again one second after each answer.
STATUS = 'while "$0" status "$1" > /dev/null; do sleep 1; done'
# Scrapes each second, as Prometheus does.
SCRAPES = """
import sys, time, urllib.request
from pathlib import Path
url, token = sys.argv[1:]
asked = urllib.request.Request(url, headers={"Authorization": "Bearer " + Path(token).read_text().strip()})
while True:
    urllib.request.urlopen(asked).read()
    time.sleep(1)
"""
COLUMNS = (
    *("step", "observer", "looks", "off, ms", "on, ms", "on / off", "middle half"),
    *("processor, on / off", "middle half", "added, %", "middle half", "it, %"),
)


def processes(strategy: cs.CentralStorageStrategy) -> list[psutil.Process]:
    """The script, and all processes of its service."""
    file = ServiceFile.read(strategy.address)
    assert file is not None
    supervisor = psutil.Process(file.supervisor)
    here = psutil.Process()
    return [here, *(each for each in [supervisor, *supervisor.children()] if each != here)]


def is_exporter(process: psutil.Process) -> bool:
    """Whether it answers those who scrape metrics."""
    return "central_storage.exporter" in process.cmdline()


def _clock_of(pid: int) -> int:
    """The clock of the processor time of a process, as ``clock_getcpuclockid`` of glibc makes it."""
    return ~pid << 3 | 2


class Training:
    """Steps that multiply matrices in each replica, and apply the last product by SGD."""

    def __init__(self, strategy: cs.CentralStorageStrategy) -> None:
        self.strategy = strategy
        replicas = strategy.statistics().replicas
        self._workers = [each.pid for each in replicas]
        here = [each.pid for each in processes(strategy) if not is_exporter(each)]
        self._others = [pid for pid in here if pid not in self._workers]
        factor = np.full((128, 128), 1e-3, np.float32)
        with strategy.scope():
            weights = cs.Variable(np.zeros((128, 128), np.float32), name="w")
            optimizer = cs.optimizers.SGD(1e-3)

        @cs.function
        def step(products: int) -> None:
            [gradient] = cs.gradient_buffers([weights])
            for _ in range(products):
                np.matmul(factor, factor, out=gradient)
            optimizer.apply_gradients([(gradient, weights)])

        self._step = step

    def turn(self, products: int, steps: int, loop: Callable[[range], Iterable[int]] = iter) -> float:
        """Seconds of a step, the mean over so many steps of so many products each."""
        begun = time.perf_counter()
        for _ in loop(range(steps)):
            self.strategy.run(self._step, args=(products,))
        return (time.perf_counter() - begun) / steps

    def processor(self) -> np.ndarray:
        """Seconds for which the workers have computed, and for which the other processes have; float64 [2]."""
        roles = self._workers, self._others
        return np.array([sum(time.clock_gettime(_clock_of(pid)) for pid in pids) for pids in roles])

    def products(self, seconds: float) -> int:
        """How many products make a step of about so many seconds."""
        few, many = (statistics.median(self.turn(count, 20) for _ in range(5)) for count in (1, 41))
        return max(1, round((seconds - few) / ((many - few) / 40)) + 1)


@dataclass(frozen=True)
class Watch:
    """An observer at work: its process, or None if it works in the script; and what the script's loop goes over."""

    process: psutil.Process | None = None
    loop: Callable[[range], Iterable[int]] = iter

    def processor(self) -> float:
        """Seconds for which it has computed, with all that it has started and waited for."""
        return sum(self.process.cpu_times()[:4]) if self.process is not None else 0.0


@dataclass(frozen=True)
class Observer:
    """Somebody who looks at a training, and how often."""

    looks: str
    watching: Callable[[Training], AbstractContextManager[Watch]]


@contextmanager
def nobody(training: Training) -> Iterator[Watch]:
    yield Watch()


@contextmanager
def status(training: Training) -> Iterator[Watch]:
    with started("sh", "-c", STATUS, BIN / "cs-ctl", training.strategy.address) as process:
        yield Watch(process)


@contextmanager
def top(training: Training, *options: str) -> Iterator[Watch]:
    with terminal() as screen, started(BIN / "cs-top", *options, training.strategy.address, screen=screen) as process:
        yield Watch(process)


@contextmanager
def profile(training: Training) -> Iterator[Watch]:
    more_than_a_turn = ("--steps", str(10**9), "--seconds", "3600")
    with started(BIN / "cs-ctl", "profile", *more_than_a_turn, training.strategy.address) as process:
        yield Watch(process)


@contextmanager
def exporter(training: Training) -> Iterator[Watch]:
    file = ServiceFile.read(training.strategy.address)
    assert file is not None
    [process] = [each for each in processes(training.strategy) if is_exporter(each)]
    with started(sys.executable, "-c", SCRAPES, file.metrics, file.metrics_token_file):
        yield Watch(process)


@contextmanager
def timeline(training: Training) -> Iterator[Watch]:
    with tempfile.TemporaryDirectory() as directory, training.strategy.timeline(Path(directory, "timeline.json")):
        yield Watch()


@contextmanager
def progress(training: Training) -> Iterator[Watch]:
    with terminal() as screen, open(screen, "w", closefd=False) as stream, redirect_stderr(stream):
        yield Watch(loop=cs.progress)


OBSERVERS = {
    "nobody": Observer("never", nobody),
    "cs-ctl status": Observer("1 s after each answer", status),
    "cs-top": Observer("each second", top),
    "cs-top --parts": Observer("each second", lambda training: top(training, "--parts")),
    "cs-ctl profile": Observer("5 times a second", profile),
    "exporter": Observer("each second", exporter),
    "timeline": Observer("5 times a second", timeline),
    "cs.progress": Observer("10 times a second", progress),
}


@contextmanager
def started(*command: str | Path, screen: int | None = None) -> Iterator[psutil.Process]:
    """A process, on a terminal or without output. Raises RuntimeError if it ends before the block does."""
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if screen is None else screen,
            stdout=subprocess.DEVNULL if screen is None else screen,
            stderr=said,
            env={**os.environ, "TERM": "xterm"},
            start_new_session=True,
        )
        try:
            yield psutil.Process(child.pid)
            if child.poll() is not None:
                said.seek(0)
                raise RuntimeError(f"{command[0]} has ended with {child.returncode}: {said.read().decode()}")
        finally:
            if child.poll() is None:
                os.killpg(child.pid, 9)
            child.wait()


@contextmanager
def terminal() -> Iterator[int]:
    """The descriptor of a terminal whose output another process reads."""
    reader, screen = os.openpty()
    termios.tcsetwinsize(screen, (40, 120))
    null = subprocess.DEVNULL
    with subprocess.Popen(["cat"], stdin=reader, stdout=null, stderr=null):  # it ends with the terminal
        os.close(reader)
        try:
            yield screen
        finally:
            os.close(screen)


class Turn(NamedTuple):
    """What a step took on average, in seconds."""

    seconds: float
    #: Processor time of the workers, of the training's other processes, and of the observer; that is 0 if it works in
    #: the script.
    workers: float
    others: float
    observer: float

    @property
    def processor(self) -> float:
        """The processor time of all."""
        return self.workers + self.others + self.observer


@dataclass
class Figures:
    """The turns with an observer, and for each what the turns before and after it had on average."""

    off: list[Turn] = field(default_factory=list)
    on: list[Turn] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """How many times as long a step lasts with the observer, in each turn."""
        return [on.seconds / off.seconds for off, on in zip(self.off, self.on, strict=True)]

    @property
    def costs(self) -> list[float]:
        """How many times as much processor time a step takes with the observer, in each turn."""
        return [on.processor / off.processor for off, on in zip(self.off, self.on, strict=True)]

    @property
    def added(self) -> list[float]:
        """How many times as much processor time a step takes with the observer, in each turn, if the workers take as
        much as without it."""
        return [
            1 + (on.observer + on.others - off.others) / off.processor
            for off, on in zip(self.off, self.on, strict=True)
        ]

    @property
    def share(self) -> float:
        """The share of a core that the observer takes."""
        return statistics.median(turn.observer / turn.seconds for turn in self.on)


def measured(training: Training, observer: Observer, products: int, options: argparse.Namespace) -> Figures:
    """The turns of one observer, at steps of so many products."""
    seconds = training.turn(products, 20)
    first, count = (max(2, round(each / seconds)) for each in (options.start, options.seconds))

    def turn(watch: Watch) -> Turn:
        training.turn(products, first, watch.loop)
        before = training.processor(), watch.processor()
        taken = training.turn(products, count, watch.loop)
        own = (watch.processor() - before[1]) / count
        return Turn(taken, *((training.processor() - before[0]) / count).tolist(), own)

    found, alone = Figures(), [turn(Watch())]
    for _ in range(options.rounds):
        with observer.watching(training) as watch:
            found.on.append(turn(watch))
        alone.append(turn(Watch()))
    found.off = [Turn(*map(statistics.mean, zip(*pair, strict=True))) for pair in pairwise(alone)]
    return found


def line(size: float, name: str, found: Figures) -> str:
    """A line of the table."""
    off, on = (statistics.median(turn.seconds for turn in turns) * 1e3 for turns in (found.off, found.on))
    ratios = []
    for values in (found.ratios, found.costs):
        lower, middle, upper = np.quantile(values, (0.25, 0.5, 0.75))
        ratios.append(f"{middle:.3f} | {lower:.3f} … {upper:.3f}")
    lower, middle, upper = 100 * (np.quantile(found.added, (0.25, 0.5, 0.75)) - 1)
    ratios.append(f"{middle:.2f} | {lower:.2f} … {upper:.2f}")
    share = f"{100 * found.share:.1f}" if found.share else ""
    return f"| {size:g} ms | {name} | {OBSERVERS[name].looks} | {off:.3f} | {on:.3f} | {' | '.join(ratios)} | {share} |"


def verdict(size: float, name: str, found: Figures) -> dict[str, Any]:
    """How many times as much processor time a step may take with an observer, if the workers take as much."""
    goal = report.Goal(f"a step of {size:g} ms, {name}", "<=", MOST, "off", ours="on")
    return goal.verdict(statistics.median(found.added))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3.0, help="a turn")
    parser.add_argument("--start", type=float, default=1.5, help="seconds that an observer has before its turn")
    parser.add_argument("--sizes", nargs="+", type=float, default=SIZES, help="steps of so many milliseconds")
    parser.add_argument("--observers", nargs="+", choices=OBSERVERS, default=list(OBSERVERS))
    parser.add_argument("--quick", action="store_true", help="one short turn of each, which says nothing about speed")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.start = 1, 0.2, 0.2
    return options


def main() -> None:
    """Print the table and the goals."""
    options = parsed()
    if os.environ.get("CS_ROLE") != "script":
        launch = str(BIN / "cs-launch")
        os.execv(launch, [launch, "--metrics-port", "0", "--devices", "cpu:0,cpu:1", __file__, *sys.argv[1:]])
    goals = []
    with cs.CentralStorageStrategy() as strategy:
        training = Training(strategy)
        training.turn(1, 20)
        print(f"| {' | '.join(COLUMNS)} |\n{'| --- ' * len(COLUMNS)}|", flush=True)
        for size in options.sizes:
            products = training.products(size / 1e3)
            for name in options.observers:
                found = measured(training, OBSERVERS[name], products, options)
                print(line(size, name, found), flush=True)
                goals += [verdict(size, name, found)] if name != "nobody" else []
    print(report.goals_table(goals))


if __name__ == "__main__":
    main()
