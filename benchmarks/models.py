"""Whole models in the service, beside what a user would take instead, measured in the same run.

    make bench-models                                     all models, about ten minutes
    python benchmarks/models.py --models dlrm --rounds 9

All programs are started and stay alive; they train in turns of a second or so, in an order that rotates, so that
whatever else the machine does hits all of them. The figures are medians over the rounds. Memory is the proportional
share (PSS) of all processes of a program: what several of them map counts once. The losses of all programs must agree
with those of torch alone, but those of Hogwild and of the ConvNet, in which random numbers differ, must only be finite.
Carry ratios to other machines, never milliseconds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import environments
import psutil

HERE = Path(__file__).resolve().parent
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
TURN_SECONDS, WARM = 1.0, 4  # steps
LIMIT_RATIO = 1e-3  # by which a loss may differ from that of torch alone

#: A program: its module, its further arguments, and what it finds in its environment.
PROGRAMS = {
    "central-storage": ("central_storage_itself", [], {}),
    "central-storage ahead": ("central_storage_itself", ["ahead"], {}),
    "ddp-gloo": ("ddp_gloo", [], ONE_THREAD),
    "torch-alone": ("torch_alone", [], {}),
    "hogwild": ("hogwild", [], ONE_THREAD),
}

#: (model, what, program it is compared with, least or most, bound): what the service is meant to reach.
GOALS = (
    ("dlrm", "seconds", "ddp-gloo", "most", 1 / 3),
    ("dlrm", "seconds", "torch-alone", "most", 1 / 1.2),
    ("dlrm", "memory", "ddp-gloo", "most", 0.6),
    ("gpt", "seconds", "ddp-gloo", "most", 0.92),
    ("convnet", "seconds", "ddp-gloo", "most", 1.0),
)


@dataclass
class Program:
    """A running program, and what it has said."""

    name: str
    process: subprocess.Popen[str]
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    steps: int = 1
    memory: float = 0.0

    def train(self, steps: int) -> float:
        """Seconds of a step. Raises RuntimeError if the program has ended."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        said = self.said()
        self.losses.append(said["loss"])
        return said["seconds"]

    def said(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended with status {self.process.wait()}")
        return json.loads(line)

    def share(self) -> float:
        """Megabytes of all its processes."""
        root = psutil.Process(self.process.pid)
        return sum(each.memory_full_info().pss for each in [root, *root.children(recursive=True)]) / 1e6

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def started(name: str, model: str) -> Program:
    module, arguments, environment = PROGRAMS[name]
    command = [sys.executable, "-m", f"model_peers.{module}", model, *arguments]
    process = subprocess.Popen(
        command, cwd=HERE, env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    program = Program(name, process)
    program.said()
    return program


def measured(model: str, names: list[str], rounds: int) -> list[Program]:
    """All programs in turn, after some steps of each that do not count."""
    programs: list[Program] = []
    try:
        for name in names:
            programs.append(started(name, model))
        for program in programs:
            for _ in range(WARM):
                program.train(1)
            program.steps = max(1, round(TURN_SECONDS / program.train(1)))
        for turn in range(rounds):
            for which in range(len(programs)):
                program = programs[(turn + which) % len(programs)]
                program.seconds.append(program.train(program.steps))
        for program in programs:
            program.memory = program.share()
    finally:
        for program in programs:
            program.close()
    return programs


def check(model: str, programs: list[Program]) -> None:
    """Raise AssertionError unless the first losses agree with those of torch alone."""
    alone = next((program for program in programs if program.name == "torch-alone"), None)
    for program in programs:
        assert all(map(math.isfinite, program.losses)), f"{program.name}: losses {program.losses}"
        if alone is not None and program.name != "hogwild" and model != "convnet":
            for ours, theirs in zip(program.losses[: WARM + 1], alone.losses[: WARM + 1], strict=True):
                assert math.isclose(ours, theirs, rel_tol=LIMIT_RATIO), f"{program.name}: {ours} instead of {theirs}"


def table(model: str, programs: list[Program]) -> str:
    """The figures of a model, for people, with ratios to the service."""
    ours = programs[0]
    lines = [f"{model:<24}{'ms a step':>12}{'of ours':>10}{'MB':>10}{'of ours':>10}"]
    for program in programs:
        ratio = statistics.median(a / b for a, b in zip(program.seconds, ours.seconds, strict=True))
        lines.append(
            f"  {program.name:<22}{statistics.median(program.seconds) * 1e3:>12.2f}{ratio:>10.2f}"
            f"{program.memory:>10.0f}{program.memory / ours.memory:>10.2f}"
        )
    return "\n".join(lines)


def verdicts(model: str, programs: list[Program]) -> list[str]:
    """Each goal of the model, the ratio that was reached, and whether that is enough."""
    known = {program.name: program for program in programs}
    services = [program for program in programs if program.name.startswith("central")]
    if not services:
        return []
    best = min(services, key=lambda program: statistics.median(program.seconds))
    found = []
    for of, what, other, _, bound in GOALS:
        if of == model and other in known:
            if what == "memory":
                ratio = best.memory / known[other].memory
            else:
                ratio = statistics.median(a / b for a, b in zip(best.seconds, known[other].seconds, strict=True))
            word = "reached" if ratio <= bound else "missed"
            found.append(f"  {what} of {best.name} / {other}: {ratio:.2f}, at most {bound:.2f}: {word}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["dlrm", "gpt", "convnet"])
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    for model in options.models:
        programs = measured(model, options.programs, options.rounds)
        print("\n".join([table(model, programs), *verdicts(model, programs)]), flush=True)
        check(model, programs)


if __name__ == "__main__":
    main()
