"""The segments of a server, and what its supervisor says between questions and answers."""

from __future__ import annotations

import os
import resource
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.harness.stand_in_supervisor import StandInSupervisor, server_link
from tests.harness.timing import unit

from cs_proto.arrays import Array, Location, array_of
from cs_proto.errors import InvalidArgumentError, LocalProtocolError, MemoryPlanError, ShutdownError
from cs_proto.messages import PROTOCOL, Died, Introduce, OpenMailbox, Ready
from cs_runtime.shared_memory.mapping import Mapping
from cs_runtime.transport import supervisor_link
from cs_runtime.transport.readiness import is_readable
from cs_runtime.transport.supervisor_link import SupervisorLink
from cs_server.memory.segments import Segments

PAGE = 4096


@pytest.fixture
def supervisor() -> Iterator[StandInSupervisor]:
    with tempfile.TemporaryDirectory() as directory, StandInSupervisor(Path(directory)) as stand_in:
        yield stand_in


@contextmanager
def server(supervisor: StandInSupervisor, incarnation: int) -> Iterator[Segments]:
    """The segments of one server."""
    with closing(server_link(supervisor.run_directory, incarnation)) as link, closing(Segments(link)) as made:
        yield made


@pytest.fixture
def link(supervisor: StandInSupervisor) -> Iterator[SupervisorLink]:
    with closing(server_link(supervisor.run_directory, 3)) as made:
        assert supervisor.next() == Introduce(PROTOCOL, "server", 0, 3, os.getpid())
        yield made


@pytest.fixture
def connected(link: SupervisorLink) -> Iterator[Segments]:
    with closing(Segments(link)) as made:
        yield made


def died(rank: int) -> Died:
    return Died("worker", rank, 1, 4711, "SIGKILL", "last words")


def test_a_segment_is_made_once_and_kept(supervisor: StandInSupervisor, connected: Segments) -> None:
    made = connected.make("arena/0", 4 * PAGE, "w0")
    assert (made.name, made.nbytes, made.writable) == ("arena/0", 4 * PAGE, True)
    assert connected.make("arena/0", 4 * PAGE, "w0") is made
    assert connected.get("arena/0") is made
    assert supervisor.names() == {"arena/0": "w0"}


def test_a_segment_of_a_server_before_this_one(supervisor: StandInSupervisor, connected: Segments) -> None:
    connected.make("parameters/float32", 4 * PAGE, "").elements("float32")[5] = 7
    with server(supervisor, 4) as later:
        assert later.elements("parameters/float32", "float32")[5] == 7
        assert later.make("parameters/float32", 4 * PAGE, "").elements("float32")[5] == 7


def test_views(connected: Segments) -> None:
    connected.make("arena/0", 4 * PAGE, "w0").elements("int32")[2:4] = [5, 6]
    assert connected.view(Array("int32", (2,), Location("arena/0", 8))).tolist() == [5, 6]
    assert connected.view(array_of(np.array([1.5]))).tolist() == [1.5]
    elements = connected.elements("arena/0", "int32")
    assert elements.shape == (PAGE,)
    assert connected.elements("arena/0", "int32") is elements
    assert connected.elements("arena/0", "int64").shape == (PAGE // 2,)
    with pytest.raises(LocalProtocolError, match="ends at byte"):
        connected.view(Array("int32", (2,), Location("arena/0", 4 * PAGE - 4)))


def test_a_segment_is_extended_where_more_of_it_is_needed(connected: Segments) -> None:
    before = connected.make("parameters/int32", 2 * PAGE, "", PAGE)
    elements = connected.elements("parameters/int32", "int32")
    elements[3] = 7
    told: list[tuple[int, int]] = []
    connected.on_extended = lambda before, after: told.append((before.nbytes, after.nbytes))
    assert connected.make("parameters/int32", 4 * PAGE, "", 2 * PAGE) is before  # it is long enough
    after = connected.make("parameters/int32", 4 * PAGE, "", 2 * PAGE + 1)
    assert (before.nbytes, after.nbytes) == (2 * PAGE, 4 * PAGE)
    assert told == [(2 * PAGE, 4 * PAGE)]
    longer = connected.elements("parameters/int32", "int32")
    assert longer.shape == (PAGE,)
    assert longer[3] == 7
    elements[3] = 8  # a plan of an update keeps the array that it was made with
    assert longer[3] == 8
    assert connected.get("parameters/int32") is after


def test_a_segment_that_another_has_extended(supervisor: StandInSupervisor, connected: Segments) -> None:
    connected.make("arena/0", PAGE, "w0")
    with server(supervisor, 4) as other:
        other.make("arena/0", 4 * PAGE, "w0", 4 * PAGE)
        beyond = Array("int32", (2,), Location("arena/0", 3 * PAGE))
        other.view(beyond)[:] = [5, 6]
        assert connected.view(beyond).tolist() == [5, 6]
    # One that takes the place of a server that was killed before it had written down how long the segment is.
    with server(supervisor, 5) as later:
        assert later.make("arena/0", PAGE, "w0").nbytes == 4 * PAGE


def test_a_refusal_is_raised_as_what_it_says(supervisor: StandInSupervisor, connected: Segments) -> None:
    with pytest.raises(InvalidArgumentError, match="there is no segment 'arena/7'"):
        connected.get("arena/7")
    supervisor.refused.add("arena/8")
    with pytest.raises(InvalidArgumentError, match="there is no segment 'arena/8'"):
        connected.make("arena/8", PAGE, "")
    assert connected.make("arena/9", PAGE, "").nbytes == PAGE


def test_memory_that_cannot_be_mapped_is_said_with_what_to_do(
    connected: Segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(name: str, descriptor: int, nbytes: int, *, writable: bool) -> Mapping:
        os.close(descriptor)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("cs_server.memory.segments.Mapping", refuses)
    with pytest.raises(
        MemoryPlanError, match=r"cannot map segment arena/0 of 4096 bytes .*\(Operation not permitted\)"
    ):
        connected.make("arena/0", 4096, "w0")


def test_too_few_addresses_are_said_with_need_and_have(
    supervisor: StandInSupervisor, connected: Segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected.make("parameters/int32", PAGE, "").elements("int32")[0] = 7
    limit = 1 << 40
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    words = (
        rf"{1 << 55} bytes \(32.0 PiB\) .*Cannot allocate memory.*available under a limit of {limit} bytes \(1.0 TiB\)"
    )
    with pytest.raises(MemoryPlanError, match=words):
        connected.make("parameters/int32", 1 << 55, "", 2 * PAGE)
    with pytest.raises(MemoryPlanError, match=words):
        connected.make("slots/1/m/int32", 1 << 55, "")
    assert supervisor.mapping("parameters/int32").nbytes == PAGE  # another server maps all that there is
    assert "slots/1/m/int32" not in supervisor.names()
    assert connected.elements("parameters/int32", "int32")[0] == 7
    connected.discard("parameters/int32", 0, 2 * PAGE)  # as for what a refused variable has been given
    assert connected.elements("parameters/int32", "int32")[0] == 0


def test_what_comes_before_an_answer_is_kept_in_order(
    supervisor: StandInSupervisor, link: SupervisorLink, connected: Segments
) -> None:
    supervisor.before_next_answer += [died(0), died(1)]
    connected.make("arena/0", PAGE, "w0")
    assert link.waiting
    assert [link.receive_nowait(), link.receive_nowait()] == [died(0), died(1)]
    assert not link.waiting
    assert link.receive_nowait() is None
    supervisor.tell(died(2))
    assert is_readable(link.fileno(), unit(10))
    assert not link.waiting
    assert link.receive_nowait() == died(2)


def test_the_end_of_the_supervisor_is_noticed_whatever_is_done(
    supervisor: StandInSupervisor, link: SupervisorLink, connected: Segments
) -> None:
    supervisor.hang_up()
    assert is_readable(link.fileno(), unit(10))
    with pytest.raises(ShutdownError, match="the supervisor is gone"):
        link.receive_nowait()
    with pytest.raises(ShutdownError, match="the supervisor is gone"):
        connected.make("arena/0", PAGE, "w0")
    with pytest.raises(ShutdownError, match="the supervisor is gone"):
        link.send(Ready())


def test_a_supervisor_that_does_not_answer_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_link, "_ANSWER_TIMEOUT", 0.01)
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.path.join(directory, "supervisor"))
        listener.listen()
        with closing(server_link(Path(directory), 1)) as link, closing(Segments(link)) as silent:
            with pytest.raises(MemoryPlanError, match="did not hand out segment arena/0 within"):
                silent.make("arena/0", PAGE, "")
            refused, descriptors = link.mailbox(OpenMailbox(7))
            assert (refused.mailbox, descriptors) == (7, [])
            assert refused.refused.startswith("the supervisor did not hand it out within")
