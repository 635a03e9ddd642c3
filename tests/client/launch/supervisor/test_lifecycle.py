"""The supervisor: readiness, memory over its socket, deaths, stopping; driven in the test's own thread."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import struct
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.client.launch.standins import LIMIT, Client, World, packet, standin_command, standin_environment, wait_gone
from tests.harness.timing import unit

from central_storage.core.recovery_options import Recovery
from central_storage.launch.memory import Memfd
from central_storage.launch.plan import Command
from central_storage.launch.supervisor import reception
from central_storage.launch.supervisor.lifecycle import Service
from central_storage.launch.supervisor.mailboxes import transport_of
from central_storage.launch.supervisor.restarts import Restarts
from cs_proto.codec import decode
from cs_proto.messages import (
    PROTOCOL,
    ClientGone,
    DeviceChoice,
    Died,
    Introduce,
    Kill,
    LogLines,
    MakeMailbox,
    MakeSegment,
    OpenSegment,
    Output,
    Ready,
    Segment,
    SegmentRefused,
    ServiceReport,
    Serving,
    ShowLog,
    ShowService,
    ShowStacks,
    Shutdown,
    StartFailed,
)
from cs_runtime import logs, open_files

NONE = Recovery(max_restarts=0)
MAKE = packet(MakeSegment("parameters/float32", 1 << 20, "w0"))
WRITE = f"""
link.send(bytes.fromhex("{MAKE.hex()}"))
descriptor = socket.recv_fds(link, 1 << 17, 1)[1][0]
memory = mmap.mmap(descriptor, 1 << 20)
memory[:5] = b"whole"
"""


@pytest.fixture(autouse=True)
def every_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    """No complaint is left out because tests that follow each other make more than ten in a second."""
    monkeypatch.setattr(logs, "_OF_A_PEER", 1000)
    monkeypatch.setattr(logs, "_OF_ALL", 1000)


def ask(client: Client, request: MakeSegment | OpenSegment) -> Segment | SegmentRefused:
    client.send(request)
    answer = client.receive()
    assert isinstance(answer, (Segment, SegmentRefused))
    return answer


def failed(client: Client) -> str:
    answer = client.receive()
    assert isinstance(answer, StartFailed)
    assert answer.error.exception == "cs.LaunchError"
    return answer.error.message


# --- readiness ------------------------------------------------------------------------------------------------------


def test_clients_are_told_once_everybody_is_ready_and_later_ones_at_once(world: World) -> None:
    world.start(workers=2)
    serving = Serving(world.directory.path, transport_of(Memfd(), mailboxes=True))
    assert world.client().receive() == serving
    assert world.client("observer").receive() == serving
    assert world.service.first_failure is None


def test_every_line_that_the_supervisor_says_has_its_name_and_steers_nothing(world: World) -> None:
    world.start()
    world.service.say("the run\nobservers on \x1b[2Jtcp")
    assert world.sink.text.endswith("[supervisor] the run\n[supervisor] observers on \\x1b[2Jtcp\n")


def test_nobody_is_told_before_the_last_is_ready(world: World, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "door")
    world.start(w0=f"print('at the door'); open({str(tmp_path / 'door')!r}).read()")
    client = world.client()
    world.until(lambda: "[w0] at the door" in world.sink.text and world.service._children[0].ready_since)
    assert isinstance(decode([client.link.recv(1 << 10)]), Introduce)
    with pytest.raises(BlockingIOError):
        client.link.recv(1)
    (tmp_path / "door").write_text("open")
    assert isinstance(client.receive(), Serving)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("sys.exit(3)", "exit code 3"),
        ("sys.exit(0)", "exit code 0"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    ],
)
def test_a_death_before_readiness_is_a_failed_start_with_its_last_lines(world: World, code: str, cause: str) -> None:
    world.start(workers=2, w1=f"print(*range(30), 'the reason', sep='\\n'); {code}")
    client = world.client()
    message = failed(client)
    pid = world.pids()["w1"]
    assert message.startswith(
        f"the service did not start: worker w1 (pid {pid}) ended by {cause} before the service was up\n"
        f"last lines of worker w1 (pid {pid}):\n11\n12\n"
    )
    assert message.endswith("29\nthe reason")
    assert failed(world.client()) == message  # a client that comes late
    world.until(lambda: not world.service.living_pids)
    assert (world.service.first_failure.role, world.service.first_failure.rank) == ("worker", 1)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV: it wrote to what it may only read"),
        ("os.kill(os.getpid(), signal.SIGBUS)", "SIGBUS"),
        ("sys.exit(3)", "exit code 3"),
    ],
)
def test_what_a_process_says_of_the_signal_that_ends_it_is_the_cause(world: World, code: str, cause: str) -> None:
    world.start(w0=f"print('SIGSEGV: it wrote to what it may only read'); sys.stdout.flush(); {code}")
    assert f"ended by {cause} before the service was up" in failed(world.client())
    assert world.service.first_failure.cause == cause


def test_the_start_deadline_names_who_is_not_ready(world: World) -> None:
    world.start(workers=2, start_timeout=unit(0.3), w1="print('loading'); link.recv(1)")
    message = failed(world.client())
    assert f"not ready within {unit(0.3):g} s" in message
    late = re.findall(r"the server|worker w\d", message.partition("\n")[0])
    assert late[-1] == "worker w1"


def test_a_program_that_is_not_there_is_a_failed_start(world: World) -> None:
    good = standin_command("server", 0, world.directory.path, standin_environment())
    world.start_commands([good, Command("worker", 0, ("/no/such/python",), {})])
    message = failed(world.client())
    assert message == "the service did not start: w0 could not be started (/no/such/python: No such file or directory)"


# --- who speaks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["server", "worker"])
def test_a_process_that_was_not_started_here_is_no_server_or_worker(
    world: World, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.start()
    assert world.client(role).receive() is None
    assert f"process {os.getpid()} says it is {role} 0" in caplog.text
    assert isinstance(world.client().receive(), Serving)


def test_a_record_that_cannot_be_acted_on_is_dropped_and_nothing_else(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start()
    client = world.client()
    assert isinstance(client.receive(), Serving)
    with monkeypatch.context() as patched:
        patched.setattr(world.service, "_mailroom", None)
        client.send(MakeMailbox("server"))
        world.until(lambda: "could not be acted on" in caplog.text)
    assert "dropped a MakeMailbox of controller" in caplog.text
    assert "AttributeError" in caplog.text
    assert isinstance(ask(client, OpenSegment("nowhere")), SegmentRefused)


def test_nonsense_is_dropped_or_ends_that_connection_and_nothing_else(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.start()
    honest = world.client()
    assert isinstance(honest.receive(), Serving)
    stranger = world.client("")
    stranger.send(OpenSegment("control"))
    assert stranger.receive() is None
    twice = world.client()
    twice.send(Introduce(PROTOCOL, "controller", 0, 1, 1))
    assert [type(twice.receive()), twice.receive()] == [Serving, None]
    honest.link.send(b"\xc1")
    honest.link.send(b"x" * (1 << 17) + b"x")
    honest.send(Ready())
    honest.send(Output("stdout", "x"))
    honest.send(Shutdown("I am not the owner"))
    assert isinstance(ask(honest, OpenSegment("../x")), SegmentRefused)
    for words in ("before Introduce", "introduced itself twice", "not one msgpack value", "more than 131072 bytes"):
        assert words in caplog.text
    for words in ("dropped a Ready of controller", "dropped a Output", "dropped a Shutdown"):
        assert words in caplog.text
    assert len(world.service.living_pids) == 2


def test_a_process_that_does_not_introduce_itself_is_disconnected(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "_INTRODUCTION", 0.0)
    world.start()
    assert world.client("").receive() is None
    assert f"process {os.getpid()} did not say who it is within 0 s" in caplog.text


def test_an_observer_without_a_descriptor_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.start()
    honest = world.client()
    assert isinstance(honest.receive(), Serving)
    monkeypatch.setattr(open_files, "may_have_guests", lambda: False)
    observer = world.client("observer")
    answer = observer.receive()
    assert isinstance(answer, StartFailed)
    assert answer.error.exception == "cs.DescriptorLimitError"
    assert re.search(rf"^the supervisor \(pid {os.getpid()}\) has \d+ of \d+ descriptors open", answer.error.message)
    assert observer.receive() is None
    assert isinstance(world.client().receive(), Serving)  # a script is no observer


def test_while_there_are_no_descriptors_peers_wait_and_no_timers_are_kept(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "_ACCEPT_AGAIN", 0.001)
    world.start()
    assert isinstance(world.client().receive(), Serving)
    timers = len(world.loop._timers)
    monkeypatch.setattr(open_files, "limit", lambda: 800)
    monkeypatch.setattr(open_files, "free", lambda: 99)
    client = world.client()
    world.until(lambda: caplog.text.count("only 99 of 800 descriptors are free, and 100 are needed") > 20)
    assert len(world.loop._timers) <= timers + 2  # the next try, and the client's introduction
    monkeypatch.setattr(open_files, "free", lambda: 100)
    assert isinstance(client.receive(), Serving)


# --- memory ---------------------------------------------------------------------------------------------------------


def test_segments_are_handed_out_by_role_and_outlive_the_server(world: World) -> None:
    world.start(server=WRITE)
    client = world.client()
    assert isinstance(client.receive(), Serving)
    os.kill(world.pids()["server"], signal.SIGKILL)
    assert isinstance(client.receive(), Died)
    assert ask(client, OpenSegment("parameters/float32")) == Segment("parameters/float32", 1 << 20, False)
    (descriptor,) = client.descriptors
    assert os.pread(descriptor, 5, 0) == b"whole"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(descriptor, b"torn", 0)


def test_refusals_come_back_typed(world: World) -> None:
    world.start(server=WRITE)
    client = world.client()
    assert isinstance(client.receive(), Serving)
    refused = ask(client, MakeSegment("arena/9", 4096, "controller"))
    assert refused.error.exception == "cs.ContextError"
    refused = ask(client, OpenSegment("arena/9"))
    assert refused.error.exception == "cs.InvalidArgumentError"
    assert "'arena/9'" in refused.error.message
    assert client.descriptors == []


# --- deaths ---------------------------------------------------------------------------------------------------------


def test_a_workers_death_is_told_to_all_and_the_rest_lives(world: World) -> None:
    world.start(workers=2, recovery=NONE, w1_READY="print('last words'); link.recv(1 << 17); os._exit(9)")
    first, second = world.client(), world.client("observer")
    assert isinstance(first.receive(), Serving)
    assert isinstance(second.receive(), Serving)
    pids = world.pids()
    os.kill(pids["w0"], signal.SIGKILL)
    died = Died("worker", 0, 1, pids["w0"], "SIGKILL", "")
    # The other worker gets the notice too, and ends by it, which is told as well.
    then = Died("worker", 1, 1, pids["w1"], "exit code 9", "last words")
    assert [first.receive(), first.receive()] == [second.receive(), second.receive()] == [died, then]
    assert world.service.living_pids == {pids["server"]}
    assert world.service.first_failure == died
    late = world.client()
    assert [type(late.receive()), late.receive(), late.receive()] == [Serving, died, then]
    assert f"[supervisor] worker w0 (pid {pids['w0']}) ended by SIGKILL\n" in world.sink.text
    assert world.service.has_lost


def test_the_servers_death_ends_the_workers(world: World) -> None:
    world.start(workers=2, recovery=Recovery(server_recovery=False))
    client = world.client()
    assert isinstance(client.receive(), Serving)
    pid = world.pids()["server"]
    os.kill(pid, signal.SIGKILL)
    assert client.receive() == Died("server", 0, 1, pid, "SIGKILL", "")
    world.until(lambda: not world.service.living_pids)
    assert failed(world.client()) == f"the service has ended: its server (pid {pid}) ended by SIGKILL"
    assert world.service.first_failure.role == "server"


def test_what_a_dead_worker_started_dies_too(world: World) -> None:
    sleeper = "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'], start_new_session={})"
    world.start(recovery=NONE, w0_READY=f"print('pids', *[{sleeper.format(False)}.pid, {sleeper.format(True)}.pid])")
    world.until(lambda: "pids" in world.sink.text)
    pids = [int(pid) for pid in re.search(r"pids (\d+) (\d+)", world.sink.text).groups()]
    os.kill(world.pids()["w0"], signal.SIGKILL)
    world.until(lambda: world.service.first_failure is not None)
    for pid in pids:
        wait_gone(pid)
    assert world.service.living_pids == {world.pids()["server"]}


# --- restarts -------------------------------------------------------------------------------------------------------


def kill_worker(world: World, client: Client) -> Died:
    """Worker 0 of a service that serves is killed; what the client is told."""
    assert isinstance(client.receive(), Serving)
    os.kill(world.pids()["w0"], signal.SIGKILL)
    died = client.receive()
    assert isinstance(died, Died)
    return died


def test_a_worker_that_died_is_started_again_as_the_next_incarnation(world: World) -> None:
    world.start(workers=2, w0="print('start', incarnation)", w0_READY="incarnation == 2 and link.send(worked)")
    died = kill_worker(world, world.client())
    assert (died.role, died.rank, died.incarnation, died.cause, died.log) == ("worker", 0, 1, "SIGKILL", "start 1")
    assert died.restarts
    world.until(lambda: "works in its place" in world.sink.text and world.service.first_failure is None)
    assert re.search(r"\[supervisor\] worker w0 \(pid \d+\) ended by SIGKILL; restart 1 of 3\n", world.sink.text)
    assert [child.command.incarnation for child in world.service._children] == [1, 2, 1]
    assert not world.service.has_lost
    late = world.client()
    late.send(OpenSegment("none"))
    assert [type(late.receive()), type(late.receive())] == [Serving, SegmentRefused]  # nothing is said of the death


def test_no_more_than_max_restarts_and_then_it_is_lost(world: World) -> None:
    world.start(recovery=Recovery(max_restarts=1), w0_READY="incarnation == 2 and os._exit(0)")
    client = world.client()
    deaths = [kill_worker(world, client), client.receive()]
    assert deaths[1].cause == "exit code 0"
    assert [(died.incarnation, died.restarts) for died in deaths] == [(1, True), (2, False)]
    assert "; it is not started again after 1 restart\n" in world.sink.text
    assert world.service.has_lost
    assert world.service.first_failure == deaths[0]
    late = world.client()
    assert [type(late.receive()), late.receive()] == [Serving, deaths[1]]


@pytest.mark.parametrize("role", ["server", "w0"])
def test_nothing_is_started_again_once_the_run_directory_was_removed(world: World, role: str) -> None:
    """A successor could not reach the supervisor, so each would end like the one before."""
    world.start(recovery=Recovery(max_restarts=1000))
    client = world.client()
    assert isinstance(client.receive(), Serving)
    shutil.rmtree(where := world.directory.path)
    os.kill(world.pids()[role], signal.SIGKILL)
    died = client.receive()
    assert isinstance(died, Died)
    assert (died.cause, died.restarts) == (f"SIGKILL after the run directory {where} was removed", False)
    assert (
        f" ended by {died.cause}; it is not started again, because nothing can connect to the service any more; start "
        "the service again, and keep what removes old files away from its run directory\n"
    ) in world.sink.text
    assert world.service.has_lost
    assert world.service.has_failed == (role == "server")


def test_a_run_directory_that_was_made_anew_is_another(world: World) -> None:
    world.start()
    client = world.client()
    assert isinstance(client.receive(), Serving)
    shutil.rmtree(where := Path(world.directory.path))
    where.mkdir(mode=0o700)
    (where / "supervisor").touch()
    os.kill(world.pids()["server"], signal.SIGKILL)
    died = client.receive()
    assert isinstance(died, Died)
    assert not died.restarts


def test_a_server_that_died_is_started_again_over_the_same_memory_and_all_are_told(world: World) -> None:
    world.start(workers=1, server=WRITE, w0_READY="print('heard', len(link.recv(1 << 17)), len(link.recv(1 << 17)))")
    client = world.client()
    serving = client.receive()
    os.kill(world.pids()["server"], signal.SIGKILL)
    died = client.receive()
    assert (died.role, died.restarts) == ("server", True)
    late = world.client()  # while there is no server, or already after
    assert client.receive() == late.receive() == serving
    world.until(lambda: re.search(r"\[w0\] heard \d+ \d+", world.sink.text) is not None)  # the death, and Serving
    assert isinstance(ask(client, OpenSegment("parameters/float32")), Segment)
    assert len(world.service.living_pids) == 2


def test_a_controller_that_has_gone_is_told_to_servers_until_one_has_heard_it_and_then_to_workers(
    world: World,
) -> None:
    hears = """
signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
while link.recv(1 << 17) != bytes.fromhex("{}"):
    pass
print("it has gone")
"""
    dies = "link.send(worked); left = link.recv(1 << 17); incarnation == 1 and os._exit(1); link.send(left)"
    world.start(server_READY=dies, w0_READY=hears.format(packet(ClientGone("cafe")).hex()))
    client = world.client(name="cafe")
    assert isinstance(client.receive(), Serving)
    client.link.close()
    world.until(lambda: "it has gone" in world.sink.text and "interrupted" in world.sink.text)
    assert [child.command.incarnation for child in world.service._children] == [2, 1]


def test_one_that_cannot_be_started_again_is_lost(world: World, tmp_path: Path) -> None:
    gone = tmp_path / "python"
    gone.symlink_to(os.path.realpath(sys.executable))
    environment = standin_environment(w0_READY=f"os.unlink({str(gone)!r})")
    server, w0 = (standin_command(role, 0, world.directory.path, environment) for role in ("server", "worker"))
    world.start_commands([server, replace(w0, argv=(str(gone), *w0.argv[1:]))])
    world.until(lambda: not gone.is_symlink())
    client = world.client()
    assert kill_worker(world, client).restarts
    died = client.receive()
    assert (died.incarnation, died.restarts) == (2, False)
    assert died.cause == f"a failed start ({gone}: No such file or directory)"


def test_one_that_does_not_become_ready_again_is_killed(world: World) -> None:
    world.start(
        recovery=Recovery(max_restarts=1),
        start_timeout=unit(3),
        w0="incarnation == 1 or link.recv(1)",
    )
    client = world.client()
    assert kill_worker(world, client).restarts
    died = client.receive()
    assert died.cause == f"SIGKILL by the supervisor: it was not ready within {unit(3):g} s"
    assert not died.restarts


def test_a_worker_shows_its_stacks_and_is_killed_when_the_server_says_so(world: World) -> None:
    show, kill = packet(ShowStacks(0, 1)).hex(), packet(Kill(0, 1, "it was silent")).hex()
    dumps = "import faulthandler; faulthandler.register(signal.SIGUSR1); link.send(worked)"
    go = f"open({world.directory.path + '/go'!r}).read()"
    told = f"{go}; link.send(bytes.fromhex('{show}')); {go}; link.send(bytes.fromhex('{kill}')); link.send(worked)"
    os.mkfifo(world.directory.path + "/go")
    world.start(w0_READY=dumps, server_READY=told)
    client = world.client()
    assert isinstance(client.receive(), Serving)
    world.until(lambda: world.service._children[1].has_worked)
    client.send(Kill(0, 1, "I may not"))
    go = Path(world.directory.path, "go")
    go.write_text("shows")
    world.until(lambda: "most recent call first" in world.sink.text)
    go.write_text("dies")
    died = client.receive()
    assert (died.cause, died.restarts) == ("SIGKILL by the supervisor: it was silent", True)
    assert died.log.count("most recent call first") == 2
    world.until(lambda: "works in its place" in world.sink.text)
    assert world.service.first_failure == died  # nothing in its place has worked yet


def test_the_pauses_before_restarts() -> None:
    restarts = Restarts(100)
    assert [restarts.next("w0", has_worked=True) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert [restarts.next("w0", has_worked=False) for _ in range(8)] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert [restarts.next("w1", has_worked=False) for _ in range(2)] == [0.0, 1.0]  # each process has its own
    assert [restarts.next("w0", has_worked=worked) for worked in (True, False)] == [0.0, 1.0]
    assert restarts.count == 15
    assert Restarts(0).next("w0", has_worked=True) is None


# --- stopping -------------------------------------------------------------------------------------------------------


def test_stopping_asks_first_and_kills_who_does_not_hear(world: World) -> None:
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    sleeper = "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'], start_new_session=True)"
    polite = "signal.signal(signal.SIGTERM, lambda *_: (print('goodbye'), sys.exit(0)))"
    world.start(workers=2, w0=f"{ignore}; print('left', {sleeper}.pid)", w1=polite)
    assert isinstance(world.client().receive(), Serving)
    left = int(re.search(r"left (\d+)", world.sink.text)[1])
    begun = time.monotonic()
    world.service.stop(LIMIT)
    world.until(lambda: world.service.living_pids == {world.pids()["w0"]})
    world.service.stop(0.0)
    world.until(lambda: world.service.stopped)
    world.service.close()
    assert time.monotonic() - begun < unit(5)
    wait_gone(left, unit(1))
    assert {c.command.label: c.cause for c in world.service._children} == {
        "server": "SIGTERM",
        "w0": "SIGKILL",
        "w1": "exit code 0",
    }
    assert "[w1] goodbye" in world.sink.text
    assert world.service.first_failure is None  # they were asked


def test_a_choice_of_devices_that_comes_after_the_end_starts_nothing(world: World) -> None:
    chosen: list[DeviceChoice | None] = []

    def choose(choice: DeviceChoice | None) -> list[Command]:
        chosen.append(choice)
        return []

    world.service = Service(world.loop, world.directory.path, [], world.sink, start_timeout=LIMIT, choose=choose)
    world.service.start()
    client = world.client(role="")
    world.service.stop()
    client.send(DeviceChoice(("cpu:0",), "cpu:0"))
    client.send(Introduce(PROTOCOL, "controller", 0, 1, os.getpid(), "c"))
    assert "was shut down" in failed(client)
    assert not chosen


def test_everything_is_said_before_the_end(world: World) -> None:
    """A process that ends at once after a flood of output: its last line arrives, whole and last."""
    world.start(w0_READY="sys.stdout.write('x' * 50 + chr(10) * 1000 + 'no line end'); sys.stdout.flush(); os._exit(1)")
    world.until(lambda: world.service.first_failure is not None)
    assert world.service.first_failure.log.endswith("no line end")
    assert world.sink.text.count("[w0] \n") == 999


def test_a_full_sink_stops_the_reading_until_there_is_room(world: World) -> None:
    world.sink.full = True
    world.start(w0_READY="for _ in range(300): print('x' * 1000)\nprint('the end')")
    pipe = next(fd for fd, (stream, _) in world.service._children[1]._pipes.items() if stream == "stdout")

    def unread() -> int:
        return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))[0]

    world.until(lambda: unread() > 60_000)  # the pipe is full, and the process waits
    assert isinstance(world.client().receive(), Serving)
    assert "the end" not in world.sink.text
    world.sink.full = False
    world.sink.on_room()
    world.until(lambda: "[w0] the end" in world.sink.text)
    assert world.sink.text.count("x") == 300_000


def test_what_a_process_beside_the_service_says_fills_no_memory(world: World) -> None:
    world.start()
    world.sink.full = True
    world.service.say("first", "gateway")
    world.service.say("of the supervisor")
    world.sink.full = False
    world.service.say("second\x1b", "gateway")
    lines = [line for line in world.sink.text.splitlines() if "gateway" in line or "of the supervisor" in line]
    assert lines == ["[supervisor] of the supervisor", "[gateway] second\\x1b"]


def test_a_line_of_debug_for_every_record(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "central_storage.launch")
    world.start(server=WRITE)
    assert isinstance(world.client().receive(), Serving)
    lines = [record.getMessage() for record in caplog.records]
    for start in (
        "stranger -> supervisor: Introduce(role='server'",
        "server -> supervisor: MakeSegment(segment='parameters/float32'",
        "supervisor -> server: Segment(",
        "w0 -> supervisor: Ready(",
        "supervisor -> controller: Serving(",
    ):
        assert any(line.startswith(start) for line in lines), lines


# --- those who look -------------------------------------------------------------------------------------------------


def report_of(client: Client) -> ServiceReport:
    client.send(ShowService())
    while not isinstance(answer := client.receive(), ServiceReport):
        assert answer is not None
    return answer


def log_of(client: Client, *, follow: bool) -> list[tuple[str, str, str]]:
    client.send(ShowLog(follow))
    lines: list[tuple[str, str, str]] = []
    while True:
        answer = client.receive()
        assert answer is not None
        if isinstance(answer, LogLines):
            lines += [(line.label, line.stream, line.text) for line in answer.lines]
            if answer.is_last:
                return lines


def test_a_service_says_how_it_is_from_its_start_on(world: World) -> None:
    world.start(workers=2, w1_READY="print('a', 'b', sep='\\n'); print('drawn', end='\\r', file=sys.stderr)")
    looker = world.client("observer")
    assert report_of(looker).state in ("starting", "serving")
    client = world.client()
    assert isinstance(client.receive(), Serving)
    world.until(lambda: "drawn" in world.sink.text)
    report = report_of(looker)
    assert (report.state, report.restarts, report.max_restarts, report.events) == ("serving", 0, 3, ())
    assert [(each.role, each.rank, each.state, each.cause) for each in report.processes] == [
        ("server", 0, "ready", ""),
        ("worker", 0, "ready", ""),
        ("worker", 1, "ready", ""),
    ]
    assert report.controllers == ((os.getpid(), ""),)
    assert log_of(looker, follow=False) == [("w1", "stdout", "a"), ("w1", "stdout", "b")]
    world.service.stop()
    assert report_of(looker).state == "stopping"


def test_a_death_and_a_restart_are_told_with_their_cause(world: World) -> None:
    world.start(workers=1)
    looker = world.client("observer")
    pid = kill_worker(world, world.client()).pid
    world.until(lambda: "works in its place" in world.sink.text)
    report = report_of(looker)
    (worker,) = [each for each in report.processes if each.role == "worker"]
    assert (worker.incarnation, worker.state, worker.restarts, worker.cause) == (2, "ready", 1, "SIGKILL")
    assert report.restarts == 1
    first, second = (text for _, text in report.events)
    assert first == f"worker w0 (pid {pid}) ended by SIGKILL; restart 1 of 3"
    assert second.endswith("works in its place")
    assert log_of(looker, follow=True) == [("supervisor", "stderr", first), ("supervisor", "stderr", second)]
    world.service.say("something new")
    answer = looker.receive()
    assert isinstance(answer, LogLines)
    assert [line.text for line in answer.lines] == ["something new"]


def test_who_follows_and_does_not_read_loses_lines_and_is_told(world: World) -> None:
    world.start(workers=1)
    looker = world.client("observer")
    log_of(looker, follow=True)
    for number in range(20_000):
        world.service._reporter.add("w0", "stdout", [f"{number} {'x' * 400}"])
    seen: list[str] = []
    while not any("lines, not read in time" in text for text in seen):
        answer = looker.receive()
        assert answer is not None
        if isinstance(answer, LogLines):
            seen += [line.text for line in answer.lines]
        world.service.say("more")
    assert sum(text.endswith("x") for text in seen) < 20_000


def test_only_the_last_lines_are_kept_and_long_ones_are_cut(world: World) -> None:
    world.start(workers=1)
    looker = world.client("observer")
    world.service._reporter.add("w0", "stdout", [f"{number} {'ö' * 600}" for number in range(1200)])
    lines = [text for _, _, text in log_of(looker, follow=False)]
    assert len(lines) == 1000
    assert (lines[0][:4], lines[-1][:5], len(lines[0])) == ("200 ", "1199 ", 500)
