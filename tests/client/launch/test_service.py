"""A script's own service: the supervisor in the background, which ends with the script however that ends."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.client.launch.standins import LIMIT, wait_gone
from tests.harness import processes
from tests.harness.timing import unit

from central_storage.launch import service
from cs_proto.errors import LaunchError
from cs_proto.messages import Output, Serving, StartFailed
from cs_proto.records import Record
from cs_runtime.transport.readiness import is_readable
from cs_runtime.transport.supervisor_link import SupervisorLink, connect

Start = Callable[..., tuple[service.ServiceProcess, SupervisorLink]]


@pytest.fixture
def start(standins: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a service of two stand-ins, with the code given by label, and introduce this process."""
    started: list[service.ServiceProcess] = []

    def begin(**code: str) -> tuple[service.ServiceProcess, SupervisorLink]:
        for name, value in standins(**code).items():
            monkeypatch.setenv(name, value)
        process = service.start(["cpu:0", "cpu:1"], "cpu:0", LIMIT)
        started.append(process)
        return process, SupervisorLink(process.socket, "controller")

    yield begin
    for process in started:
        process.stop()


def receive(lifeline: SupervisorLink) -> Record:
    while (record := lifeline.receive_nowait()) is None:  # introductions are none
        assert is_readable(lifeline, LIMIT), "no record came"
    return record


def until(lifeline: SupervisorLink, kind: type[Record]) -> tuple[Record, str]:
    """The next record of that kind, and the lines that came before it."""
    text = ""
    while not isinstance(record := receive(lifeline), kind):
        assert isinstance(record, Output), record
        text += record.text
    return record, text


def test_a_service_comes_up_prints_and_stops(start: Start) -> None:
    process, lifeline = start(w1="print('hello'); print('from', os.getpid())", server="print('argv', *sys.argv[1:])")
    serving, text = until(lifeline, Serving)
    assert isinstance(serving, Serving)
    run_directory = Path(serving.run_directory)
    assert "[w1] hello\n" in text
    assert f"[server] argv --run-directory {run_directory} --parameter-device cpu:0 --replicas 2 --threads" in text
    pid = int(re.search(r"from (\d+)", text)[1])
    begun = time.monotonic()
    process.stop()
    process.stop()
    assert time.monotonic() - begun < unit(5)
    assert process.process.returncode == 0
    wait_gone(pid, 0)
    assert not run_directory.exists()


def test_hanging_up_is_enough(start: Start) -> None:
    process, lifeline = start()
    until(lifeline, Serving)
    lifeline.close()
    assert process.process.wait(unit(5)) == 0


def test_a_failed_start_is_said_with_its_last_lines(start: Start) -> None:
    process, lifeline = start(w0="print('no such luck'); sys.exit(4)")
    failed, text = until(lifeline, StartFailed)
    assert isinstance(failed, StartFailed)
    assert re.search(
        r"worker w0 \(pid \d+\) ended by exit code 4[^\n]*\nlast lines of.*\nno such luck$", failed.error.message
    )
    assert "[w0] no such luck\n" in text
    assert process.process.poll() is None  # it stays until its owner lets go


def test_a_supervisor_that_cannot_even_begin_says_why(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CS_LOG_DIR", str(tmp_path / "file" / "logs"))
    _, lifeline = start()
    failed, _ = until(lifeline, StartFailed)
    assert isinstance(failed, StartFailed)
    assert failed.error.exception == "cs.ConfigurationError"
    assert f"log files cannot be written to {tmp_path}/file/logs/cs-" in failed.error.message


def test_without_an_interpreter_there_is_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(LaunchError, match=r"sys\.executable is empty"):
        service.start(["cpu:0"], "cpu:0")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(LaunchError, match="'/no/such/python': No such file or directory"):
        service.start(["cpu:0"], "cpu:0")


def test_signals_that_the_script_blocks_are_not_blocked_in_its_service(start: Start) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})  # as in an actor of Ray
    try:
        process, lifeline = start(w0="print('blocked', signal.pthread_sigmask(signal.SIG_BLOCK, ()))")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    _, text = until(lifeline, Serving)
    assert "[w0] blocked set()\n" in text
    process.process.terminate()
    assert process.process.wait(unit(10)) == 0


def test_a_script_that_does_not_read_stops_nobody_and_is_told_what_it_missed(start: Start) -> None:
    count = 60_000
    process, lifeline = start(
        w0_READY=f"for n in range({count}): print('line', n, 'x' * 60)\nprint('done', flush=True)"
    )
    serving, text = until(lifeline, Serving)
    assert isinstance(serving, Serving)
    other = SupervisorLink(connect(serving.run_directory), "observer")
    assert isinstance(receive(other), Serving)  # the supervisor goes on meanwhile
    dropped = None
    # The worker ends its output while nobody reads: its log says so, since it is whole.
    log = Path(os.environ["CS_LOG_DIR"], Path(serving.run_directory).name, "w0.log")
    deadline = time.monotonic() + LIMIT
    while not (log.exists() and "done" in log.read_text()[-100:]):
        assert time.monotonic() < deadline
        select.poll().poll(10)
    while dropped is None:
        record = receive(lifeline)
        assert isinstance(record, Output)
        text += record.text
        dropped = re.search(r"\[supervisor\] dropped (\d+) lines", text)
    assert text.count("[w0] line") + text.count("[w0] done") + int(dropped[1]) == count + 1
    other.close()
    process.stop()


def test_children_die_with_a_supervisor_that_is_killed(start: Start) -> None:
    process, lifeline = start(w0="signal.signal(signal.SIGTERM, signal.SIG_IGN); print('pid', os.getpid())")
    serving, text = until(lifeline, Serving)
    assert isinstance(serving, Serving)
    process.process.kill()
    wait_gone(int(re.search(r"pid (\d+)", text)[1]), unit(5))
    assert Path(serving.run_directory).exists()
    process.stop()
    assert process.process.returncode == -signal.SIGKILL
    assert not Path(serving.run_directory).exists()  # the script has removed it


OWNER = """
import os, sys, time
from central_storage.launch import service
from cs_runtime.transport.supervisor_link import SupervisorLink
from cs_proto.messages import Output, Serving
process = service.start(["cpu:0", "cpu:1"], "cpu:0")
lifeline = SupervisorLink(process.socket, "controller")
record = None
while not isinstance(record, Serving):
    record = lifeline.receive_nowait()
    if isinstance(record, Output):
        print(record.text, end="", flush=True)
    time.sleep(0.001)
print("supervisor", process.process.pid, flush=True)
kept = os.dup(process.socket.fileno()) if sys.argv[1] == "keeps" else None
if (child := os.fork()) == 0:
    os.write(1, b"closed %d\\n" % (process.socket.fileno() < 0))
    process.stop()  # not its own: does nothing
    if sys.argv[1] == "exits":
        sys.exit(0)
    time.sleep(600)
"""
PIDS = dict.fromkeys(("server", "w0", "w1"), "print('pid', os.getpid())")


@pytest.mark.parametrize("forked", ["closes", "keeps"])
def test_a_killed_script_ends_its_service_though_a_forked_child_lives(
    standins: Callable[..., dict[str, str]], forked: str
) -> None:
    script = OWNER + "os.write(1, b'forked %d\\n' % child)\ntime.sleep(600)"
    with processes.start("-c", script, forked, environment=standins(**PIDS)) as owner:
        child = int(owner.wait_for(r"forked (\d+)")[1])
        owner.wait_for("closed 1")
        pids = [int(pid) for pid in re.findall(r"(?:supervisor|pid) (\d+)", owner.out)]
        assert len(pids) == 4
        begun = time.monotonic()
        owner.signal(signal.SIGKILL)
        for pid in pids:
            wait_gone(pid, unit(5))
        assert time.monotonic() - begun < unit(5)
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_that_ends_disturbs_nobody(standins: Callable[..., dict[str, str]]) -> None:
    script = OWNER + (
        "os.waitpid(child, 0)\n"
        "from cs_proto.messages import OpenSegment, SegmentRefused\n"
        "lifeline.send(OpenSegment('arena/0'))\n"
        "while not isinstance(lifeline.receive_nowait(), SegmentRefused): time.sleep(0.001)\n"
        "process.stop(); print('stopped', process.process.returncode)"
    )
    result = processes.run(sys.executable, "-W", "error", "-c", script, "exits", environment=standins()).ok()
    assert "stopped 0" in result.lines
    assert result.err == ""
