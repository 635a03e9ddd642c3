"""What a service is said to do, from what supervisor, server and kernel say."""

from __future__ import annotations

import pytest
from tests.client.ctl.conftest import process

from central_storage.ctl.reading import Process, _state
from cs_proto.messages import Counters, ServiceReport
from cs_proto.messages.supervision import ServiceState

ALONE = "replica 0 (pid 5, w0.1), last seen 2 s ago; no replica has come to a merge point"
BEHIND = "replica 1 (pid 6, w1.1), last seen 2 s ago; replica 0 returned after 1 merge point"


def report(state: ServiceState = "serving") -> ServiceReport:
    return ServiceReport(state, 1.0, "ipc", (), ((4711, "c"),), (), 0, 3)


def counters(wait: str) -> Counters:
    return Counters(1, 1, 1.0, 0, 0, 0, 0, 0, 0, (), waiting=(f"run 7: waiting {wait}",))


@pytest.mark.parametrize(
    ("wait", "waiting"),
    [(f"9.9 s for {ALONE}", ()), (f"10.0 s for {ALONE}", (ALONE,)), (f"1.1 s for {BEHIND}", (BEHIND,))],
)
def test_replicas_that_all_compute_keep_nobody_waiting(wait: str, waiting: tuple[str, ...]) -> None:
    expected = ("waiting" if waiting else "running", waiting)
    assert _state(report(), counters(wait), "over", False, ()) == expected


@pytest.mark.parametrize("state", ["serving", "recovering"])
def test_a_process_that_is_started_again_is_named(state: ServiceState) -> None:
    shown: tuple[Process, ...] = (process("server", state="starting", restarts=1), process("w0", state="sleeping"))
    assert _state(report(state), None, "over", False, shown) == ("recovering", ("server to be started again",))


def test_a_supervisor_that_is_stopped_is_named() -> None:
    shown = (process("supervisor", pid=8, state="stopped"), process("w0", state="stopped"))
    assert _state(None, None, "silent", False, shown) == ("silent", ("supervisor (pid 8), which is stopped",))
    assert _state(None, None, "silent", False, ()) == ("silent", ("the supervisor to answer",))
    assert _state(None, None, "over", False, shown) == ("over", ())
