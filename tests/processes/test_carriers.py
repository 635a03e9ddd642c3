"""Messages too large for a mailbox between small ones, and the same results whatever dies. ``make test-zeromq`` runs
all tests of whole services over ZeroMQ alone; what is tried in threads of one process goes over it, too."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.harness.processes import MAILBOXES, run
from tests.harness.replicas import context
from tests.harness.services import connected

import central_storage as cs
from cs_runtime.transport.rings import IS_ORDERED

pytestmark = pytest.mark.timeout(180)

DEVICES = ["cpu:0", "cpu:1"]


@pytest.fixture(scope="module")
def service() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(DEVICES, max_restarts=100) as strategy:
        yield connected(strategy)
        assert bool(strategy.statistics().posted) == bool(MAILBOXES)


def sizes(k: int) -> list[int]:
    """Of the arrays of step k, in floats: some fit into a mailbox and some do not, and none lies in an arena."""
    return [8, 7000] if k % 3 else [7000] * 6


def test_large_and_small_arrive_in_the_order_of_sending(service: cs.CentralStorageStrategy) -> None:
    def step(element: np.ndarray) -> list[np.ndarray]:
        k = int(element[0])
        sums = context().all_reduce("SUM", [np.full(size, k + 1.0) for size in sizes(k)])
        return [np.asarray(each) for each in sums]

    elements = service.experimental_distribute_dataset([np.full(2, k) for k in range(12)])
    for k, result in enumerate(service.run_steps(step, elements)):
        for arrays in service.experimental_local_results(result):
            assert [(len(each), *set(each.tolist())) for each in arrays] == [(size, 2 * k + 2.0) for size in sizes(k)]


def test_deaths_cost_nothing(service: cs.CentralStorageStrategy) -> None:
    with service.scope():
        total = cs.Variable(np.zeros(2), aggregation=cs.VariableAggregation.SUM)

    def step() -> float:
        total.assign_add(np.ones(2))
        return float(context().all_reduce("SUM", np.array(context().replica_id_in_sync_group + 1.0)))

    def losses() -> Any:
        return service.experimental_local_results(service.run(step))

    for victim in (service.statistics().pid, service.statistics().replicas[1].pid):
        assert losses() == (3.0, 3.0)
        os.kill(victim, signal.SIGKILL)
        assert losses() == (3.0, 3.0)
    assert total.numpy().tolist() == [8.0, 8.0]


SERIES = """
import numpy as np
import central_storage as cs

with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
    elements = strategy.experimental_distribute_dataset([np.full(2, k) for k in range(9)])
    for result in strategy.run_steps(lambda x: float(x[0]), elements):
        print(float(strategy.reduce("SUM", result, axis=None)))
"""


@pytest.mark.parametrize("mailboxes", ["on", "off"])
def test_returns_and_the_end_of_a_step_are_marks_where_there_are_mailboxes(mailboxes: str) -> None:
    ended = run("-c", SERIES, environment={"CS_LOG": "debug", "CS_MAILBOXES": mailboxes})
    assert ended.out.split() == [str(2.0 * k) for k in range(9)]
    marks, left = (ended.err.count(f"{what} the mark of run") for what in ("received from b'':", "leave"))
    records = len(re.findall(r"worker: received from b'': StepFinished", ended.err))
    has_marks = mailboxes == "on" and IS_ORDERED
    assert 2 * (9 - 1) <= marks + records <= 2 * 9  # a worker may end before it hears of the last one
    assert bool(marks) == has_marks
    assert bool(left) == has_marks
    assert left <= 2 * (9 - 1)  # the first Return of a series is sent
