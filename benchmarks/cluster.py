"""What workers on other machines cost: one step on one machine, over the relay, in DDP, and in Ray.

    .venv/bin/python benchmarks/cluster.py        # as root, with iproute2: it makes two network namespaces

The namespaces stand for two machines: ``head`` has the script and the server, ``node`` the two workers. All programs
run on the processors of this one machine, so the ratios matter and not the milliseconds. A link of 1 Gbit/s is a veth
pair with a token bucket at both ends; the other link has no limit. Ray's parameter server runs on this machine alone,
without encryption, so it pays for no network.

The model of a step whose bytes decide: two gradients go up and two copies of the parameters come down, through the one
network card of the node, so a step of V bytes takes 4 V / B at B bytes a second.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import environments
import report
from works import REPLICAS

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
HEAD_ADDRESS, NODE_ADDRESS, PORT = "10.201.0.1", "10.201.0.2", 5600
GBIT = 1e9 / 8  # bytes a second
DENSE = {"adam-1MB": 1_000_000, "adam-16MB": 16_000_000, "adam-100MB": 100_000_000}
ROWS = ("embedding-1e5", "embedding", "embedding-1e7")
#: The steps of each work, by whether the link is limited.
STEPS = {"empty-run": 200, "adam-1MB": 60, "adam-16MB": 16, "adam-100MB": 5, **dict.fromkeys(ROWS, 30)}
_START = 60.0  # seconds


@dataclass(frozen=True)
class Way:
    """Somebody who does the works: ``rate`` of the link in bytes a second, 0 for no limit."""

    name: str
    works: tuple[str, ...]
    rate: float = 0.0


ONE_MACHINE = Way("one machine", tuple(STEPS))
RELAY, SLOW_RELAY = Way("relay", tuple(STEPS)), Way("relay, 1 Gbit/s", tuple(STEPS), GBIT)
DDP, SLOW_DDP = Way("ddp-gloo", tuple(DENSE)), Way("ddp-gloo, 1 Gbit/s", tuple(DENSE), GBIT)
RAY = Way("ray-ps", ("adam-1MB", "adam-16MB", "adam-100MB", *ROWS[:2]))
WAYS = (ONE_MACHINE, RELAY, SLOW_RELAY, DDP, SLOW_DDP, RAY)
MODEL, MORE = "4 V / B", "one machine + 1 ms"
GOALS = [
    report.Goal("adam-1MB", ">=", 2.0, RAY.name, ours=RELAY.name),
    report.Goal("adam-100MB", ">=", 1.0, RAY.name, ours=RELAY.name),
    report.Goal("adam-16MB", "<=", 1.15, MODEL, ours=SLOW_RELAY.name),
    report.Goal("adam-100MB", "<=", 1.15, MODEL, ours=SLOW_RELAY.name),
    report.Goal("empty-run", "<=", 1.0, MORE, ours=RELAY.name),
]
FLAT = report.Goal("rows", "<=", 1.2, "embedding-1e5", ours="embedding-1e7")


@contextmanager
def namespaces(rate: float) -> Iterator[tuple[list[str], list[str]]]:
    """Two machines that are joined by a link; the beginnings of commands that run on the head and on the node."""
    mark = secrets.token_hex(3)
    head, node = f"cs-{mark}-head", f"cs-{mark}-node"
    with ExitStack() as ends:
        for name in (head, node):
            _ip("netns", "add", name)
            ends.callback(_ip, "netns", "del", name)
        links = (("vh" + mark, head, HEAD_ADDRESS), ("vn" + mark, node, NODE_ADDRESS))
        _ip("link", "add", links[0][0], "netns", head, "type", "veth", "peer", "name", links[1][0], "netns", node)
        for link, name, address in links:
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            for each in ("lo", link):
                _ip("-n", name, "link", "set", each, "up")
            if rate:
                bucket = ["rate", f"{rate * 8:.0f}bit", "burst", "256kb", "latency", "100ms"]
                _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", link, "root", "tbf", *bucket)
        yield ["ip", "netns", "exec", head], ["ip", "netns", "exec", node]


@contextmanager
def started(*command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is told to end afterwards."""
    process = subprocess.Popen(command, env=os.environ | environment, cwd=HERE)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@contextmanager
def service(head: list[str], node: list[str]) -> Iterator[str]:
    """A service whose workers run on the node; its address."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as ends:
        keys, run = Path(place, "keys"), Path(place, "run")
        for replica in range(REPLICAS):
            _run(str(BIN / "cs-launch"), "keys", str(keys), "--worker", str(replica))
        endpoint = f"tcp://{HEAD_ADDRESS}:{PORT}"
        serve = ["--serve", str(REPLICAS), "--listen", endpoint, "--keys", str(keys), "--run-dir", str(run)]
        ends.enter_context(started(*head, str(BIN / "cs-launch"), *serve))
        deadline = time.monotonic() + _START
        while not (run / "supervisor").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the service was not up within {_START:.0f} s")
            time.sleep(0.05)
        for replica in range(REPLICAS):
            own = Path(place, f"node{replica}")
            own.mkdir(mode=0o700)
            for file in ("service.key", f"worker-{replica}.key", f"worker-{replica}.key_secret"):
                (own / file).write_bytes((keys / file).read_bytes())
                (own / file).chmod(0o600)
            ends.enter_context(started(*node, str(BIN / "cs-launch"), "--join", endpoint, "--keys", str(own)))
        yield str(run)


def measured(way: Way) -> dict[str, float]:
    """Seconds of a step of each work."""
    asked = [f"{work}={STEPS[work]}" for work in way.works]
    if way is RAY:
        return _results(
            environments.python_of("torch"), "-m", "peers.ray_ps", *(a.replace("=", "/numpy=") for a in asked)
        )
    if way is ONE_MACHINE:
        return _results(sys.executable, "-m", "peers.central_storage_itself", *asked)
    with namespaces(way.rate) as (head, node):
        if way in (RELAY, SLOW_RELAY):
            command = [*head, sys.executable, "-m", "peers.central_storage_itself"]
            found = {}
            with service(head, node) as address:
                for each in asked:  # only the first strategy of a script uses the service
                    found |= _results(*command, each, CS_ADDRESS=address)
            return found
        shared = {"MASTER_ADDR": HEAD_ADDRESS, "MASTER_PORT": str(PORT), "WORLD_SIZE": str(REPLICAS)}
        command = [environments.python_of("torch"), "-m", "peers.ddp_gloo", *asked]
        with started(*node, *command, **shared, RANK="1") as other:
            found = _results(*head, *command, **shared, RANK="0")
            other.wait(_START)
        return found


def verdicts(rows: list[report.Row]) -> list[dict[str, object]]:
    """The goals beside what was reached."""
    seconds = {(row.work, row.peer): row.seconds for row in rows}
    for work, nbytes in DENSE.items():
        seconds[work, MODEL] = 4 * nbytes / GBIT
    if ("empty-run", ONE_MACHINE.name) in seconds:
        seconds["empty-run", MORE] = seconds["empty-run", ONE_MACHINE.name] + 1e-3
    found = []
    for goal in GOALS:
        ours, others = seconds.get((goal.work, goal.ours)), seconds.get((goal.work, goal.other))
        found.append(goal.verdict(goal.ratio(ours, others) if ours and others else None))
    tall, low = seconds.get((FLAT.ours, RELAY.name)), seconds.get((FLAT.other, RELAY.name))
    return [*found, FLAT.verdict(FLAT.ratio(tall, low) if tall and low else None)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=[way.name for way in WAYS], default=[way.name for way in WAYS])
    options = parser.parse_args()
    ways = [way for way in WAYS if way.name in options.ways]
    if any(way in ways for way in (DDP, SLOW_DDP, RAY)):
        environments.make("torch")
    figures: dict[tuple[str, str], list[float]] = {
        (work, way.name): [] for work in STEPS for way in ways if work in way.works
    }
    for number in range(options.rounds):
        for way in ways:
            print(f"round {number} of {options.rounds}: {way.name}", file=sys.stderr, flush=True)
            for work, seconds in measured(way).items():
                figures[work, way.name].append(seconds)
    rows = report.rows_of(figures)
    print(_table(rows))
    print(report.goals_table(verdicts(rows)))


def _table(rows: list[report.Row]) -> str:
    lines = []
    for work, peers in report.by_work(rows).items():
        lines += ["", f"{work:<32}{'median':>10}{'spread':>23}"]
        for row in peers:
            spread = f"{report.shown(row.lo)} … {report.shown(row.hi)}"
            lines.append(f"  {row.peer:<30}{report.shown(row.seconds):>10}{spread:>23}")
    return "\n".join([*lines, ""])


def _results(*command: str, **environment: str) -> dict[str, float]:
    """What a peer prints: seconds of a step by work."""
    said = subprocess.run(command, env=os.environ | environment, cwd=HERE, stdout=subprocess.PIPE, check=True).stdout
    results = [json.loads(line) for line in said.decode().splitlines() if line.startswith("{")]
    return {result["work"].partition("/")[0]: result["seconds"] for result in results}


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
