"""What it costs a training that a process of the same user sends to its server without end.

    .venv/bin/python benchmarks/floods.py

One training with two replicas makes short steps. Turns with a flood and without one alternate, and each flood is
followed by its *control*: a process that computes as much of the time as the flooder did, and sends nothing. What the
control costs is the price of any process on this machine, not of what the flooder sends.

Strangers are unknown to the supervisor. The other floods come from an introduced observer: ``questions`` reads all
answers, ``unread`` reads none, ``malformed`` sends what is no record, and ``reads`` is no flood: it asks for a variable
again as soon as it has the last answer.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import report
import zmq
from observing import Training

import central_storage as cs
from cs_proto.codec import decode, encode
from cs_proto.messages import PROTOCOL, Get, Hello, Statistics, Welcome
from cs_runtime.transport import supervisor_link
from cs_runtime.transport.supervisor_link import SupervisorLink

STEP = 1.5e-3  # seconds, about
MOST = 2.0  # times the 99th percentile of a quiet step
FLOODS = ("strangers", "questions", "malformed", "unread", "reads")
# The control computes for its share of each period, in seconds.
PERIOD = 2e-3
# So many links flood at once.
LINKS = 4
HEAD = """\
| beside | median, ms | p99, ms | longest, ms | p99 / quiet p99 | middle half | median / quiet | flooder | server | its I/O |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


# --- the processes that disturb -------------------------------------------------------------------------------------


def flood(kind: str, address: str) -> None:
    """Send messages of this kind to the server, without end."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        links = [_link(stack, context, kind, number, address) for number in range(LINKS)]
        print("begins", flush=True)
        for number in itertools.count(1):
            for link in links:
                link.send_multipart(_message(kind, number))
                while kind in ("questions", "malformed") and link.poll(0):
                    link.recv_multipart()


def _message(kind: str, number: int) -> Sequence[Any]:
    if kind == "malformed":
        return [b"\xc1", b"nonsense"]
    return encode(Get(number, (), ("w",), True) if number % 2 else Statistics(number))


def _link(stack: ExitStack, context: zmq.Context[Any], kind: str, number: int, address: str) -> zmq.Socket[bytes]:
    """A connection to the server, of a stranger or of an observer that has said Hello."""
    made = stack.enter_context(context.socket(zmq.DEALER))
    made.setsockopt(zmq.LINGER, 0)
    if kind == "unread":
        made.setsockopt(zmq.RCVHWM, 1)
    if kind == "strangers":
        made.setsockopt(zmq.IDENTITY, b"stranger %d" % number)
        made.connect(f"ipc://{address}/server")
        return made
    observer = SupervisorLink(supervisor_link.connect(address), "observer")
    stack.callback(observer.close)
    made.setsockopt(zmq.IDENTITY, observer.await_name())
    made.connect(f"ipc://{address}/server")
    made.send_multipart(encode(Hello(PROTOCOL, "observer", observer.client, os.getpid())))
    assert isinstance(decode(made.recv_multipart()), Welcome)
    return made


def reads(address: str) -> None:
    """Ask for a variable, one question at a time."""
    with cs.connect(address) as observer:
        print("begins", flush=True)
        while True:
            observer.get("w")


def compute(share: float) -> None:
    """Compute for ``share`` of each period."""
    print("begins", flush=True)
    while True:
        begun = time.perf_counter()
        while time.perf_counter() - begun < share * PERIOD:
            pass
        if share < 1.0:
            time.sleep(max(0.0, begun + PERIOD - time.perf_counter()))


# --- the measurement ------------------------------------------------------------------------------------------------


@dataclass
class Turns:
    """The seconds of each step, by turn, and the shares of a core that were computed meanwhile."""

    turns: list[list[float]] = field(default_factory=list)
    shares: list[tuple[float, ...]] = field(default_factory=list)

    def p99s(self) -> list[float]:
        """The 99th percentile of each turn."""
        return [float(np.quantile(turn, 0.99)) for turn in self.turns]


def seconds_of(task: Path) -> float:
    """For how long a thread, or a process with its only thread, has computed."""
    return int((task / "schedstat").read_text().split()[0]) / 1e9


def computed(pids: Sequence[int]) -> tuple[float, ...]:
    """Seconds that the flooder, the first of ``pids``, the server's thread and the I/O threads have computed."""
    flooder, server = (Path(f"/proc/{pid}/task") for pid in pids)
    threads = {task: (task / "comm").read_text() for task in server.iterdir()}
    busy = [seconds_of(task) for task, name in threads.items() if name.startswith("ZMQbg/IO")]
    return sum(map(seconds_of, flooder.iterdir())), seconds_of(server / str(pids[1])), sum(busy)


@contextmanager
def disturbed(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process of this program that has begun to disturb. Raises RuntimeError if it ends before the block does."""
    with subprocess.Popen([sys.executable, __file__, *command], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            child.stdout.readline()
            yield child
            if child.poll() is not None:
                raise RuntimeError(f"{' '.join(command)} has ended with {child.returncode}")
        finally:
            child.kill()


class Steps:
    """A training whose steps are timed."""

    def __init__(self, strategy: cs.CentralStorageStrategy, options: argparse.Namespace) -> None:
        self.training = Training(strategy)
        self.training.turn(1, 20)
        self.server = strategy.statistics().pid
        self._products = self.training.products(STEP)
        self._options = options

    def turn(self, seconds: float) -> list[float]:
        """Seconds of each step, for so long."""
        found, until = [], time.perf_counter() + seconds
        while time.perf_counter() < until:
            found.append(self.training.turn(self._products, 1))
        return found

    def quiet(self, into: Turns) -> None:
        into.turns.append(self.turn(self._options.seconds))

    def beside(self, into: Turns, *command: str) -> None:
        """Steps beside another process of this program."""
        with disturbed(*command) as process:
            self.turn(self._options.start)
            pids, begun = (process.pid, self.server), time.perf_counter()
            before = computed(pids)
            into.turns.append(self.turn(self._options.seconds))
            elapsed = time.perf_counter() - begun
            into.shares.append(tuple((b - a) / elapsed for a, b in zip(before, computed(pids), strict=True)))


def measured(steps: Steps, kind: str, address: str, rounds: int) -> dict[str, Turns]:
    """Turns beside a flood of this kind, beside its control, and the quiet ones between them."""
    found = {"nobody": Turns(), kind: Turns(), f"{kind}: control": Turns()}
    quiet, flooded, control = found.values()
    for _ in range(rounds):
        steps.quiet(quiet)
        steps.beside(flooded, "--flood", kind, "--address", address)
        steps.quiet(quiet)
        steps.beside(control, "--compute", str(flooded.shares[-1][0]))
    return found


def lines(found: dict[str, Turns]) -> Iterator[str]:
    """The lines of the table for one kind of flood."""
    quiet = found["nobody"]
    for name, turns in found.items():
        steps = [each for turn in turns.turns for each in turn]
        alone = [each for turn in quiet.turns for each in turn]
        figures = [1e3 * each for each in (statistics.median(steps), np.quantile(steps, 0.99), max(steps))]
        ratio = np.quantile(steps, 0.99) / np.quantile(alone, 0.99)
        usual = statistics.median(quiet.p99s())
        lower, upper = np.quantile([each / usual for each in turns.p99s()], (0.25, 0.75))
        shares = [f"{100 * statistics.mean(each):.0f} %" for each in zip(*turns.shares, strict=True)] or [""] * 3
        cells = [f"{each:.2f}" for each in figures]
        cells += [f"{ratio:.2f}", f"{lower:.2f} … {upper:.2f}", f"{statistics.median(steps) / statistics.median(alone):.2f}"]
        yield f"| {name} | {' | '.join([*cells, *shares])} |"


def verdict(kind: str, found: dict[str, Turns]) -> dict[str, Any]:
    """How many times as long the slowest of a hundred steps may last beside a flood."""
    quiet, flooded = ([each for turn in found[name].turns for each in turn] for name in ("nobody", kind))
    ratio = float(np.quantile(flooded, 0.99) / np.quantile(quiet, 0.99))
    return report.Goal(f"p99 of a step, {kind}", "<=", MOST, "quiet", ours="beside").verdict(ratio)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="a turn")
    parser.add_argument("--start", type=float, default=0.3, help="seconds that a flooder has before its turn")
    parser.add_argument("--floods", nargs="+", choices=FLOODS, default=FLOODS)
    parser.add_argument("--flood", choices=FLOODS, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--compute", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[tuple[Steps, str]]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield Steps(strategy, options), strategy.address


def main() -> None:
    """Print the table and the goals; or, as a child process, disturb."""
    options = parsed()
    if options.compute is not None:
        compute(options.compute)
    elif options.flood == "reads":
        reads(options.address)
    elif options.flood:
        flood(options.flood, options.address)
    else:
        goals = []
        with opened(options) as (steps, address):
            print(HEAD, flush=True)
            for kind in options.floods:
                found = measured(steps, kind, address, options.rounds)
                print("\n".join(lines(found)), flush=True)
                goals += [verdict(kind, found)]
        print(report.goals_table(goals))


if __name__ == "__main__":
    main()
