"""Trainings of torch models in the service, written as users write them: how long a step takes, and how many steps are
captured.

    .venv/bin/python benchmarks/trainings.py --trainings quick-start dlrm

`quick-start` is the program of docs/guide/torch.md with more rows of data: a bound on the norm of the gradient, a
scheduler, a DataLoader. `dlrm` is the recommender of `bench_models.py`. Each is trained by ``train(batch)`` and by
``train.ahead``, in two services that take turns: one with mailboxes, marks and programs, and one that sends every
message over ZeroMQ (``CS_MAILBOXES=off``). Both must compute the same losses.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain, cycle, islice, repeat
from typing import Any

import report
import torch
from model_peers.training import TRAININGS as MODELS
from torch.nn.functional import cross_entropy

import central_storage as cs
import central_storage.torch as cst

ZEROMQ = "zeromq"
CARRIERS = {report.OURS: "on", ZEROMQ: "off"}
SECONDS = 0.5  # that a trial is meant to take
WARM = 8  # steps of each way that do not count
ROWS = 4_000
#: The share of captured steps, and the time of a step divided by that over ZeroMQ: as long, and what chance adds.
LEAST_CAPTURED, MOST = 0.99, 1.05


@dataclass(frozen=True)
class Training:
    """A training in one service."""

    strategy: cs.CentralStorageStrategy
    train: Any
    batches: Iterator[Any]  # without end
    schedulers: tuple[Any, ...] = ()

    def step_by_step(self, steps: int) -> list[float]:
        """Train in a plain loop. Return the losses."""
        losses = []
        for batch in cst.batches(self.strategy, islice(self.batches, steps)):
            losses.append(float(self.train(batch)))
            for scheduler in self.schedulers:
                scheduler.step()
        return losses

    def ahead(self, steps: int) -> list[float]:
        """Train in a loop over ``train.ahead``. Return the losses."""
        batches = cst.batches(self.strategy, islice(self.batches, steps))
        return [float(loss) for loss in self.train.ahead(batches, scheduler=list(self.schedulers))]


WAYS: dict[str, Callable[[Training, int], list[float]]] = {"": Training.step_by_step, "-ahead": Training.ahead}


def quick_start(strategy: cs.CentralStorageStrategy) -> Training:
    """The program of the guide."""
    with strategy.scope():
        model = cst.centralize(torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3)))
    optimizer = cst.optim.AdamW(model.parameters(), lr=3e-4, max_norm=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(x), y)

    data = torch.utils.data.TensorDataset(torch.randn(ROWS, 20), torch.randint(0, 3, (ROWS,)))
    loader = torch.utils.data.DataLoader(data, batch_size=64)
    return Training(strategy, train, chain.from_iterable(repeat(loader)), (schedule,))


def dlrm(strategy: cs.CentralStorageStrategy) -> Training:
    """The recommender."""
    training = MODELS["dlrm"]
    with strategy.scope():
        model = cst.centralize(training.made())
    optimizers = training.optimizers(model, cst.optim)

    @cst.step(model, *optimizers)
    def train(*share: torch.Tensor) -> torch.Tensor:
        return training.loss(model, *share)

    return Training(strategy, train, cycle(training.batches()))


TRAININGS = {"quick-start": quick_start, "dlrm": dlrm}


@dataclass
class Figures:
    """What was measured of a training."""

    name: str
    #: Of a step in each round, by carrier and way.
    seconds: dict[str, list[float]] = field(default_factory=dict)
    #: The runs of the service that has everything on, and how many of them were captured.
    runs: int = 0
    captured: int = 0
    #: Why the other runs since the start of this service were not captured.
    reasons: tuple[tuple[str, int], ...] = ()

    @property
    def work(self) -> str:
        return f"training-{self.name}"

    def verdicts(self) -> list[dict[str, Any]]:
        """The goals beside what was reached."""
        captured = report.Goal(self.work, ">=", LEAST_CAPTURED, "captured steps", ours="all steps")
        found = [captured.verdict(captured.ratio(self.runs, self.captured))]
        for way in WAYS:
            goal = report.Goal(self.work, "<=", MOST, ZEROMQ + way, ours=report.OURS + way)
            pairs = zip(self.seconds[goal.ours], self.seconds[goal.other], strict=True)
            found.append(goal.verdict(statistics.median(goal.ratio(*pair) for pair in pairs)))
        return found

    def lines(self) -> list[str]:
        """For people: the reasons."""
        return [f"  {self.name}, not captured: {count}, {why}" for why, count in self.reasons]


@contextmanager
def side_by_side(name: str) -> Iterator[dict[str, Training]]:
    """The training in a service of each carrier, from the same weights and data."""
    before = os.environ.get("CS_MAILBOXES")
    with ExitStack() as stack:
        trainings = {}
        for carrier, mailboxes in CARRIERS.items():
            os.environ["CS_MAILBOXES"] = mailboxes
            torch.manual_seed(0)
            strategy = stack.enter_context(cs.CentralStorageStrategy(["cpu:0", "cpu:1"]))
            trainings[carrier] = TRAININGS[name](strategy)
        if before is None:
            del os.environ["CS_MAILBOXES"]
        else:
            os.environ["CS_MAILBOXES"] = before
        yield trainings


def measured(name: str, rounds: int) -> Figures:
    """The services take turns. Raises AssertionError if their losses differ."""
    found = Figures(name)
    with side_by_side(name) as trainings:
        steps = {}
        for way, run in WAYS.items():
            for training in trainings.values():
                run(training, WARM)
                begun = time.perf_counter()
                run(training, WARM)
                seconds = (time.perf_counter() - begun) / WARM
            steps[way] = max(WARM, round(SECONDS / seconds))
        ours = trainings[report.OURS].strategy
        before = ours.statistics()
        for turn in range(rounds):
            for way, run in WAYS.items():
                losses = {}
                for carrier in list(CARRIERS)[:: 1 if turn % 2 else -1]:
                    begun = time.perf_counter()
                    losses[carrier] = run(trainings[carrier], steps[way])
                    taken = (time.perf_counter() - begun) / steps[way]
                    found.seconds.setdefault(carrier + way, []).append(taken)
                assert losses[report.OURS] == losses[ZEROMQ], f"{name}: the losses differ: {losses}"
                assert all(map(math.isfinite, losses[report.OURS])), f"{name}: losses {losses}"
        after = ours.statistics()
        found.runs, found.captured = after.runs - before.runs, after.captured - before.captured
        found.reasons = tuple(after.uncaptured)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainings", nargs="+", choices=list(TRAININGS), default=list(TRAININGS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="one line for each training, for bench.py")
    options = parser.parse_args()
    for name in options.trainings:
        found = measured(name, options.rounds)
        if options.json:
            said = {"work": found.work, "seconds": found.seconds, "goals": found.verdicts(), "lines": found.lines()}
            print(json.dumps(said), flush=True)
            continue
        print(report.table(report.rows_of({(found.work, side): each for side, each in found.seconds.items()})))
        print("\n".join(["", report.goals_table(found.verdicts()), *found.lines()]), flush=True)


if __name__ == "__main__":
    main()
