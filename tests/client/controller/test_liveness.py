"""What a client makes of the deaths that it hears of."""

from __future__ import annotations

import math

import pytest

from central_storage.controller.liveness import Liveness
from cs_proto.errors import ReplicaLostError
from cs_proto.messages import Died, Worker

WORKER = Worker(1, 1, 40, "cpu:1")


def test_whoever_is_being_started_again_is_named_until_it_is_there() -> None:
    deaths = Liveness()
    assert deaths.restarts_named() == ""
    deaths.hear(Died("worker", 1, 1, 40, "SIGSEGV", "", True), [WORKER], 0.0)
    deaths.hear(Died("server", 0, 1, 41, "SIGKILL", "", True), [], 0.0)
    assert deaths.restarts_named() == (
        "; worker w1 (pid 40) ended by SIGSEGV and is being started again"
        "; the server (pid 41) ended by SIGKILL and is being started again"
    )
    assert not deaths.has_worker(1)
    deaths.server_serves()
    deaths.took_place(WORKER)  # the one that died
    assert not deaths.has_worker(1)
    deaths.took_place(Worker(1, 2, 42, "cpu:1"))
    assert deaths.restarts_named() == ""
    assert deaths.has_worker(1)


def test_after_a_death_for_good_a_run_is_soon_given_up_and_none_begins() -> None:
    deaths = Liveness()
    deaths.refuse()
    assert deaths.deadline == math.inf
    deaths.hear(Died("worker", 1, 1, 40, "SIGKILL", "line\n"), [WORKER], 100.0)
    assert deaths.deadline == 102.5
    assert not deaths.has_worker(1)
    assert deaths.first() == "worker w1 (pid 40) had ended by SIGKILL"
    with pytest.raises(ReplicaLostError, match=r"replica 1 \(worker w1, pid 40\) ended by SIGKILL.*\n.*line"):
        deaths.refuse()


def test_a_death_that_is_heard_after_its_worker_was_replaced_is_over() -> None:
    deaths = Liveness()
    deaths.hear(Died("worker", 1, 1, 40, "SIGKILL", "", True), [Worker(1, 2, 41, "cpu:1")], 0.0)
    assert deaths.has_worker(1)
    assert deaths.last is not None
