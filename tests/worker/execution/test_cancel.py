"""Ctrl-C in the client reaches the user's code of that run, at any instant, and nothing else."""

from __future__ import annotations

import random
import signal
import time
from typing import Any

import numpy as np
import pytest
from tests.worker.execution.test_merge_controller import meet, merge
from tests.worker.stand_in import Sent, Service

import central_storage as cs
from cs_proto import messages
from cs_proto.arrays import array_of


def interrupted(service: Service, replica: int = 0) -> messages.Return:
    """The Return of an interrupted run."""
    returned = service.returned(replica)
    assert returned.error is not None
    assert returned.error.exception == "KeyboardInterrupt", returned.error
    return returned


def goes_on(service: Service) -> None:
    """The next run works, and nothing of the Ctrl-C is left."""
    service.run(lambda: sum(range(10_000)))
    for replica in range(service.replicas):
        assert service.result(replica) == sum(range(10_000))


def spin(text: str) -> None:
    print(text)
    while True:
        pass


def sleep(text: str) -> None:
    print(text)
    time.sleep(1000)


@pytest.mark.parametrize("how", [spin, sleep])
def test_busy_user_code(alone: Service, how: Any) -> None:
    run = alone.run(how, f"busy in {how.__name__}")
    alone.wait_for_line(0, f"busy in {how.__name__}")
    alone.interrupt(0, run)
    interrupted(alone)
    goes_on(alone)


def test_a_wait_needs_no_signal(pair: Service) -> None:
    run = pair.run(lambda: cs.get_replica_context().all_reduce("SUM", np.ones(1)))
    for replica in range(2):
        pair.asked(replica)
        pair.tell(replica, messages.Cancel(run))
        assert interrupted(pair, replica).count == 1
    goes_on(pair)


def test_user_code_may_clean_up(alone: Service) -> None:
    def step() -> None:
        try:
            spin("will clean up")
        finally:
            print("cleaned up after it")

    run = alone.run(step)
    alone.wait_for_line(0, "will clean up")
    alone.interrupt(0, run)
    interrupted(alone)
    assert "cleaned up after it" in alone.log(0)
    goes_on(alone)


def test_user_code_that_goes_on_gets_no_further(pair: Service) -> None:
    v: Any = Sent("variable", pair.add_variable(np.float32(0)))

    def step() -> None:
        try:
            spin("goes on")
        except KeyboardInterrupt:
            v.assign_add(1.0)

    run = pair.run(step)
    for replica in range(2):
        pair.wait_for_line(replica, "goes on")
        pair.interrupt(replica, run)
        pair.asked(replica)  # it may ask; an answer does not come
        interrupted(pair, replica)
    goes_on(pair)


def test_a_stray_signal_is_nothing(alone: Service) -> None:
    def step() -> str:
        print("takes its time")
        deadline = time.monotonic() + 0.05
        while time.monotonic() < deadline:
            pass
        return "done"

    alone.run(step)
    alone.wait_for_line(0, "takes its time")
    alone.processes[0].send_signal(signal.SIGINT)
    assert alone.result() == "done"
    goes_on(alone)


def test_cancel_of_a_run_that_is_over(alone: Service) -> None:
    run = alone.run(lambda: 1)
    assert alone.result() == 1
    alone.interrupt(0, run)
    goes_on(alone)


def test_cancel_in_the_merge_function(pair: Service) -> None:
    def step() -> None:
        merge(lambda strategy: spin("merging"))

    run = pair.run(step)
    meet(pair, run)
    pair.wait_for_line(0, "merging")
    for replica in range(2):
        pair.interrupt(replica, run)
    _, returned = pair.from_server_socket(messages.MergeCallReturn, 0)
    assert returned.error is not None
    assert returned.error.exception == "KeyboardInterrupt"
    for replica in range(2):
        interrupted(pair, replica)
    goes_on(pair)


def test_cancel_in_a_nested_run(pair: Service) -> None:
    def step() -> None:
        merge(lambda strategy: strategy.run(spin, ("nested",)))

    run = pair.run(step)
    meet(pair, run)
    for replica in range(2):
        pair.wait_for_line(replica, "nested")
    for replica in range(2):
        pair.interrupt(replica, run)
    for replica in (1, 0):
        assert interrupted(pair, replica).run == (*run, 0, 0)
    pair.from_server_socket(messages.MergeCallReturn, 0)
    for replica in range(2):
        assert interrupted(pair, replica).run == run
    goes_on(pair)


@pytest.mark.long
def test_at_random_instants(pair: Service) -> None:
    """Whatever the worker is doing: the run ends with KeyboardInterrupt or its result, and the next one is whole."""
    v: Any = Sent("variable", pair.add_variable(np.zeros(8, np.float32)))

    def step(n: int) -> int:
        context = cs.get_replica_context()
        total = 0
        for i in range(n):
            total += int(np.asarray(v).sum()) + i
            context.all_reduce("SUM", np.ones(2))
        return total

    instants = random.Random(5)
    ended = {"KeyboardInterrupt": 0, "result": 0}
    for _ in range(60):
        run = pair.run(step, 5)
        answers = instants.randrange(11)
        spins = instants.randrange(400)
        pending = {0: 0, 1: 0}
        returned: dict[int, messages.Return] = {}
        cancelled = False
        while len(returned) < 2:
            if answers == 0 and not cancelled:
                cancelled = True
                for _ in range(spins):
                    pass
                for replica in range(2):
                    pair.interrupt(replica, run)
            sender, record = pair.next_from_worker()
            if isinstance(record, messages.Return):
                returned[sender] = record
            else:
                assert isinstance(record, messages.Ask)
                pending[sender] += 1
                if not cancelled or pending[sender] < 3:
                    pair.answer(sender, messages.Reduced(run, record.point.k, (array_of(np.ones(2)),)))
                answers -= 1
        for each in returned.values():
            assert each.run == run
            if each.error is None:
                ended["result"] += 1
            else:
                assert each.error.exception == "KeyboardInterrupt", each.error
                ended["KeyboardInterrupt"] += 1
        goes_on(pair)
    assert ended["KeyboardInterrupt"] > 30
    assert "ignored" not in pair.log(0)
