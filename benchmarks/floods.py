"""What it costs a training that a process of the same user sends to its server without end.

    .venv/bin/python benchmarks/floods.py

One training with two replicas makes short steps. Turns with a flood and without one alternate, and each flood is
followed by its *control*: a process that computes as much of the time as the flooder did, and sends nothing. What the
control costs is the price of any process on this machine, not of what the flooder sends.

Strangers are unknown to the supervisor. The other floods come from observers that it has introduced: ``questions``
reads all answers, ``unread`` reads none, and ``malformed`` sends what is no record. ``large`` is one observer that
asks for a variable of 100 MB, again after each answer. ``connections`` connects to server, worker and supervisor again
and again, and sends each of them some bytes or nothing. ``computes`` is no flood: it sends nothing, and never rests. A
disturber is stopped (SIGSTOP) between its turns.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
FLOODS = ("strangers", "questions", "malformed", "unread", "large", "connections", "computes")
# The values of the variable that ``large`` asks for.
LARGE = 25_000_000
# The control computes for its share of each period, in seconds.
PERIOD = 2e-3
# So many links flood at once.
LINKS = 4
# So many junk connections are open at once.
OPEN = 1000
HEAD = """\
| beside | median, ms | p99, ms | longest, ms | median / quiet | p99 / quiet | middle half | it, % | server | I/O |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


# --- the processes that disturb -------------------------------------------------------------------------------------


def flood(kind: str, address: str) -> None:
    """Send messages of this kind to the server, without end."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        count = 1 if kind == "large" else LINKS
        links = [_link(stack, context, kind, number, address) for number in range(count)]
        print("begins", flush=True)
        for number in itertools.count(1):
            for link in links:
                link.send_multipart(_message(kind, number))
                if kind == "large":
                    link.recv_multipart(copy=False)
                while kind in ("questions", "malformed") and link.poll(0):
                    link.recv_multipart()


def connect(address: str) -> None:
    """Connect to sockets of the service, without end. The oldest connections are closed."""
    kinds = {"server": socket.SOCK_STREAM, "w0.1": socket.SOCK_STREAM, "supervisor": socket.SOCK_SEQPACKET}
    links: deque[socket.socket] = deque()
    print("begins", flush=True)
    for number, (name, kind) in enumerate(itertools.cycle(kinds.items())):
        links.append(socket.socket(socket.AF_UNIX, kind))
        links[-1].connect(f"{address}/{name}")
        if number % 2:
            with suppress(BrokenPipeError):  # it is closed already
                links[-1].send(os.urandom(30))
        if len(links) > OPEN:
            links.popleft().close()


def _message(kind: str, number: int) -> Sequence[Any]:
    if kind == "malformed":
        return [b"\xc1", b"nonsense"]
    if kind == "large":
        return encode(Get(number, (), ("large",), True))
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


class Disturber:
    """A process of this program that disturbs only while it may."""

    def __init__(self, *command: str) -> None:
        self._child = subprocess.Popen([sys.executable, __file__, *command], stdout=subprocess.PIPE, text=True)
        self.pid = self._child.pid
        assert self._child.stdout is not None
        if not self._child.stdout.readline():
            raise RuntimeError(f"{' '.join(command)} has ended with {self._child.wait()}")
        self._child.send_signal(signal.SIGSTOP)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """It disturbs while the block is carried out. Raises RuntimeError if it has ended then."""
        self._child.send_signal(signal.SIGCONT)
        yield
        if self._child.poll() is not None:
            raise RuntimeError(f"{self._child.args} has ended with {self._child.returncode}")
        self._child.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        """End it."""
        self._child.kill()
        with self._child:
            pass


class Steps:
    """A training whose steps are timed."""

    def __init__(self, strategy: cs.CentralStorageStrategy, options: argparse.Namespace) -> None:
        self.training = Training(strategy)
        with strategy.scope():
            self._large = cs.Variable(np.ones(LARGE, np.float32), name="large")
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
        """Steps beside nobody."""
        self.turn(self._options.start)
        into.turns.append(self.turn(self._options.seconds))

    def beside(self, disturber: Disturber, into: Turns) -> None:
        """Steps beside a disturber."""
        with disturber.at_work():
            self.turn(self._options.start)
            pids, begun = (disturber.pid, self.server), time.perf_counter()
            before = computed(pids)
            into.turns.append(self.turn(self._options.seconds))
            elapsed = time.perf_counter() - begun
            into.shares.append(tuple((b - a) / elapsed for a, b in zip(before, computed(pids), strict=True)))


def measured(steps: Steps, kind: str, address: str, rounds: int) -> dict[str, Turns]:
    """Turns beside a flood of this kind, beside its control, and the quiet ones between them."""
    with ExitStack() as stack:

        def disturber(*command: str) -> Disturber:
            made = Disturber(*command)
            stack.callback(made.close)
            return made

        command = ("--compute", "1") if kind == "computes" else ("--flood", kind, "--address", address)
        beside = {kind: disturber(*command)}
        first = Turns()
        steps.beside(beside[kind], first)
        if kind != "computes":
            beside[f"{kind}: control"] = disturber("--compute", str(min(1.0, first.shares[0][0])))
        found = {name: Turns() for name in ("nobody", *beside)}
        for _ in range(rounds):
            for name, made in beside.items():
                steps.quiet(found["nobody"])
                steps.beside(made, found[name])
    return found


def ratio(found: dict[str, Turns], name: str) -> float:
    """How many times as long the slowest of a hundred steps lasts beside somebody: the median over the turns."""
    return statistics.median(found[name].p99s()) / statistics.median(found["nobody"].p99s())


def lines(found: dict[str, Turns]) -> Iterator[str]:
    """The lines of the table for one kind of flood."""
    usual = statistics.median(found["nobody"].p99s())
    alone = statistics.median(itertools.chain(*found["nobody"].turns))
    for name, turns in found.items():
        steps = list(itertools.chain(*turns.turns))
        p99s = turns.p99s()
        cells = [f"{1e3 * each:.2f}" for each in (statistics.median(steps), statistics.median(p99s), max(steps))]
        lower, upper = np.quantile(p99s, (0.25, 0.75)) / usual
        cells += [f"{statistics.median(steps) / alone:.2f}", f"{ratio(found, name):.2f}", f"{lower:.2f} … {upper:.2f}"]
        shares = [f"{100 * statistics.mean(each):.0f}" for each in zip(*turns.shares, strict=True)]
        yield f"| {name} | {' | '.join(cells + (shares or [''] * 3))} |"


def verdict(kind: str, found: dict[str, Turns]) -> dict[str, Any]:
    """How many times as long the slowest of a hundred steps may last beside a flood."""
    return report.Goal(f"p99 of a step, {kind}", "<=", MOST, "quiet", ours="beside").verdict(ratio(found, kind))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.5, help="a turn")
    parser.add_argument("--start", type=float, default=0.1, help="seconds before a turn that do not count")
    parser.add_argument("--floods", nargs="+", choices=FLOODS, default=FLOODS)
    parser.add_argument("--quick", action="store_true", help="one short turn of each, which says nothing about speed")
    parser.add_argument("--flood", choices=FLOODS, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--compute", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.start = 1, 0.1, 0.05
    return options


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[tuple[Steps, str]]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield Steps(strategy, options), strategy.address


def main() -> None:
    """Print the table and the goals; or, as a child process, disturb."""
    options = parsed()
    if options.compute is not None:
        compute(options.compute)
    elif options.flood == "connections":
        connect(options.address)
    elif options.flood:
        flood(options.flood, options.address)
    else:
        goals = []
        with opened(options) as (steps, address):
            print(HEAD, flush=True)
            for kind in options.floods:
                found = measured(steps, kind, address, options.rounds)
                print("\n".join(lines(found)), flush=True)
                goals += [verdict(kind, found)] if kind != "computes" else []
        print(report.goals_table(goals))


if __name__ == "__main__":
    main()
