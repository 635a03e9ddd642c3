"""What workers on other machines cost: one step on one machine, over the relay, and in other systems.

    make .venv/.installed-ray                         # once: killed nodes need Ray beside the service
    .venv/bin/python benchmarks/cluster.py            # as root, with iproute2: it makes two network namespaces
    .venv/bin/python benchmarks/cluster.py --works empty-run    # the messages of a step alone: two minutes
    .venv/bin/python benchmarks/cluster.py --quick    # small works, few steps: whether everybody runs

It writes cluster.json, and from that the tables and the chart of docs/scaling-out.md (``scaling_out.py``). Torch,
TensorFlow and Ray for the other systems are installed under build/ when they are first needed. Whoever cannot be
installed is left out, and named. ``--ways`` and ``--works`` measure a part anew, and the other figures stay.

The namespaces stand for two machines: ``head`` has the script and the server, ``node`` the workers. All programs run on
the processors of this one machine, so the ratios matter and not the milliseconds. A link of 1 Gbit/s is a veth pair
with a token bucket at both ends; the other link has no limit. Only the relay encrypts what travels. ``ray-ps`` without
a rate runs on this machine alone, and pays for no network.

The model of a step whose bytes decide: N gradients go up and M copies of the parameters come down, through the one
network card of the head, so a step of V bytes takes (M + N) V / B at B bytes a second. As *relay*, each worker is at an
outpost of its own, so M is N. As *one outpost*, all workers share an outpost, with one link and one copy, so M is 1.
Rows of tables go to each worker, and take 2 N R / B in both.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import environments
import numpy as np
import report
from namespaces import HEAD_ADDRESS, HERE, LINK, NODE_ADDRESS, done, namespaces, started

BIN = Path(sys.executable).parent
PORT = 5600
GBIT = 1e9 / 8  # bytes a second
EMPTY = "empty-run"
DENSE = {"adam-1MB": 1_000_000, "adam-16MB": 16_000_000, "adam-100MB": 100_000_000}
ROWS = ("embedding-1e5", "embedding", "embedding-1e7")
ROWS_NBYTES = 4096 * 64 * 4  # that a replica looks up in a step
#: The steps of each work: fast, and where the link is limited.
STEPS = {EMPTY: 200, "adam-1MB": 40, "adam-16MB": 16, "adam-100MB": 6, **dict.fromkeys(ROWS, 30)}
SLOW_STEPS = {EMPTY: 200, "adam-1MB": 20, "adam-16MB": 6, "adam-100MB": 3, **dict.fromkeys(ROWS, 20)}
#: How Ray's parameter server applies the rule: whichever of its two ways is faster for the work.
RAY_RULES = {**dict.fromkeys(STEPS, "numpy"), "adam-100MB": "torch"}
KILLED = ("killed-node/noticed", "killed-node/room", "killed-node/joins")
_START, _LONGEST = 60.0, 300.0  # seconds
_ONCE = ("embedding-1e7",)  # is measured in the first round alone: making the table takes most of its time
_QUICK = (EMPTY, "adam-1MB", "embedding-1e5", *KILLED)
#: A program that ends when somebody listens at the address and port that it is given.
_WAIT = """
import socket, sys, time
while True:
    try:
        socket.create_connection((sys.argv[1], int(sys.argv[2])), 1).close()
        break
    except OSError:
        time.sleep(0.1)
"""


@dataclass(frozen=True)
class Way:
    """Somebody who does the works, as ``run`` says. ``rate`` of the link is in bytes a second: 0 for no limit, None
    for no link. ``outposts`` share the replicas of a relay; 0: there is one for each. ``needs`` is the family of
    environments that must be there, or ``ray`` for Ray beside the service."""

    name: str
    run: Callable[[Way, list[str]], dict[str, float]]
    works: tuple[str, ...]
    rate: float | None = None
    replicas: int = 2
    outposts: int = 0
    needs: str = ""

    @property
    def copies(self) -> int:
        """How many copies of the variables a step sends: M in the formula."""
        return self.outposts or self.replicas

    def steps(self, work: str) -> int:
        """How many are measured at a time; of many replicas fewer, since each adds to the bytes."""
        return max(2, (SLOW_STEPS if self.rate else STEPS)[work] * 2 // max(2, self.replicas))


@contextmanager
def service(head: list[str], node: list[str], replicas: int, outposts: int) -> Iterator[str]:
    """A service whose workers run on the node, as many at each of its outposts; its address."""
    places = replicas // outposts
    devices = ",".join(f"cpu:{number}" for number in range(places))
    with tempfile.TemporaryDirectory() as place, ExitStack() as ends:
        keys, run = Path(place, "keys"), Path(place, "run")
        for outpost in range(outposts):
            made = ["keys", str(keys), "--worker", str(outpost), "--places", str(places)]
            done(str(BIN / "cs-launch"), *made)
        endpoint = f"tcp://{HEAD_ADDRESS}:{PORT}"
        serve = ["--serve", str(replicas), "--listen", endpoint, "--keys", str(keys), "--run-dir", str(run)]
        ends.enter_context(started(*head, str(BIN / "cs-launch"), *serve))
        deadline = time.monotonic() + _START
        while not (run / "supervisor").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the service was not up within {_START:.0f} s")
            time.sleep(0.05)
        for outpost in range(outposts):
            own = Path(place, f"node{outpost}")
            own.mkdir(mode=0o700)
            for file in ("service.key", f"worker-{outpost}.key", f"worker-{outpost}.key_secret"):
                (own / file).write_bytes((keys / file).read_bytes())
                (own / file).chmod(0o600)
            join = ["--join", endpoint, "--keys", str(own), "--devices", devices]
            ends.enter_context(started(*node, str(BIN / "cs-launch"), *join))
        yield str(run)


def by_one_machine(way: Way, asked: list[str]) -> dict[str, float]:
    """This service, as on one machine."""
    command = [sys.executable, "-m", "peers.central_storage_itself"]
    return _results(*command, *asked, BENCHMARK_REPLICAS=str(way.replicas))


def by_relay(way: Way, asked: list[str]) -> dict[str, float]:
    """This service, with workers on the node."""
    found = {}
    assert way.rate is not None
    with namespaces(way.rate) as (head, node), service(head, node, way.replicas, way.copies) as address:
        command = [*head, sys.executable, "-m", "peers.central_storage_itself"]
        own = {"CS_ADDRESS": address, "BENCHMARK_REPLICAS": str(way.replicas)}
        for each in asked:  # only the first strategy of a script uses the service
            found |= _results(*command, each, **own)
    return found


def by_ddp(way: Way, asked: list[str]) -> dict[str, float]:
    """One process on the head and one on the node."""
    assert way.rate is not None
    with namespaces(way.rate) as (head, node):
        shared = {"MASTER_ADDR": HEAD_ADDRESS, "MASTER_PORT": str(PORT), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": LINK}
        command = [environments.python_of("torch"), "-m", "peers.ddp_gloo", *asked]
        with started(*node, *command, **shared, RANK="1") as other:
            found = _results(*head, *command, **shared, RANK="0")
            other.wait(_START)
    return found


def by_ray(way: Way, asked: list[str]) -> dict[str, float]:
    """A parameter server in an actor on the head, and a worker in each of two actors on the node."""
    python = environments.python_of("torch")
    by_rule = [f"{work}/{RAY_RULES[work]}={steps}" for work, _, steps in (each.partition("=") for each in asked)]
    command = [python, "-m", "peers.ray_ps", *by_rule]
    if way.rate is None:
        return _results(*command)
    own = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}  # nobody else reaches these namespaces
    ray = [python, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=4", "--object-store-memory=3000000000"]
    with (
        tempfile.TemporaryDirectory(prefix="ray-") as place,
        namespaces(way.rate) as (head, node),
        ExitStack() as ends,
    ):
        of_head = [f"--node-ip-address={HEAD_ADDRESS}", f"--port={PORT}", "--include-dashboard=false"]
        ends.enter_context(started(*head, *ray, "--head", *of_head, f"--temp-dir={place}", **own))
        _until_listening(head)
        of_node = [f"--node-ip-address={NODE_ADDRESS}", f"--address={HEAD_ADDRESS}:{PORT}"]
        ends.enter_context(started(*node, *ray, *of_node, **own))
        return _results(*head, *command, RAY_PS_NODES=f"{HEAD_ADDRESS}:{PORT} {NODE_ADDRESS}", **own)


def by_tensorflow(way: Way, asked: list[str]) -> dict[str, float]:
    """TensorFlow's coordinator and parameter server on the head, and two workers on the node."""
    assert way.rate is not None
    tasks = {
        "chief": [f"{HEAD_ADDRESS}:{PORT}"],
        "ps": [f"{HEAD_ADDRESS}:{PORT + 1}"],
        "worker": [f"{NODE_ADDRESS}:{PORT + 2 + replica}" for replica in range(way.replicas)],
    }
    own = {"TF_TASKS": json.dumps(tasks), "TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR"}
    command = [environments.python_of("tensorflow"), "-m", "peers.tf_parameter_server"]
    with namespaces(way.rate) as (head, node), ExitStack() as ends:
        for machine, task in ((head, "ps/0"), *((node, f"worker/{replica}") for replica in range(way.replicas))):
            ends.enter_context(started(*machine, *command, **own, TF_TASK=task))
        return _results(*head, *command, *asked, **own)


def by_killed_node(way: Way, asked: list[str]) -> dict[str, float]:
    """The program that kills a node of Ray's, which measures all that it can."""
    return _results(sys.executable, "killed_node.py")


RELAY, SLOW_RELAY = (
    Way("relay", by_relay, (EMPTY, *DENSE, *ROWS[:2]), 0.0),
    Way("relay, 1 Gbit/s", by_relay, tuple(STEPS), GBIT),
)
ONE_OUTPOST, SLOW_OUTPOST = (
    Way("one outpost", by_relay, (EMPTY, *DENSE, ROWS[0]), 0.0, outposts=1),
    Way("one outpost, 1 Gbit/s", by_relay, (*DENSE, ROWS[0]), GBIT, outposts=1),
)
ONE_MACHINE = Way("one machine", by_one_machine, tuple(STEPS))
RAY = Way("ray-ps", by_ray, (*DENSE, *ROWS[:2]), needs="torch")
#: The same with other numbers of workers: points on the lines of the model.
BY_WORKERS = tuple(
    Way(f"relay, 1 Gbit/s, {n} workers", by_relay, ("adam-16MB", "embedding-1e5"), GBIT, n) for n in (1, 4, 8)
)
OUTPOST_BY_WORKERS = tuple(
    Way(f"one outpost, 1 Gbit/s, {n} workers", by_relay, ("adam-16MB", "embedding-1e5"), GBIT, n, 1) for n in (4, 8)
)
#: Those whose empty runs give the constants of the model for messages, by what the workers are.
CONTROL = {
    "one machine": (
        ONE_MACHINE,
        *(Way(f"one machine, {n} workers", by_one_machine, (EMPTY,), None, n) for n in (1, 4)),
    ),
    "relay": (RELAY, *(Way(f"relay, {n} workers", by_relay, (EMPTY,), 0.0, n) for n in (1, 4))),
    "one outpost": (ONE_OUTPOST, Way("one outpost, 4 workers", by_relay, (EMPTY,), 0.0, 4, 1)),
}
WAYS = (
    *CONTROL["one machine"],
    *CONTROL["relay"],
    *CONTROL["one outpost"],
    SLOW_RELAY,
    *BY_WORKERS,
    SLOW_OUTPOST,
    *OUTPOST_BY_WORKERS,
    Way("ddp-gloo", by_ddp, tuple(DENSE), 0.0, needs="torch"),
    Way("ddp-gloo, 1 Gbit/s", by_ddp, (*DENSE, *ROWS[:2]), GBIT, needs="torch"),
    RAY,
    Way("ray-ps, 1 Gbit/s", by_ray, (*DENSE, *ROWS[:2]), GBIT, needs="torch"),
    Way("tf-ps", by_tensorflow, tuple(DENSE), 0.0, needs="tensorflow"),
    Way("tf-ps, 1 Gbit/s", by_tensorflow, (*DENSE, *ROWS[:2]), GBIT, needs="tensorflow"),
    Way("a killed node", by_killed_node, KILLED, needs="ray"),
)
WORKS = tuple(dict.fromkeys(work for way in WAYS for work in way.works))
MODEL, SHARED, MORE, LIMIT = "2 N V / B", "(M + N) V / B", "one machine + 1 ms", "5 s"
GOALS = [
    report.Goal("adam-1MB", ">=", 2.0, RAY.name, ours=RELAY.name),
    report.Goal("adam-100MB", ">=", 1.0, RAY.name, ours=RELAY.name),
    report.Goal("adam-1MB", "<=", 1.15, MODEL, ours=SLOW_RELAY.name),
    report.Goal("adam-16MB", "<=", 1.15, MODEL, ours=SLOW_RELAY.name),
    report.Goal("adam-100MB", "<=", 1.15, MODEL, ours=SLOW_RELAY.name),
    report.Goal("adam-16MB", "<=", 1.15, SHARED, ours=SLOW_OUTPOST.name),
    report.Goal("adam-100MB", "<=", 1.15, SHARED, ours=SLOW_OUTPOST.name),
    report.Goal(EMPTY, "<=", 1.0, MORE, ours=RELAY.name),
    *(report.Goal(work, "<=", 1.0, LIMIT, ours="a killed node") for work in KILLED[1:]),
]
FLAT = report.Goal("rows", "<=", 1.2, "embedding-1e5", ours="embedding-1e7")


def verdicts(rows: list[report.Row]) -> list[dict[str, object]]:
    """The goals beside what was reached."""
    seconds = {(row.work, row.peer): row.seconds for row in rows}
    for work, nbytes in DENSE.items():
        for way, model in ((SLOW_RELAY, MODEL), (SLOW_OUTPOST, SHARED)):
            seconds[work, model] = (way.copies + way.replicas) * nbytes / GBIT
    seconds |= {(work, LIMIT): 5.0 for work in KILLED}
    if (EMPTY, ONE_MACHINE.name) in seconds:
        seconds[EMPTY, MORE] = seconds[EMPTY, ONE_MACHINE.name] + 1e-3
    found = []
    for goal in GOALS:
        ours, others = seconds.get((goal.work, goal.ours)), seconds.get((goal.work, goal.other))
        found.append(goal.verdict(goal.ratio(ours, others) if ours and others else None))
    tall, low = seconds.get((FLAT.ours, SLOW_RELAY.name)), seconds.get((FLAT.other, SLOW_RELAY.name))
    return [*found, FLAT.verdict(FLAT.ratio(tall, low) if tall and low else None)]


def control(rows: list[report.Row]) -> list[str]:
    """The lines nearest to the empty runs, on one machine and on others: the constants of messages of
    ``central_storage.cluster.cost``. Without the runs there is none."""
    seconds, found = {(row.work, row.peer): row.seconds for row in rows}, []
    here, there = CONTROL["one machine"], [*CONTROL["relay"], *CONTROL["one outpost"]]
    if all((EMPTY, way.name) in seconds for way in here):
        base, each = _nearest([(1, way.replicas) for way in here], [seconds[EMPTY, way.name] for way in here])
        found.append(f"messages on one machine: {base:.2f} ms + {each:.2f} ms N")
    if all((EMPTY, way.name) in seconds for way in there):
        terms = [(1, way.copies, way.replicas) for way in there]
        base, link, each = _nearest(terms, [seconds[EMPTY, way.name] for way in there])
        found.append(f"messages to other machines: {base:.2f} ms + {link:.2f} ms M + {each:.2f} ms N")
    return found


def _nearest(terms: list[tuple[int, ...]], seconds: list[float]) -> list[float]:
    """The milliseconds of each term with which their sums come nearest to ``seconds``."""
    return [float(each) for each in np.linalg.lstsq(np.array(terms), 1e3 * np.array(seconds), rcond=None)[0]]


def missing(ways: list[Way]) -> dict[str, str]:
    """Why a way cannot be measured here, by its name."""
    found: dict[str, str] = {}
    reasons = {need: _lacks(need) for need in dict.fromkeys(way.needs for way in ways)}
    has_namespaces = os.geteuid() == 0 and shutil.which("ip") is not None
    for way in ways:
        if way.rate is not None and not has_namespaces:
            found[way.name] = "network namespaces need root, and the program ip of iproute2"
        elif reasons[way.needs]:
            found[way.name] = reasons[way.needs]
    return found


def _lacks(need: str) -> str:
    """Why what a way needs is not here, or nothing."""
    if need == "ray":
        is_here = importlib.util.find_spec("ray") is not None
        return "" if is_here else "Ray is not installed beside the service: make .venv/.installed-ray"
    try:
        if need:
            environments.make(need)
    except subprocess.CalledProcessError:
        return f"pip could not install {' '.join(environments.PACKAGES[need])}"
    return ""


def asked_of(way: Way, number: int, options: argparse.Namespace) -> list[str]:
    """``WORK=STEPS`` for each work of a way in a round."""
    asked = [work for work in way.works if work in options.works and (work in _QUICK or not options.quick)]
    again = [work for work in asked if number == 0 or work not in _ONCE]
    return [f"{work}={2 if options.quick or work in KILLED else way.steps(work)}" for work in again]


def main() -> int:
    """Measure, print, and write; the exit code is 1 if somebody has failed, or is missing."""
    options = _parser().parse_args()
    chosen = [way for way in WAYS if way.name in options.ways and asked_of(way, 0, options)]
    lacking = missing(chosen)
    ways = [way for way in chosen if way.name not in lacking]
    left_out = "".join(f"not measured: {name}: {why}\n" for name, why in lacking.items())
    print(left_out, end="", file=sys.stderr, flush=True)
    rows, failures = _measured(options, ways)
    print(_table(rows))
    print(*control(rows), sep="\n", end="\n\n")
    print(report.goals_table(verdicts(rows)))
    print(*failures, sep="\n", end="\n" * bool(failures))
    print(left_out, end="")
    if not options.quick and options.results == HERE:
        subprocess.run([sys.executable, "scaling_out.py"], cwd=HERE, check=True)
    return bool(failures or lacking)


def _measured(options: argparse.Namespace, ways: list[Way]) -> tuple[list[report.Row], list[str]]:
    """The rounds: the figures, and who has failed."""
    figures: dict[tuple[str, str], list[float]] = {(work, way.name): [] for way in WAYS for work in way.works}
    failures: list[str] = []
    took: dict[str, float] = {}
    begun = time.monotonic()
    rows: list[report.Row] = []
    for number in range(1 if options.quick else options.rounds):
        for way in ways:
            since = time.monotonic() - begun
            if number and since + took[way.name] > options.minutes * 60:
                continue
            print(f"{since:.0f} s: round {number + 1}: {way.name}", file=sys.stderr, flush=True)
            try:
                found = way.run(way, asked_of(way, number, options))
            except (subprocess.SubprocessError, OSError) as error:
                failures.append(f"{way.name} failed: {error}")
                found = {}
            for work, seconds in found.items():
                figures[work, way.name].append(seconds)
            took[way.name] = time.monotonic() - begun - since
            rows = report.rows_of({key: seconds for key, seconds in figures.items() if seconds})
            if not options.quick:
                _write(options, ways, rows, failures)
    return rows, failures


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=17, help="later rounds leave out what would end after them")
    parser.add_argument("--quick", action="store_true", help="two steps of each small work, one round, nothing written")
    parser.add_argument("--ways", nargs="+", choices=[way.name for way in WAYS], default=[way.name for way in WAYS])
    parser.add_argument("--works", nargs="+", choices=WORKS, default=WORKS)
    parser.add_argument(
        "--results", type=Path, default=HERE, help="another directory for cluster.json; then the page stays as it is"
    )
    return parser


def _write(options: argparse.Namespace, ways: list[Way], rows: list[report.Row], failed: list[str]) -> None:
    """What is known so far, so that a run that is interrupted leaves its figures; of what is not measured now, what was
    known."""
    path, names = options.results / "cluster.json", {way.name for way in ways}
    if path.exists():
        known = json.loads(path.read_text())
        measured = {(row.work, row.peer) for row in rows}
        before = [report.Row(**row) for row in known["rows"]]
        rows = [*(row for row in before if (row.work, row.peer) not in measured), *rows]
        failed = [*(line for line in known["failures"] if line.partition(" failed: ")[0] not in names), *failed]
    order = {key: number for number, key in enumerate((way.name, work) for way in WAYS for work in way.works)}
    rows = sorted((row for row in rows if (row.peer, row.work) in order), key=lambda row: order[row.peer, row.work])
    machine = {what: report.machine()[what] for what in ("cpus", "memory_nbytes", "versions")}
    results = {"machine": machine, "rows": [asdict(row) for row in rows], "goals": verdicts(rows), "failures": failed}
    path.write_text(json.dumps(results, indent=1) + "\n")


def _table(rows: list[report.Row]) -> str:
    lines = []
    for work, peers in report.by_work(rows).items():
        lines += ["", f"{work:<32}{'median':>10}{'spread':>23}"]
        for row in peers:
            spread = f"{report.shown(row.lo)} … {report.shown(row.hi)}"
            lines.append(f"  {row.peer:<30}{report.shown(row.seconds):>10}{spread:>23}")
    return "\n".join([*lines, ""])


def _results(*command: str, **environment: str) -> dict[str, float]:
    """What a peer prints: seconds of a step by work. Raises SubprocessError if it fails, or takes too long."""
    asked = {"env": os.environ | environment, "cwd": HERE, "stdout": subprocess.PIPE, "timeout": _LONGEST}
    said = subprocess.run(command, check=True, **asked).stdout
    results = [json.loads(line) for line in said.decode().splitlines() if line.startswith("{")]
    return {result["work"].removesuffix("/numpy").removesuffix("/torch"): result["seconds"] for result in results}


def _until_listening(machine: list[str]) -> None:
    subprocess.run([*machine, sys.executable, "-c", _WAIT, HEAD_ADDRESS, str(PORT)], check=True, timeout=_START)


if __name__ == "__main__":
    sys.exit(main())
