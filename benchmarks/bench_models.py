"""Whole models in the service, beside what a user would take instead, measured in the same run.

    make bench-models                                                  all models, about twelve minutes
    .venv/bin/python benchmarks/bench_models.py --models dlrm --rounds 9

All programs of a model are started and stay alive; they train in turns of half a second or so, in an order that
rotates, so that whatever else the machine does hits all of them. The figures are medians over the rounds. Memory is the
proportional share (PSS) of all processes of a program: what several of them map counts once. The losses of the first
steps must be those of one process; where random numbers differ, and for Hogwild, they must be finite. Carry ratios to
other machines, never milliseconds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import parts
import psutil
import report

HERE = Path(__file__).resolve().parent
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
WARM = 5  # steps that do not count
TURN_SECONDS = 0.5
LIMIT_RATIO = 1e-3  # by which the loss of one of these may differ from that of one process
PARTS_STEPS = 40

#: A program: its module, its further arguments, and what it finds in its environment. The first one is compared with
#: the others, and the one before the last computes the losses that all must have.
TORCH = {
    report.OURS: ("central_storage_itself", [], {}),
    f"{report.OURS}-ahead": ("central_storage_itself", ["ahead"], {}),
    "ddp-gloo": ("ddp_gloo", [], ONE_THREAD),
    "torch-one-process": ("torch_one_process", [], {}),
    "hogwild": ("hogwild", [], ONE_THREAD),
}
JAX = {
    report.OURS: ("central_storage_jax", [], {}),
    f"{report.OURS}-ahead": ("central_storage_jax", ["ahead"], {}),
    "jax-one-process": ("jax_one_process", [], {}),
}
MODELS = {"dlrm": TORCH, "gpt": TORCH, "convnet": TORCH, "jax-transformer": JAX, "jax-mlp": JAX}
ALONE = ("torch-one-process", "jax-one-process")
RANDOM = {("convnet", name) for name in TORCH} | {(name, "hogwild") for name in MODELS}  # losses of their own

GOALS = (
    report.Goal("dlrm", ">=", 3, "ddp-gloo"),
    report.Goal("dlrm", ">=", 1.2, "torch-one-process"),
    report.Goal("dlrm", "<=", 0.6, "ddp-gloo", "memory"),
    report.Goal("gpt", "<=", 0.92, "ddp-gloo"),
    report.Goal("convnet", "<=", 1, "ddp-gloo"),
)


@dataclass
class Program:
    """A running program, and what was measured of it."""

    name: str
    process: subprocess.Popen[str]
    seconds: list[float] = field(default_factory=list)  # of a step, in each round
    losses: list[float] = field(default_factory=list)
    steps: int = 1  # of a round
    megabytes: float = 0.0
    processor: float = 0.0  # seconds of all its processes for one step

    def train(self, steps: int) -> float:
        """Seconds of a step. Raises RuntimeError if the program has ended."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        said = self.said()
        self.losses.append(said["loss"])
        return said["seconds"]

    def said(self) -> dict[str, float]:
        """The next line of the program."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended with status {self.process.wait()}")
        found: dict[str, float] = json.loads(line)
        return found

    def processes(self) -> list[psutil.Process]:
        """All processes of the program."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def processor_seconds(self) -> float:
        """What all its processes have computed so far."""
        return sum(sum(each.cpu_times()[:2]) for each in self.processes())

    def ratio(self, other: Program, what: str = "seconds") -> float:
        """How many times as much it needs as another program."""
        if what == "memory":
            return self.megabytes / other.megabytes
        return statistics.median(one / two for one, two in zip(self.seconds, other.seconds, strict=True))


@contextmanager
def running(name: str, model: str, environment: dict[str, str] | None = None) -> Iterator[Program]:
    """A program that has made its model. It is told to end, and waited for, at the end of the block."""
    module, arguments, own = MODELS[model][name]
    command = [sys.executable, "-W", "ignore", "-m", f"model_peers.{module}", model, *arguments]
    environment = os.environ | own | (environment or {})
    with subprocess.Popen(
        command, cwd=HERE, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        program = Program(name, process)
        program.said()
        yield program


def measured(model: str, names: Sequence[str], rounds: int) -> list[Program]:
    """All programs in turn, after some steps of each that do not count."""
    with ExitStack() as stack:
        programs = [stack.enter_context(running(name, model)) for name in names]
        for program in programs:
            shortest = min(program.train(1) for _ in range(WARM))
            program.steps = max(1, round(TURN_SECONDS / shortest))
        begun = [program.processor_seconds() for program in programs]
        for turn in range(rounds):
            for which in range(len(programs)):
                program = programs[(turn + which) % len(programs)]
                program.seconds.append(program.train(program.steps))
        for program, before in zip(programs, begun, strict=True):
            program.processor = (program.processor_seconds() - before) / (rounds * program.steps)
            program.megabytes = sum(each.memory_full_info().pss for each in program.processes()) / 1e6
    check(model, programs)
    return programs


def check(model: str, programs: Sequence[Program]) -> None:
    """Raise AssertionError unless the first losses are those of one process."""
    alone = next((program for program in programs if program.name in ALONE), None)
    for program in programs:
        assert all(map(math.isfinite, program.losses)), f"{model}, {program.name}: losses {program.losses}"
        if alone is not None and (model, program.name) not in RANDOM:
            for ours, theirs in zip(program.losses[:WARM], alone.losses[:WARM], strict=True):
                assert math.isclose(ours, theirs, rel_tol=LIMIT_RATIO), (
                    f"{model}, {program.name}: the loss is {ours}, not {theirs}"
                )


def table(model: str, programs: Sequence[Program]) -> str:
    """For people. ``/ ours`` is how many times as much as the first program each needed."""
    ours = programs[0]
    lines = [f"{model:<24}{'median':>10}{'spread':>21}{'/ ours':>8}{'processor':>11}{'memory':>10}{'/ ours':>8}"]
    for program in programs:
        spread = f"{report.shown(min(program.seconds))} … {report.shown(max(program.seconds))}"
        lines.append(
            f"  {program.name:<22}{report.shown(statistics.median(program.seconds)):>10}{spread:>21}"
            f"{program.ratio(ours):>8.2f}{report.shown(program.processor):>11}"
            f"{program.megabytes:>7.0f} MB{program.ratio(ours, 'memory'):>8.2f}"
        )
    return "\n".join(lines)


def verdicts(model: str, programs: Sequence[Program]) -> list[dict[str, Any]]:
    """Of each goal of the model: what the service reached in its faster way."""
    known = {program.name: program for program in programs}
    ways = [program for program in programs if program.name.startswith(report.OURS)]
    found = []
    for goal in (goal for goal in GOALS if goal.work == model):
        ratio = None
        if ways and (other := known.get(goal.other)):
            least = min(way.ratio(other, goal.what) for way in ways)
            ratio = goal.ratio(least, 1.0)
        found.append(goal.verdict(ratio))
    return found


def parts_of(model: str) -> str:
    """Where the time of a step in the service goes."""
    with tempfile.TemporaryDirectory() as directory:
        timeline = Path(directory, "timeline.json")
        with running(report.OURS, model, {"CS_TIMELINE": str(timeline)}) as program:
            for steps in (WARM, PARTS_STEPS):
                program.train(steps)
        return "\n".join(parts.lines(model, parts.left_in(timeline), is_ahead=False, steps=PARTS_STEPS))


def figures(model: str, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Seconds of every round by (model, program), for `bench.py`."""
    return {(model, program.name): program.seconds for program in measured(model, list(MODELS[model]), rounds)}


def versions() -> dict[str, str]:
    """Those of the frameworks."""
    return {name: version(name) for name in ("torch", "jax")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--programs", nargs="+", help=f"only these of: {' '.join({**TORCH, **JAX})}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="small models, to see that all programs run")
    parser.add_argument("--parts", action="store_true", help="print the parts of a step though all goals are met")
    parser.add_argument("--results", type=Path, default=HERE, help="the directory of models.json and models.svg")
    options = parser.parse_args()
    if options.small:
        os.environ["BENCHMARK_SMALL_MODELS"] = "1"
    machine, found, goals = report.machine(), [], []
    machine["versions"] |= versions()
    seconds: dict[tuple[str, str], list[float]] = {}
    for model in options.models:
        programs = measured(
            model, [n for n in MODELS[model] if n in (options.programs or MODELS[model])], options.rounds
        )
        goals += (mine := verdicts(model, programs))
        print(table(model, programs), flush=True)
        if mine:
            print(f"\n{report.goals_table(mine)}", flush=True)
        if options.parts or any(goal["is_met"] is False for goal in mine):
            print(f"\n{parts_of(model)}")
        print(flush=True)
        seconds |= {(model, program.name): program.seconds for program in programs}
        found += [{"megabytes": each.megabytes, "processor_seconds": each.processor} for each in programs]
    rows = report.rows_of(seconds)
    content = {
        "machine": machine,
        "rows": [vars(row) | more for row, more in zip(rows, found, strict=True)],
        "goals": goals,
    }
    (options.results / "models.json").write_text(json.dumps(content, indent=1) + "\n")
    (options.results / "models.svg").write_text(report.drawing(rows))
    print(f"written to {options.results}/models.json and models.svg")


if __name__ == "__main__":
    main()
