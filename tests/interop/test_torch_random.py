"""torch's random numbers in a replica: the same after a worker's death, after a resumption, and in one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.harness.timing import unit

import central_storage as cs

pytestmark = pytest.mark.timeout(unit(300))  # every process imports torch, and each new worker does again
DEVICES = ["cpu:0", "cpu:1"]


def die_once(flag: Path) -> None:
    """Kill the first worker that comes here."""
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def drawn(strategy: cs.CentralStorageStrategy, function: Callable[[], Any], times: int) -> list[list[list[float]]]:
    """What each replica returned in each of so many runs."""
    results = [strategy.experimental_local_results(strategy.run(function)) for _ in range(times)]
    return [[np.asarray(share).tolist() for share in shares] for shares in results]


def with_dropout(flag: Path | None) -> Callable[[], Any]:
    """A step in whose third run replica 1 dies, after it has told the others what it drew."""
    state = {"runs": cs.Variable(0, aggregation=cs.VariableAggregation.ONLY_FIRST_REPLICA)}

    def step() -> Any:
        context = cs.get_replica_context()
        assert context is not None
        mask = torch.nn.functional.dropout(torch.ones(64), 0.5).numpy()
        total = context.all_reduce("SUM", mask)
        if flag is not None and context.replica_id_in_sync_group == 1 and int(state["runs"]) == 2:
            die_once(flag)
        state["runs"].assign_add(1)
        return np.concatenate([mask, total, torch.randn(3).numpy()])

    return step


def importing(flag: Path | None) -> Callable[[], Any]:
    """A step that imports torch itself, in a merge function's run, too; in the third run replica 1 dies, so the worker
    in its place is the only one that has not had torch before."""
    state = {"runs": cs.Variable(0, aggregation=cs.VariableAggregation.ONLY_FIRST_REPLICA)}

    def nested() -> Any:
        import importlib

        return importlib.import_module("torch").rand(2).numpy()

    def merge(strategy: Any) -> Any:
        return strategy.experimental_local_results(strategy.run(nested))

    def step() -> Any:
        import importlib

        context = cs.get_replica_context()
        assert context is not None
        first = np.concatenate(context.merge_call(merge))
        if flag is not None and context.replica_id_in_sync_group == 1 and int(state["runs"]) == 2:
            die_once(flag)
        state["runs"].assign_add(1)
        return np.concatenate([first, importlib.import_module("torch").rand(3).numpy()])

    return step


@pytest.mark.parametrize("make", [with_dropout, importing])
def test_neither_a_death_nor_a_restart_nor_threads_change_a_number(
    tmp_path: Path, make: Callable[[Path | None], Callable[[], Any]]
) -> None:
    def train(strategy: cs.CentralStorageStrategy, flag: Path | None) -> list[list[list[float]]]:
        with strategy.scope():
            step = make(flag)
        found = drawn(strategy, step, 4)
        strategy.save(tmp_path)
        goes_on = drawn(strategy, step, 2)
        strategy.restore(tmp_path)
        assert drawn(strategy, step, 2) == goes_on
        return found + goes_on

    with cs.CentralStorageStrategy(DEVICES) as strategy:
        once = train(strategy, None)
    with cs.CentralStorageStrategy(DEVICES) as strategy:
        again = train(strategy, tmp_path / "died")
    assert (tmp_path / "died").exists()
    with cs.CentralStorageStrategy(DEVICES, in_process=True) as strategy:
        torch.manual_seed(99)
        torch.rand(1)
        in_threads = train(strategy, None)
        mine = torch.rand(1)
    torch.manual_seed(99)
    assert mine == torch.rand(2)[1]  # the script's own go on
    assert once == again == in_threads
    assert len({str(run) for run in once}) == 6  # every run draws numbers of its own
