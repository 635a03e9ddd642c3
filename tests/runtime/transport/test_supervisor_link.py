"""The connection to a supervisor that is killed, and to the next one."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.harness.introduced import introduction
from tests.harness.stand_in_supervisor import StandInSupervisor, server_link
from tests.harness.timing import unit

from cs_proto.arrays import Array, Location
from cs_proto.codec import encode
from cs_proto.errors import InvalidArgumentError, ShutdownError
from cs_proto.messages import ClientGone, Died, Introduce, Role, Segment, Serving
from cs_proto.records import Record
from cs_proto.records import replace as changed
from cs_runtime.run_file import RunFile
from cs_runtime.shared_memory import mapping
from cs_runtime.shared_memory.mapping import Mapping
from cs_runtime.shared_memory.remote_segment import RemoteSegment
from cs_runtime.transport import supervisor_link
from cs_runtime.transport.supervisor_link import SupervisorLink
from cs_server.memory.segments import Segments

RUN = RunFile("a run", 1, "cpu:0", unit(50), server=1, workers=(1,), serves=True)
SERVING = Serving("/run", "ipc")


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[SupervisorLink]:
    """A worker's connection of which the supervisor has been killed."""
    RUN.write(str(tmp_path))
    with StandInSupervisor(tmp_path) as first:
        made = SupervisorLink(supervisor_link.connect(str(tmp_path)), "worker", 0, 2, run_directory=str(tmp_path))
        assert isinstance(first.next(), Introduce)
    (tmp_path / "supervisor").unlink()
    yield made
    made.close()


def test_it_introduces_itself_to_the_next_and_keeps_its_descriptor(killed: SupervisorLink, tmp_path: Path) -> None:
    before = killed.fileno()
    with ThreadPoolExecutor(2) as pool, StandInSupervisor(tmp_path) as second:
        mended = [pool.submit(killed.mend) for _ in range(2)]  # whoever notices it first
        introduced = second.next()
        assert isinstance(introduced, Introduce)
        assert (introduced.role, introduced.incarnation) == ("worker", 2)
        second.tell(SERVING)
        for each in mended:
            each.result(unit(20))
        assert killed.fileno() == before
        assert killed.receive_nowait() == SERVING
        assert second.said.empty()  # it was introduced once


def test_a_segment_that_was_extended_is_mapped_anew(tmp_path: Path) -> None:
    with StandInSupervisor(tmp_path) as supervisor:
        ours = SupervisorLink(supervisor_link.connect(str(tmp_path)), "worker")
        server_connection = server_link(tmp_path, 1)
        server = Segments(server_connection)
        assert {supervisor.next().role for _ in range(2)} == {"worker", "server"}  # type: ignore[attr-defined]
        server.make("parameters/int32", 4096, "")
        first, second = (Array("int32", (2,), Location("parameters/int32", offset)) for offset in (0, 4096))
        view = ours.segment_of(first).view(first)
        server.make("parameters/int32", 8192, "", 8192)
        server.view(first)[:] = [1, 2]
        server.view(second)[:] = [3, 4]
        before = ours.segment_of(first)
        assert before.nbytes == 4096  # it has all that is asked for
        after = ours.segment_of(second)
        assert (after.nbytes, after.view(second).tolist()) == (8192, [3, 4])
        assert ours.segment_of(first) is ours.segment("parameters/int32") is after
        assert view.tolist() == after.view(first).tolist() == [1, 2]
        ours.close()
        server.close()
        server_connection.close()


@pytest.mark.parametrize("may_preserve", [False, True])
def test_what_a_worker_reads_is_copied_on_write_unless_a_device_reads_it_too(
    tmp_path: Path, may_preserve: bool
) -> None:
    """The driver of a GPU would copy every page of a private mapping that it locks."""
    with StandInSupervisor(tmp_path):
        ours = SupervisorLink(supervisor_link.connect(str(tmp_path)), "worker")
        ours.may_preserve = may_preserve
        found = {}
        for name in ("parameters/int32", "inputs", "arena/controller", "versions", "gradients/0/0/int32"):
            file = os.memfd_create("segment")
            os.ftruncate(file, 4096)
            mapping = ours._mapped(Segment(name, 4096, name.startswith("gradients")), [file])
            assert isinstance(mapping, Mapping)
            found[name] = mapping.copies_on_write
        private = dict.fromkeys(("parameters/int32", "inputs", "arena/controller"), may_preserve)
        assert found == private | {"versions": False, "gradients/0/0/int32": False}
        ours.close()


def test_a_segment_that_was_extended_is_carried_where_addresses_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StandInSupervisor(tmp_path) as supervisor:
        ours = SupervisorLink(supervisor_link.connect(str(tmp_path)), "worker")
        server_connection = server_link(tmp_path, 1)
        server = Segments(server_connection)
        assert {supervisor.next().role for _ in range(2)} == {"worker", "server"}  # type: ignore[attr-defined]
        server.make("parameters/int32", 4096, "").elements("int32")[:2] = [1, 2]
        first, second = (Array("int32", (2,), Location("parameters/int32", offset)) for offset in (0, 4096))
        view = ours.segment_of(first).view(first)
        server.make("parameters/int32", 8192, "", 8192)

        def refuses(name: str, descriptor: int, nbytes: int, **access: bool) -> Mapping:
            os.close(descriptor)
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(mapping, "Mapping", refuses)
        assert isinstance(ours.segment_of(second), RemoteSegment)
        assert ours.carried_because == "the service's memory cannot be mapped here (Cannot allocate memory)"
        assert view.tolist() == [1, 2]
        ours.close()
        server.close()
        server_connection.close()


def test_a_segment_that_is_elsewhere_is_remote_alone(tmp_path: Path) -> None:
    with StandInSupervisor(tmp_path):
        ours = SupervisorLink(supervisor_link.connect(str(tmp_path)), "worker")
        table = ours._mapped(Segment("parameters/sparse/int32", 4096, False, is_elsewhere=True), [])
        assert isinstance(table, RemoteSegment)
        assert ours.carried_because == ""
        file = os.memfd_create("segment")
        os.ftruncate(file, 4096)
        assert isinstance(ours._mapped(Segment("parameters/int32", 4096, False), [file]), Mapping)
        assert isinstance(ours._mapped(Segment("inputs", 4096, False), []), RemoteSegment)
        assert ours.carried_because == "the service shares no memory with this process"
        ours.close()


def test_a_question_goes_to_the_next(killed: SupervisorLink, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool, StandInSupervisor(tmp_path) as second:
        asked = pool.submit(killed.segment, "inputs")
        assert isinstance(second.next(), Introduce)
        second.tell(SERVING)
        with pytest.raises(InvalidArgumentError, match="there is no segment 'inputs'"):
            asked.result(unit(20))
        assert killed.receive_nowait() == SERVING


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (None, "the supervisor is gone, and the service with it"),
        (replace(RUN, run="another"), "has been replaced by another one"),
    ],
)
def test_there_is_nothing_to_wait_for(killed: SupervisorLink, tmp_path: Path, now: RunFile | None, reason: str) -> None:
    RunFile.remove(str(tmp_path)) if now is None else now.write(str(tmp_path))
    for use in (killed.mend, killed.receive_nowait, lambda: killed.send(SERVING), lambda: killed.segment("inputs")):
        with pytest.raises(ShutdownError, match=reason):
            use()


def test_nobody_comes_in_time(tmp_path: Path) -> None:
    replace(RUN, return_timeout=0.05).write(str(tmp_path))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = SupervisorLink(ours, "worker", run_directory=str(tmp_path))
    theirs.close()
    with pytest.raises(ShutdownError, match=f"{tmp_path} has not come back within 0.05 s after its supervisor was"):
        made.receive_nowait()
    made.close()


def test_ctrl_c_ends_the_wait_and_not_the_limit(killed: SupervisorLink) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    killed.while_waiting = interrupt
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            killed.receive_nowait()


@pytest.mark.parametrize(("role", "known"), [("server", {b"w0.1", b"w1.1"}), ("worker", {b"w1.1"})])
def test_workers_hear_no_more_of_one_that_has_died_and_the_server_tells_it_so(role: Role, known: set[bytes]) -> None:
    ours, supervisor = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    died = Died("worker", 0, 1, 7, "SIGKILL", "", True)
    with supervisor:
        link = SupervisorLink(ours, role)
        try:
            own = changed(introduction(b"w5.1"), role=role, name=b"my own name")
            for record in (own, introduction(b"w0.1"), introduction(b"w1.1"), died):
                supervisor.sendall(b"".join(encode(record)))
            assert link.await_name() == b"my own name"
            assert link.receive_nowait() == died
            assert set(link.peers) == known
            assert link.peer_named(b"w0.1") == (b"w0.1" if role == "server" else None)
            assert link.peer_named(b"my own name") is None
        finally:
            link.close()


@pytest.fixture
def supervised() -> Iterator[tuple[SupervisorLink, Callable[..., None]]]:
    """A server's connection, and what the supervisor says over it."""
    ours, supervisor = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = SupervisorLink(ours, "server")

    def tell(*said: Record) -> None:
        for record in said:
            supervisor.sendall(b"".join(encode(record)))

    tell(changed(introduction(b"c0"), name=b"here"))
    link.await_name()
    yield link, tell
    link.close()
    supervisor.close()


def test_who_has_gone_is_known_until_the_owner_hears_of_it(
    supervised: tuple[SupervisorLink, Callable[..., None]],
) -> None:
    link, tell = supervised
    clients = [str(number) for number in range(20)]
    for client in clients:
        tell(introduction(f"o{client}".encode()), ClientGone(client))
    tell(introduction(b"c77"))
    assert link.peer_named(b"c77") == b"c77"  # reads all that came before
    for client in clients:
        assert link.receive_nowait() == ClientGone(client)
        assert link.is_observer(client)
    assert link.receive_nowait() is None
    assert [client for client in clients if link.is_observer(client)] == clients[-8:]


def test_a_client_that_comes_back_stays(supervised: tuple[SupervisorLink, Callable[..., None]]) -> None:
    link, tell = supervised
    tell(introduction(b"oback"), ClientGone("back"), introduction(b"oback"))
    for number in range(20):
        tell(introduction(f"o{number}".encode()), ClientGone(str(number)))
    while link.receive_nowait() is not None:
        pass
    assert link.peer_named(b"oback") == b"oback"
