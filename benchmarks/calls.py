"""How many functions each process calls in one repeated step: those of Python, and those of C that Python calls.

    .venv/bin/python benchmarks/calls.py [--works WORK ...] [--top N]

Most of a small step's time is Python code with cold caches, about a microsecond for each function. Unlike a time, the
number of functions hardly depends on how busy the machine is. It includes the looks for mail of a process that waits.
``--top`` lists the functions that are called most. Of the workers, which do the same, the first is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench import prepare
from call_counter import DIRECTORY, CallCounter
from peers.central_storage_itself import TRIALS
from program import WARM
from works import REPLICAS, WORKS

import central_storage as cs

STEPS = 500
SHOWN = ("sgd-1MB", "adam-1MB", "digits", "digits-many-steps", "embedding", "empty-run")
#: Seconds until every process has answered a signal.
PATIENCE = 60.0

Calls = Mapping[str, float]


@contextmanager
def counting() -> Iterator[Path]:
    """Processes that are started meanwhile can count their calls. The directory in which they leave the counts."""
    here = Path(__file__).parent
    before = os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory() as directory:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(here / "hooks"), str(here), *([before] if before else [])])
        os.environ[DIRECTORY] = directory
        try:
            yield Path(directory)
        finally:
            del os.environ[DIRECTORY]
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before


def tell(directory: Path, pids: Sequence[int], suffix: str) -> None:
    """Send each process the signal, and wait until it has left its file."""
    for pid in pids:
        os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + PATIENCE
    while missing := [pid for pid in pids if not (directory / f"{pid}{suffix}").exists()]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the processes {missing} did not answer a signal within {PATIENCE:.0f} s")
        time.sleep(0.01)


def counted(work: str, steps: int) -> dict[str, Calls]:
    """Calls a step of each function, by the role of the process."""
    kind = WORKS[work]
    with counting() as directory, cs.CentralStorageStrategy([f"cpu:{n}" for n in range(REPLICAS)]) as strategy:
        trial = TRIALS[type(kind)](strategy, kind, WARM + 2 * steps)
        trial.run(WARM)
        trial.run(steps)  # from here on all steps are the same
        counters = strategy.statistics()
        pids = [counters.pid, counters.replicas[0].pid]
        script = CallCounter()
        tell(directory, pids, ".begun")
        script.start()
        try:
            trial.run(steps)
        finally:
            script.stop()
        tell(directory, pids, ".json")
        server, worker = (Counter(json.loads((directory / f"{pid}.json").read_text())) for pid in pids)
    found = {"script": script.calls, "worker": worker, "server": server}
    return {role: {name: count / steps for name, count in calls.items()} for role, calls in found.items()}


def sums(calls: Calls) -> tuple[float, float]:
    """Functions of Python and functions of C."""
    of_c = sum(count for name, count in calls.items() if name.startswith("C: "))
    return sum(calls.values()) - of_c, of_c


def most(role: str, calls: Calls, top: int) -> list[str]:
    """A line for each of the functions that are called most."""
    largest = sorted(calls.items(), key=lambda each: -each[1])[:top]
    return [f"  {role:<8}{count:8.1f}  {name}" for name, count in largest]


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", default=SHOWN, choices=sorted(WORKS), metavar="WORK")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    parser.add_argument("--top", type=int, default=0, metavar="N", help="list the N functions that are called most")
    options = parser.parse_args()
    prepare()
    print(f"{'calls a step, Python + C':<26}{'script':>14}{'worker':>14}{'server':>14}")
    for work in options.works:
        found = counted(work, options.steps)
        shown = ["{:.0f} + {:.0f}".format(*sums(calls)) for calls in found.values()]
        print(f"  {work:<24}" + "".join(f"{each:>14}" for each in shown), flush=True)
        for role, calls in found.items():
            for line in most(role, calls, options.top):
                print(line)


if __name__ == "__main__":
    main()
