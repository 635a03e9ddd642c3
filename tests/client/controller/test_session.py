"""What the script hears of a service that is starting."""

from __future__ import annotations

import socket
import threading

import pytest

from central_storage.controller import session
from central_storage.controller.session import wait_until_serving
from cs_proto.codec import PACKET_NBYTES, decode, encode
from cs_proto.errors import LaunchError
from cs_proto.messages import ServiceProcess, ServiceReport, ShowService
from cs_runtime.transport.supervisor_link import SupervisorLink


def process(rank: int, pid: int, state: str = "starting") -> ServiceProcess:
    return ServiceProcess("worker", rank, 1, pid, "elsewhere", state, 0, "")


@pytest.mark.parametrize(
    ("processes", "said"),
    [
        (
            [process(0, 7, "ready"), process(1, 0)],
            ", and waits for worker 1: start what is missing with cs-launch --join;",
        ),
        ([process(0, 7)], ", and waits for worker 0; raise start_timeout"),
        ([process(rank, 0) for rank in range(10)], "worker 7 and 2 more: start what is missing"),
        ([], "within 0 s; raise start_timeout"),
    ],
)
def test_a_service_that_is_not_up_in_time_says_for_whom_it_waits(
    processes: list[ServiceProcess], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asked = []

    def answer() -> None:
        while packet := theirs.recv(PACKET_NBYTES):
            asked.append(record := decode([packet]))
            if isinstance(record, ShowService):
                report = ServiceReport("starting", 1.0, "ipc", tuple(processes), (), (), 0, 3)
                theirs.sendall(b"".join(encode(report)))

    supervisor = threading.Thread(target=answer)
    supervisor.start()
    link = SupervisorLink(ours, "controller")
    try:
        monkeypatch.setattr(session, "_SAY_SO", 0.0)
        monkeypatch.setattr(session, "_REPORTS_WITHIN", 30.0)
        with pytest.raises(LaunchError) as caught:
            wait_until_serving(link, 0.0)
    finally:
        link.close()
        supervisor.join()
        theirs.close()
    assert said in str(caught.value)
    assert any(isinstance(record, ShowService) for record in asked)
