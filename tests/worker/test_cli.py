"""A worker process from start to end."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator

import pytest
from tests.harness.processes import run
from tests.harness.timing import unit
from tests.worker.stand_in import Service

from cs_proto import messages
from cs_proto.errors import InvalidArgumentError
from cs_proto.failures import error_of

pytestmark = pytest.mark.long  # each test starts a worker


@pytest.fixture
def service() -> Iterator[Service]:
    with Service(1) as service:
        yield service


def spin() -> None:
    """The user's code, busy and deaf."""
    print("spinning")
    while True:
        pass


def test_start(service: Service) -> None:
    service.open()
    (worker,) = service.workers
    assert (worker.replica, worker.incarnation, worker.device) == (0, 1, "cpu:0")
    assert worker.pid == service.processes[0].pid


def test_sigterm_ends_an_idle_worker(service: Service) -> None:
    service.open()
    service.processes[0].send_signal(signal.SIGTERM)
    assert service.processes[0].wait(unit(10)) == 0
    assert service.log(0) == ""


def test_sigterm_ends_a_worker_in_user_code(service: Service) -> None:
    service.open()

    def clean_up() -> None:
        try:
            spin()
        finally:
            print("cleaned up")

    service.run(clean_up)
    service.wait_for_line(0, "spinning")
    service.processes[0].send_signal(signal.SIGTERM)
    assert service.processes[0].wait(unit(10)) == 0
    assert service.log(0) == "spinning\ncleaned up\n"


def test_sigterm_is_not_swallowed_by_user_code(service: Service) -> None:
    service.open()

    def swallow() -> None:
        try:
            spin()
        except SystemExit:
            print("swallowed")

    service.run(swallow)
    service.wait_for_line(0, "spinning")
    service.processes[0].send_signal(signal.SIGTERM)
    assert service.processes[0].wait(unit(10)) == 0


@pytest.mark.parametrize("what", ["idle", "busy", "waiting"])
def test_the_end_of_the_supervisor_ends_the_worker(service: Service, what: str) -> None:
    service.open()
    if what == "busy":
        service.run(spin)
        service.wait_for_line(0, "spinning")
    elif what == "waiting":
        service.run(lambda: __import__("central_storage").get_replica_context().merge_call(lambda s: None))
        service.asked()
    service.lifelines[0].close()
    assert service.processes[0].wait(unit(10)) == 1


def test_sigusr1_prints_stacks(service: Service) -> None:
    service.open()
    service.run(spin)
    service.wait_for_line(0, "spinning")
    service.processes[0].send_signal(signal.SIGUSR1)
    service.wait_for_line(0, "in spin")
    assert "Current thread" in service.log(0)


def test_a_line_a_message() -> None:
    with Service(1, {"CS_LOG": "debug"}) as service:
        service.open()
        service.run(lambda: 3)
        assert service.result() == 3
        log = service.log(0)
    assert "received from b'c0000': Run(" in log
    assert "send Return(" in log


def test_the_server_refuses(service: Service) -> None:
    service.accept()
    service.from_server_socket(messages.Register)
    service.answer(0, messages.Refused(0, error_of(InvalidArgumentError("there is no replica 0"))))
    assert service.processes[0].wait(unit(10)) == 2
    assert service.log(0) == "cs-worker: the server refuses worker w0.1: there is no replica 0\n"


def test_a_gpu_without_cupy_is_refused_at_the_start() -> None:
    with Service(1, device="gpu:0") as service:
        assert service.processes[0].wait(unit(10)) == 2
        assert "gpu:0 needs CuPy: pip install" in service.log(0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--replica", "-1"], "--replica counts from 0"),
        (["--replica", "0", "--run-directory", "/nowhere"], "is not a directory"),
        (["--replica", "0"], "no service answers in"),
    ],
)
def test_a_start_that_makes_no_sense(arguments: list[str], message: str) -> None:
    with tempfile.TemporaryDirectory(prefix="w-") as directory:
        ended = run("-c", MAIN, "--run-directory", directory, *arguments)
    assert ended.code == 2
    assert message in ended.err
    assert "Traceback" not in ended.err


MAIN = "import sys; from cs_worker.cli import main; sys.exit(main())"
