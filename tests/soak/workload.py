"""A training that tells what it does: run as a script, alone or by ``cs-launch``, and killed by the nemesis.

Each line of its history goes to the FIFO ``history`` of the directory it is given; it goes on until there is a file
``stop``, and leaves the variables in ``final.npz``. :mod:`tests.soak.history` says what the numbers mean.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tests.soak.history import (
    MARKS,
    MOVING,
    REPLICAS,
    ROWS,
    brings_gradients_alone,
    mark_of,
    meets,
    noise,
    reads_its_own,
)

import central_storage as cs
from central_storage import errors

_READ_EVERY = 25
#: After how many seconds a client that is sabotaged asks again.
_NAIVE_PATIENCE = 0.2


class Training:
    """The variables, and one step of them."""

    def __init__(self, elements: int, own_reads: bool) -> None:
        total = cs.VariableAggregation.SUM
        self.plain = cs.Variable(np.zeros(elements), name="plain")
        self.twin = cs.Variable(np.zeros(elements, np.float32), name="twin")
        self.table = cs.Variable(np.zeros([ROWS, 8]), name="table")
        self.marks = cs.Variable(np.zeros(REPLICAS * MARKS), name="marks", aggregation=total)
        self.moving = cs.Variable(np.zeros(MOVING, np.float32), name="moving")
        self.total = cs.Variable(np.zeros(3), name="total", aggregation=total)
        self.ledger = cs.Variable(np.zeros(3), name="ledger", aggregation=total)
        self.sgd = cs.optimizers.SGD(learning_rate=1.0)
        self.adam = cs.optimizers.Adam(learning_rate=0.01)
        self.own_reads = own_reads

    def step(self, element: Any) -> tuple[float, bool, float | None, float | None]:
        """What this replica saw first, whether that was whole, what it saw of its own update, where it met others."""
        context = cs.get_replica_context()
        assert context is not None
        replica = int(context.replica_id_in_sync_group)
        k = int(np.ravel(element)[0])
        before = np.asarray(self.plain)
        seen, whole = float(before[0]), bool((before == before[0]).all())
        down = -np.full(self.plain.shape, float((k + 1) * (replica + 1)))
        ones = -np.ones(self.twin.shape, np.float32)
        if brings_gradients_alone(k):
            self.sgd.apply_gradients([(down, self.plain), (ones, self.twin)])
            self.adam.apply_gradients([(noise(k, replica), self.moving)])
            return seen, whole, None, None
        row = cs.IndexedSlices(np.full((1, 8), -(replica + 1.0)), np.array([k % ROWS]))
        self.sgd.apply_gradients([(down, self.plain), (ones, self.twin), (row, self.table)])
        own = float(np.asarray(self.plain)[-1]) if self.own_reads and reads_its_own(k) else None
        met = float(context.all_reduce("SUM", np.array(10.0 * k + replica))) if meets(k) else None
        self.marks.scatter_add(cs.IndexedSlices(np.ones(1), np.array([mark_of(k, replica)])))
        self.adam.apply_gradients([(noise(k, replica), self.moving)])
        self.total.assign_add(np.ones(3))
        return seen, whole, own, met

    def read(self) -> dict[str, Any]:
        """What the controller sees of the variables."""
        values = {name: getattr(self, name).numpy() for name in ("plain", "twin", "total", "ledger")}
        return {
            **{name: float(value[0]) for name, value in values.items()},
            "iterations": float(self.adam.iterations),
            "whole": all(bool((value == value[0]).all()) for value in values.values()),
        }

    def save(self, path: Path) -> None:
        """Leave every variable."""
        names = ("plain", "twin", "table", "marks", "moving", "total", "ledger")
        np.savez(path, **{name: getattr(self, name).numpy() for name in names})


def main() -> None:
    """Train until told to stop."""
    options = _options()
    directory: Path = options.directory
    history = os.open(directory / "history", os.O_WRONLY)

    def say(op: str, **facts: Any) -> None:
        os.write(history, f"{json.dumps({'op': op, **facts})}\n".encode())

    given = {"step_timeout": options.step_timeout} if options.step_timeout else {}
    if options.max_restarts is not None:
        given["max_restarts"] = options.max_restarts
    devices = None if "CS_ADDRESS" in os.environ else [f"cpu:{replica}" for replica in range(REPLICAS)]
    with cs.CentralStorageStrategy(devices, options.parameter_device, **given) as strategy:
        with strategy.scope():
            training = Training(options.elements, options.own_reads)
        say("address", address=strategy.address)
        k = 0
        while k < MARKS and not (directory / "stop").exists():
            try:
                for said in _answers(strategy, training, k, options.ahead, directory / "stop"):
                    seen, whole, own, met = zip(*said, strict=True)
                    say("run", k=k, seen=seen, whole=whole, own=own, met=met)
                    k += 1
            except errors.ReplicaLostError as error:
                say("lost", k=k, error=type(error).__name__, message=str(error))
                k += 1
            training.ledger.assign_add(np.ones(3))
            say("add")
            say("read", **training.read())
        training.save(directory / "final.npz")


def _run(strategy: cs.CentralStorageStrategy, training: Training, k: int) -> Any:
    return strategy.run(training.step, args=(k,))


def _naive_run(strategy: cs.CentralStorageStrategy, training: Training, k: int) -> Any:
    """What a client without numbers for its requests would do: where the answer is late, ask once more."""
    with ThreadPoolExecutor(2) as askers:
        asked = askers.submit(_run, strategy, training, k)
        try:
            return asked.result(_NAIVE_PATIENCE)
        except TimeoutError:
            return askers.submit(_run, strategy, training, k).result()


def _answers(
    strategy: cs.CentralStorageStrategy, training: Training, first: int, ahead: int, stop: Path
) -> Iterator[list[Any]]:
    """What the replicas say of some steps, from ``first`` on."""
    steps = range(first, min(first + _READ_EVERY, MARKS))
    is_naive = os.environ.get("CS_SABOTAGE") == "naive-retry"
    run = _naive_run if is_naive else _run
    if not ahead or is_naive:
        for k in steps:
            yield list(strategy.experimental_local_results(run(strategy, training, k)))
            if stop.exists():
                return
    else:
        elements = strategy.experimental_distribute_dataset([np.full(REPLICAS, k) for k in steps])
        for result in strategy.run_steps(training.step, elements, lookahead=ahead):
            yield list(strategy.experimental_local_results(result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.soak.workload", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--elements", type=int, default=1 << 16, help="of the variable plain (float64) and its twin")
    parser.add_argument("--ahead", type=int, default=0, help="lookahead of run_steps; 0: one run at a time")
    parser.add_argument("--own-reads", action="store_true", help="some steps read what they have just updated")
    parser.add_argument("--parameter-device", help="where the variables lie (default: as the service says)")
    parser.add_argument("--max-restarts", type=int)
    parser.add_argument("--step-timeout", type=float)
    return parser.parse_args()


if __name__ == "__main__":
    main()
