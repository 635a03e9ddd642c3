"""What a client makes of the deaths that it hears of."""

from __future__ import annotations

from central_storage.controller.liveness import Liveness
from cs_proto.messages import Died, Worker


def test_whoever_is_being_started_again_is_named_until_it_is_there() -> None:
    deaths = Liveness()
    assert deaths.restarts_named() == ""
    deaths.of_worker(Died("worker", 1, 1, 40, "SIGSEGV", "", True), [Worker(1, 1, 40, "cpu:1", "ipc:///run/w1.1")])
    deaths.of_server(Died("server", 0, 1, 41, "SIGKILL", "", True))
    assert deaths.restarts_named() == (
        "; worker w1 (pid 40) ended by SIGSEGV and is being started again"
        "; the server (pid 41) ended by SIGKILL and is being started again"
    )
    assert not deaths.has_worker(1)
    deaths.server_serves()
    deaths.took_place(1)
    assert deaths.restarts_named() == ""
    assert deaths.has_worker(1)
