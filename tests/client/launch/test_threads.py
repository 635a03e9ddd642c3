"""The service in threads: failed starts, threads that end unasked, and the end, told as for processes."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import pytest
from tests.harness.timing import unit

import central_storage as cs
from central_storage import errors
from central_storage.launch import threads
from central_storage.launch.supervisor.connections import Peer
from central_storage.launch.supervisor.lifecycle import Service
from cs_proto.messages import Ready
from cs_server.compute import kernels
from cs_worker.loop import Loop
from cs_worker.worker_thread import ThreadedWorker


def fail(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("a defect of ours")


def start(replicas: int = 2) -> cs.CentralStorageStrategy:
    return cs.CentralStorageStrategy([f"cpu:{r}" for r in range(replicas)], in_process=True)


def test_a_thread_that_fails_at_its_start_is_a_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadedWorker, "run", fail)
    with pytest.raises(
        errors.LaunchError, match=r"(?s)worker w[01] \(a thread of pid .*RuntimeError: a defect of ours"
    ):
        start()


def test_a_start_that_takes_too_long_names_who_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    role, note_ready = Service._HANDLERS[Ready]

    def is_the_last_in_time(service: Service, peer: Peer, ready: Ready) -> None:
        note_ready(service, peer, ready)
        service._start_deadline()

    monkeypatch.setitem(Service._HANDLERS, Ready, (role, is_the_last_in_time))  # the server alone gets ready
    ends = threading.Event()
    monkeypatch.setattr(ThreadedWorker, "run", lambda self: ends.wait())
    terminate = ThreadedWorker.terminate

    def end(worker: ThreadedWorker) -> None:
        terminate(worker)
        ends.set()

    monkeypatch.setattr(ThreadedWorker, "terminate", end)
    with pytest.raises(errors.LaunchError, match=rf"not ready within {unit(60):g} s: worker w0 \(a thread of pid"):
        cs.CentralStorageStrategy(["cpu:0"], in_process=True, start_timeout=unit(60))


def test_what_keeps_the_kernels_from_loading_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "load", fail)
    with pytest.raises(RuntimeError, match="a defect of ours"):
        start()


def test_a_worker_that_ends_in_a_run_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with start() as strategy:
        monkeypatch.setattr(Loop, "_carry_out", fail)
        with pytest.raises(errors.ReplicaLostError, match=r"(?s)ended by RuntimeError: a defect of ours.*in fail"):
            strategy.run(lambda: None)


def test_stop_says_it_once() -> None:
    service = threads.start(["cpu:0"], "cpu:0")
    assert service.hanging == []
    service.stop()
    service.stop()
    assert service.socket.fileno() < 0
