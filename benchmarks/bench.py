"""What the service costs on this machine, beside what a user would pick instead, measured in the same run.

    make bench          everything, at least five rounds, below 40 minutes; results.json and the charts
    make bench-quick    the service and the floors, about two minutes; tables only

All peers take turns, round by round, so that whatever else the machine does hits all of them. ``works.py`` says what is
measured, ``peers/`` how each peer does it; a trial whose result is not that of NumPy counts for nothing. The model
``dlrm`` is measured by ``bench_models.py``, and trainings by ``trainings.py``. Goals stand beside what was reached;
they do not change the exit status.
Carry ratios to other machines, never milliseconds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import bench_models
import environments
import memory
import numpy as np
import parts
import report
import timeline
from report import Goal
from sklearn.datasets import load_digits
from works import DIGITS, EMPTY, FIRST_STEP, MANY, WORKS, Embedding, Read

HERE = Path(__file__).resolve().parent

#: Seconds that a trial is meant to take, and the bounds of its steps. The round before says how many steps that is.
TRIAL_SECONDS, FEWEST, MOST = 0.5, 3, 1000
LIMIT = 240.0  # seconds after which a program is ended

#: Seconds from the start, after which no program begins that would end later; the model, the memory and the parts come
#: on top. A program that takes longer than in the rounds before is ended at most GRACE after that.
BUDGET, QUICK_BUDGET, GRACE = 33 * 60.0, 90.0, 60.0

COPIED, IN_PLACE = "adam-400MB-copied", "adam-400MB"
LARGEST = "embedding-1e7"  # 5 GB or more a peer: making them is most of its time, so it is for few

#: What one program measures before the next peer has its turn. The starts of torch, Ray and TensorFlow take longer than
#: what they measure, so there are few. The first step is that after the start.
GROUPS = (
    (FIRST_STEP, EMPTY, "sgd-1MB", "adam-1MB", "adam-16MB", MANY, "digits", "digits-many-steps"),
    ("sgd-100MB", "adam-100MB", IN_PLACE, COPIED, "read-1MBx1", "read-400MBx1", "read-400MBx1000"),
    (LARGEST, "embedding", "embedding-1e5"),
)
QUICK = ("sgd-1MB", "adam-16MB", MANY, "read-1MBx1", "read-400MBx1000")
QUICK += ("digits", "digits-many-steps", "embedding", FIRST_STEP, EMPTY)

#: Works that do about as many steps as another, so that these are not searched for.
LIKE = {COPIED: IN_PLACE, LARGEST: "embedding"}

ALL = tuple(name for name in WORKS if name not in (EMPTY, MANY))  # what a run costs, and a variable, is ours to say
SMALLER = tuple(name for name in ALL if name != LARGEST)
NO_READS = tuple(name for name in ALL if not isinstance(WORKS[name], Read))
NO_READS_SMALLER = tuple(name for name in NO_READS if name != LARGEST)
WHOLE_MODELS = ("dlrm",)  # of `bench_models`, which has programs and goals of its own
TRAININGS = ("training-quick-start", "training-dlrm")  # of `trainings`, which has goals of its own, too
RECOVERY = ("digits", "digits-many-steps", "adam-1MB", "adam-16MB", "adam-100MB", "adam-400MB")
RESTARTS = ("digits", "adam-16MB")  # that a worker may die
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

TF, DDP, RAY, TORCH, NUMPY = "tf-central-storage", "ddp-gloo", "ray-ps", "torch-one-process", "numpy-one-process"
REFERENCE, ECHO = "reference", "pyzmq-echo"
GOALS = (
    Goal("sgd-1MB", ">=", 7, TF),
    Goal("sgd-1MB", ">=", 25, DDP),
    Goal("adam-1MB", ">=", 6, TF),
    Goal("adam-1MB", ">=", 20, DDP),
    Goal("adam-1MB", ">=", 1, NUMPY),
    Goal("adam-16MB", "<=", 1.35, REFERENCE),
    Goal("adam-16MB", ">=", 2, TF),
    Goal(IN_PLACE, "<=", 1.10, REFERENCE),
    Goal(IN_PLACE, ">=", 1.7, TF),
    Goal(IN_PLACE, ">=", 5.5, DDP),
    Goal(IN_PLACE, ">=", 11, RAY),
    Goal(COPIED, "<=", 1.08, REFERENCE),
    Goal(COPIED, ">=", 1.2, TF),
    Goal("read-400MBx1000", "<=", 2, "read-1MBx1"),
    Goal("digits", ">=", 2.3, TF),
    Goal("digits", ">=", 4.5, DDP),
    Goal("digits", ">=", 9, RAY),
    Goal("digits", ">=", 1, NUMPY),
    Goal("digits-many-steps", ">=", 1, TF),
    Goal("digits-many-steps", ">=", 1.2, NUMPY),
    Goal("digits-many-steps", "<=", 1.6, REFERENCE),
    Goal("embedding", "<=", 1.4, REFERENCE),
    Goal("embedding", ">=", 3.5, TF),
    Goal("embedding", ">=", 3.5, TORCH),
    Goal("embedding", ">=", 11, DDP),
    Goal(LARGEST, "<=", 1, REFERENCE),
    Goal(FIRST_STEP, ">=", 4, TF),
    Goal(EMPTY, "<=", 4, ECHO),
)


@dataclass(frozen=True)
class Peer:
    """A program, with as many ways to do a work as it names: the fastest is taken, work by work."""

    name: str
    module: str
    works: tuple[str, ...] = ALL
    family: str = ""  # of its virtual environment; the empty one is ours
    environment: dict[str, str] = field(default_factory=dict, hash=False)
    has_places: bool = False  # where gradients are best; without, it is all the same to the peer where they lie
    ways: tuple[str, ...] = ()

    def names(self, work: str) -> list[str]:
        """The work in every way. In a read there is no rule, and of a first step that of the first way is the first."""
        if not self.ways:
            return [work]
        is_one = work == FIRST_STEP or isinstance(WORKS[work], Read)
        return [f"{work}/{way}" for way in self.ways[: 1 if is_one else None]]


OWN = (
    Peer(report.OURS, "central_storage_itself", tuple(WORKS), has_places=True),
    Peer("central-storage-recovery-off", "central_storage_itself", RECOVERY, environment={"SERVER_RECOVERY": "off"}),
    Peer("central-storage-restarts-off", "central_storage_itself", RESTARTS, environment={"MAX_RESTARTS": "0"}),
    Peer(REFERENCE, "reference", tuple(set(ALL) - {FIRST_STEP}), environment=ONE_THREAD, has_places=True),
    Peer(NUMPY, "numpy_one_process", NO_READS_SMALLER, environment=ONE_THREAD),
    Peer(ECHO, "pyzmq_echo", ("sgd-1MB", "read-1MBx1", "digits", EMPTY)),
)
OTHERS = (
    Peer(TORCH, "torch_one_process", NO_READS, "torch"),
    Peer(DDP, "ddp_gloo", SMALLER, family="torch", environment=ONE_THREAD),
    Peer(RAY, "ray_ps", SMALLER, family="torch", ways=("numpy", "torch")),
    Peer(TF, "tf_central_storage", family="tensorflow"),
)


@dataclass
class Bench:
    """The figures so far, and what went wrong."""

    deadline: float = math.inf  # on the clock ``time.monotonic``: what would end later does not begin
    figures: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    taken: Counter[str] = field(default_factory=Counter)  # seconds by peer

    def measure(self, peers: Sequence[Peer], works: Iterable[str], rounds: int) -> None:
        """All peers in turn, ``rounds`` times, after a round that finds the number of steps and the fastest way. What
        did as many steps in that one already as are to be done has one round less."""
        asked, begun = set(works), time.monotonic()
        latest: dict[tuple[Peer, str], tuple[float, str]] = {}  # seconds of a step, and the fastest way
        like = {work: LIKE[work] if LIKE.get(work) in asked else work for work in asked}
        longest: Counter[tuple[Peer, int]] = Counter()  # seconds of a program, by the place of its group

        def due(peer: Peer, work: str, is_search: bool) -> list[str]:
            """The names under which it is to be measured now."""
            if work not in asked or work not in peer.works or _is_same(peer, work, asked):
                return []
            if is_search:
                return peer.names(work) if like[work] == work else []
            if (peer, like[work]) not in latest or len(self.figures.get((work, peer.name), ())) >= rounds:
                return []
            return [work + latest[peer, like[work]][1]]

        for number, (place, group), peer in product(range(rounds + 1), enumerate(GROUPS), peers):
            wanted = [name for work in group for name in due(peer, work, is_search=not number)]
            if not wanted:
                continue
            started = time.monotonic()
            if started + longest[peer, place] > self.deadline:
                self.left_out.append(f"round {number} of {peer.name} at {', '.join(wanted)}")
                continue
            self._progress(f"round {number} of {rounds}", peer.name, wanted, begun)
            count = {}
            for name in wanted:
                work = name.partition("/")[0]
                count[name] = _steps(work, latest[peer, like[work]][0] if number else math.inf)
            measured = self.run(peer, count, min(LIMIT, self.deadline - started + GRACE))
            lasted = time.monotonic() - started
            self.taken[peer.name] += lasted
            longest[peer, place] = max(longest[peer, place], lasted)
            for name, seconds in measured:
                work, slash, way = name.partition("/")
                if number:
                    self.figures.setdefault((work, peer.name), []).append(seconds)
                elif seconds < latest.get((peer, work), (math.inf, ""))[0]:
                    self.figures[work, peer.name] = [seconds] if _steps(work, seconds) == FEWEST else []
                else:
                    continue
                latest[peer, work] = seconds, slash + way
        for peer in peers:
            if _is_same(peer, COPIED, asked) and (IN_PLACE, peer.name) in self.figures:
                self.figures[COPIED, peer.name] = self.figures[IN_PLACE, peer.name]
        order = list(WORKS)
        found = sorted(self.figures.items(), key=lambda item: order.index(item[0][0]))
        self.figures = {key: seconds for key, seconds in found if seconds}

    def run(self, peer: Peer, steps: dict[str, int], limit: float = LIMIT) -> list[tuple[str, float]]:
        """A program, once: the seconds of each work that it did before ``limit`` seconds were over."""
        command = [environments.python_of(peer.family), "-W", "ignore", "-m", f"peers.{peer.module}"]
        command += [f"{work}={count}" for work, count in steps.items()]
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")] if not peer.family else [])]
        environment = os.environ | peer.environment | {"PYTHONPATH": os.pathsep.join(paths)}
        begun = time.monotonic()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        ) as process:
            try:
                out, err = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                out, err = process.communicate()
                err += f"ended after {limit:.0f} s"
            finally:
                if process.poll() is None:  # Ctrl-C: nobody would end it
                    os.killpg(process.pid, signal.SIGKILL)
        lines = [json.loads(line) for line in out.splitlines() if line.startswith('{"work"')]
        if process.returncode:
            missing = ", ".join(list(steps)[len(lines) :])
            last = "\n    ".join(err.strip().splitlines()[-5:])
            self.failures.append(f"{peer.name} failed at {missing} (exit code {process.returncode}):\n    {last}")
        taken = [line["at"] - begun if line["work"].startswith(FIRST_STEP) else line["seconds"] for line in lines]
        return [(line["work"], seconds) for line, seconds in zip(lines, taken, strict=True)]

    def times(self, started: float) -> list[str]:
        """Where the time went, and what there was no time for."""
        shares = ", ".join(f"{peer} {seconds / 60:.1f}" for peer, seconds in self.taken.most_common())
        lines = [f"{(time.monotonic() - started) / 60:.1f} minutes: {shares}"]
        return [*lines, *(f"no time was left for {each}" for each in self.left_out)]

    @staticmethod
    def _progress(where: str, peer: str, works: list[str], begun: float) -> None:
        minutes = (time.monotonic() - begun) / 60
        line = f"{where}, {minutes:.1f} min: {peer} at {', '.join(works)}"
        if sys.stderr.isatty():
            print(f"\r\033[K{line[:110]}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def _is_same(peer: Peer, work: str, asked: set[str]) -> bool:
    """Whether the work is another one for this peer, which is measured."""
    return work == COPIED and {COPIED, IN_PLACE} <= asked.intersection(peer.works) and not peer.has_places


def _steps(work: str, seconds: float) -> int:
    if work == FIRST_STEP:
        return 1
    most = 100 if isinstance(WORKS[work], Embedding) else MOST  # every step's rows are kept for the check
    return min(most, max(FEWEST, round(TRIAL_SECONDS / seconds)))


def prepare() -> None:
    """Put the digits where peers without scikit-learn find them."""
    path = environments.BUILD / "bench-digits.npz"
    path.parent.mkdir(exist_ok=True)
    images, labels = load_digits(return_X_y=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:  # another process may read the file now
        made = Path(directory, path.name)
        np.savez(made, images=(images / 16).astype(np.float32), labels=labels.astype(np.int64))
        made.replace(path)
    os.environ[DIGITS] = str(path)


def verdicts(rows: Sequence[report.Row], works: Iterable[str]) -> list[dict[str, Any]]:
    """Of each goal of these works: what the service reached, by the medians."""
    medians = {(row.work, row.peer): row.seconds for row in rows}
    found = []
    for goal in (goal for goal in GOALS if goal.work in works):
        ours = medians.get((goal.work, report.OURS))
        other = medians.get((goal.other, report.OURS) if goal.other in WORKS else (goal.work, goal.other))
        found.append(goal.verdict(None if ours is None or other is None else goal.ratio(ours, other)))
    return found


def installed(bench: Bench, machine: dict[str, Any]) -> tuple[Peer, ...]:
    """The peers whose packages are there now; ``bench`` notes what could not be installed."""
    peers: list[Peer] = [*OWN]
    for family in environments.PACKAGES:
        try:
            environments.make(family)
            machine["versions"] |= environments.versions(family)
        except subprocess.CalledProcessError as error:
            bench.failures.append(f"{family} was not installed, and is left out: {error}")
        else:
            peers += [peer for peer in OTHERS if peer.family == family]
    return tuple(peers)


def measure_model(bench: Bench, model: str, rounds: int, machine: dict[str, Any]) -> None:
    """Let `bench_models` measure a model; ``bench`` notes whether that failed."""
    try:
        bench.figures |= bench_models.figures(model, rounds)
        machine["versions"] |= bench_models.versions()
    except (AssertionError, ImportError, OSError, RuntimeError) as error:
        bench.failures.append(f"{model} failed: {error}")


def measure_training(bench: Bench, work: str, rounds: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Let `trainings` measure a training. Return the goals and what else is to be said; ``bench`` notes whether that
    failed."""
    command = [sys.executable, "-W", "ignore", str(HERE / "trainings.py"), "--json", "--rounds", str(rounds)]
    command += ["--trainings", work.removeprefix("training-")]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    except subprocess.CalledProcessError as error:
        bench.failures.append(f"{work} failed: {error}:\n    " + "\n    ".join(error.stderr.strip().splitlines()[-5:]))
        return [], []
    except subprocess.TimeoutExpired as error:
        bench.failures.append(f"{work} failed: {error}")
        return [], []
    said = json.loads(ended.stdout.splitlines()[-1])
    bench.figures |= {(work, side): seconds for side, seconds in said["seconds"].items()}
    return said["goals"], said["lines"]


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="rounds that count (default: 5, which are the fewest; quick: 1)")
    parser.add_argument("--quick", action="store_true", help="the service and the floors, nothing written")
    names = (*WORKS, *WHOLE_MODELS, *TRAININGS)
    parser.add_argument("--works", nargs="+", choices=names, metavar="WORK", help=f"only these of: {' '.join(names)}")
    parser.add_argument("--results", type=Path, default=HERE, help="the directory of results.json and the charts")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 5)
    if not options.quick and rounds < 5:
        parser.error("a median of fewer than 5 rounds says little")
    machine = report.machine()
    prepare()
    bench = Bench(started + (QUICK_BUDGET if options.quick else BUDGET))
    peers = OWN if options.quick else installed(bench, machine)
    works = options.works or (QUICK if options.quick else names)
    bench.measure(peers, works, rounds)
    for model in (name for name in works if name in WHOLE_MODELS):
        measure_model(bench, model, rounds, machine)
    trained, said = [], []
    for work in (name for name in works if name in TRAININGS):
        goals, lines = measure_training(bench, work, rounds)
        trained += goals
        said += lines
    rows = report.rows_of(bench.figures)
    goals = [*verdicts(rows, works), *trained]
    if rows and not options.quick:
        report.save(rows, goals, machine, options.results)
    print(f"\nmedian and spread of {rounds} rounds; one step, one read or one start; / ours: times our median")
    print(report.table(rows))
    if goals:
        print("\n".join(["", report.goals_table(goals), *said]))
    print(f"\n{memory.table()}")
    if options.quick:
        shown = [work for work in options.works or parts.SHOWN if work in WORKS]
        print(f"\n{parts.table(OWN[0], bench, shown)}")
    elif rows:
        if set(timeline.SHOWN) <= set(works):
            timeline.write(OWN[0], bench, options.results)
        print(f"\nwritten to {options.results}/results.json and its charts")
    print("\n" + "\n".join(bench.times(started)))
    if bench.failures:
        sys.exit("\n" + "\n".join(bench.failures))


if __name__ == "__main__":
    main()
