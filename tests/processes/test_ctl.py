"""cs-ctl with real services: of plain Python, of cs-launch, in threads; processes killed while they are looked at."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.harness.processes import Child, Ended, run, start
from tests.harness.timing import unit

import central_storage as cs
from central_storage.ctl import services
from central_storage.ctl.reading import Process, Reading
from cs_proto.frozen import fields_of

#: Trains until it is ended. Replica 1 waits while the file that it is given is there.
TRAIN = """
import os, sys, time
import numpy as np
import central_storage as cs

strategy = cs.CentralStorageStrategy(["cpu:0", "cpu:1"], max_restarts=1000)
with strategy.scope():
    w = cs.Variable(np.zeros(250_000, np.float32), name="w")
    optimizer = cs.optimizers.Adam()

@cs.function
def step(flag):
    if cs.get_replica_context().replica_id_in_sync_group == 1:
        while os.path.exists(flag):
            time.sleep(0.01)
    time.sleep(0.005)
    optimizer.apply_gradients([(np.ones(250_000, np.float32), w)])

@cs.function
def speak():
    print("hello from a replica", flush=True)

strategy.run(speak)
strategy.run(step, args=(sys.argv[1],))
print("address", strategy.address, flush=True)
while True:
    strategy.run(step, args=(sys.argv[1],))
"""


class Training:
    """A training that runs."""

    def __init__(self, child: Child, flag: Path) -> None:
        self.child = child
        self.flag = flag
        self.address = child.wait_for(r"^address (.*)$")[1]

    def status(self) -> dict[str, Any]:
        """What ``cs-ctl status --json`` prints."""
        return dict(json.loads(ctl("status", "--json", self.address).out))

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first status of which that holds; the time of the test limits the wait."""
        while not holds(status := self.status()):
            pass
        return status

    def pid(self, label: str) -> int:
        return next(int(each["pid"]) for each in self.status()["processes"] if each["label"] == label)


def ctl(*arguments: str) -> Ended:
    return run("cs-ctl", *arguments)


def listed() -> list[dict[str, Any]]:
    """What ``cs-ctl ls`` shows of this test session's services."""
    ours = os.environ["XDG_RUNTIME_DIR"]
    found = json.loads(ctl("ls", "--json").ok().out)
    return [entry for entry in found if entry["address"].startswith(ours) or "/named" in entry["address"]]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ctl") / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.fixture(scope="module")
def plain(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """A training of plain Python."""
    flag = tmp_path_factory.mktemp("flag") / "wait"
    with start(script, str(flag), environment={"CS_LOG_DIR": None}) as child:
        yield Training(child, flag)
    services.clean()  # it is killed at the end


@pytest.fixture
def launched(script: Path, tmp_path: Path) -> Iterator[Training]:
    """A training under ``cs-launch``."""
    with start("cs-launch", "--devices", "cpu:0,cpu:1", script, str(tmp_path / "wait")) as child:
        yield Training(child, tmp_path / "wait")
    services.clean()  # it is killed at the end


def test_all_services_are_listed(plain: Training, launched: Training, script: Path) -> None:
    with cs.CentralStorageStrategy(in_process=True) as strategy:
        found = {entry["address"]: entry for entry in listed()}
        threads = json.loads(ctl("status", "--json", strategy.address).ok().out)
    one, other = found[plain.address], found[launched.address]
    for entry, kind in ((one, "script"), (other, "launcher")):
        assert entry["name"].startswith("train-")
        assert entry["script"] == f"{script} {(plain if kind == 'script' else launched).flag}"
        assert (entry["kind"], entry["state"], entry["devices"]) == (kind, "running", ["cpu:0", "cpu:1"])
        assert entry["step"] > 1
        assert entry["rate"] > 0
        assert entry["transport"].startswith("ipc")
        kept = [name for name in fields_of(Reading) if name not in ("processes", "events")]
        assert (list(entry), entry["nodes"]) == ([*kept, "nodes"], [])
    assert one["pid"] == plain.child.pid
    assert found[strategy.address]["kind"] == "in-process"
    states = {each["label"]: each["state"] for each in threads["processes"]}
    assert states == {"script": states["script"], "server": "a thread", "w0": "a thread"}
    assert threads["processes"][0]["pid"] == os.getpid()


def test_status_tells_of_processes_and_memory(plain: Training) -> None:
    status = plain.status()
    assert list(status) == list(fields_of(Reading))
    labels = [each["label"] for each in status["processes"]]
    assert labels == ["supervisor", "script", "server", "w0", "w1"]
    for each in status["processes"]:
        assert list(each) == list(fields_of(Process))
        assert each["private_nbytes"] > 1_000_000
        assert each["cpu_seconds"] > 0
    nbytes = 4 * 250_000
    assert (status["parameter_nbytes"], status["slot_nbytes"]) == (nbytes, 2 * nbytes)
    shared = status["shared_nbytes"]
    for kind, planned in (("parameters", nbytes), ("slots", 2 * nbytes), ("gradients", 2 * nbytes)):
        assert planned <= shared[kind] <= planned * 1.05 + 100_000
    server = next(each for each in status["processes"] if each["label"] == "server")
    assert server["shared_nbytes"]["slots"] >= 2 * nbytes
    assert status["captured"] > 0
    said = ctl("status", plain.address).ok().out
    for part in ("plain Python", "steps/s now", "captured:", "private", "w1.", "the first gradients for a set"):
        assert part in said


@pytest.mark.parametrize("command", ["ls", "status"])
def test_a_look_imports_little(plain: Training, command: str) -> None:
    """Most of the processor time of a command is that of its imports, so those that take the longest are left out."""
    program = (
        "import sys\n"
        "from central_storage.ctl.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "print('imported', *sys.modules)\n"
        "sys.exit(code)\n"
    )
    named = [plain.address] if command == "status" else []
    said = run(sys.executable, "-c", program, command, *named).ok().lines
    assert any("train" in line for line in said[:-1])
    imported = set(said[-1].split())
    assert "zmq" in imported  # it has asked the server
    assert not imported & {"numpy", "optree", "rich", "asyncio", "multiprocessing", "prometheus_client", "tqdm"}


def test_a_wait_is_named_with_those_who_wait(plain: Training) -> None:
    plain.flag.touch()
    status = plain.until(lambda status: status["state"] == "waiting")
    assert status["waiting"][0].startswith("replica 1 (pid ")
    waits = {each["label"]: each["waits_for"] for each in status["processes"]}
    assert waits["w0"].startswith("returned after")
    assert waits["w1"] == ""
    assert "  waiting for w1  " in ctl("ls").out
    plain.flag.unlink()
    plain.until(lambda status: status["state"] == "running")


def test_the_stacks_of_all_processes_are_printed(plain: Training) -> None:
    plain.flag.touch()
    plain.until(lambda status: status["state"] == "waiting")
    said = json.loads(ctl("stack", "--json", plain.address).ok().out)
    plain.flag.unlink()
    assert said["missing"] == {}
    assert {thread["process"] for thread in said["threads"]} == {"supervisor", "script", "server", "w0", "w1"}
    waiting = [thread["frames"][-1]["function"] for thread in said["threads"] if thread["process"] == "w1"]
    assert "step" in waiting
    assert "; w1 (pid " in ctl("stack", plain.address).ok().out  # merged with w0


def test_lines_are_printed_and_followed_until_the_end(launched: Training) -> None:
    said = ctl("logs", launched.address).ok().lines
    assert said.count("[w0] hello from a replica") == said.count("[w1] hello from a replica") == 1
    assert ctl("logs", "-p", "w1", "-n", "1", launched.address).ok().lines == ["[w1] hello from a replica"]
    assert ctl("logs", "-n", "0", launched.address).ok().lines == []
    assert "there is no process 'w7': server, w0, w1, supervisor" in ctl("logs", "-p", "w7", launched.address).err
    with start("cs-ctl", "logs", "-f", "--json", launched.address) as follows:
        follows.wait_for("hello from a replica")
        os.kill(launched.pid("w0"), signal.SIGKILL)
        follows.wait_for(r'"process": "supervisor".*"text": "worker w0 .* works in its place"')
        ctl("stop", launched.address).ok()
        assert follows.wait().code == 0


def test_everything_is_looked_at_while_processes_die(plain: Training) -> None:
    before = plain.status()["restarts"]
    with start("cs-top", "--json", "--interval", "0.05", plain.address) as top:
        for label in ("w1", "server", "w0"):
            victim = plain.pid(label)
            os.kill(victim, signal.SIGKILL)
            ctl("ls")
            ctl("stack", plain.address)
            plain.until(
                lambda status, label=label, victim=victim: (
                    status["state"] == "running" and all(each["pid"] != victim for each in status["processes"])
                )
            )
        top.wait_for('"state": "running"')
        os.kill(top.pid, signal.SIGINT)
        assert top.wait().code == 130
    status = plain.status()
    assert status["restarts"] == before + 3
    assert all(each["cause"] == "SIGKILL" for each in status["processes"] if each["incarnation"])
    assert sum("ended by SIGKILL" in event["text"] for event in status["events"]) >= 3
    lines = [json.loads(line) for line in top.out.splitlines()]
    assert all(list(line) == list(fields_of(Reading)) for line in lines)


def test_a_stopped_process_is_named(plain: Training) -> None:
    server, supervisor = plain.pid("server"), plain.pid("supervisor")
    os.kill(server, signal.SIGSTOP)
    try:
        ended = ctl("status", "--json", "--timeout", "0.5", plain.address)
        assert (ended.code, json.loads(ended.out)["state"]) == (0, "waiting")
        assert json.loads(ended.out)["waiting"] == [f"server (pid {server}), which is stopped"]
        said = ctl("stack", "--timeout", "0.5", plain.address).ok().out
        assert f"server (pid {server}): it has printed none within 0.5 s: it is stopped" in said
        os.kill(supervisor, signal.SIGSTOP)
        ended = ctl("status", "--json", "--timeout", "0.5", plain.address)
        assert (ended.code, json.loads(ended.out)["state"]) == (4, "silent")
        assert json.loads(ended.out)["waiting"] == [f"supervisor (pid {supervisor}), which is stopped"]
        labels = [each["label"] for each in json.loads(ended.out)["processes"]]
        assert sorted(labels) == ["script", "server", "supervisor", "w0", "w1"]
        ended = ctl("logs", "--timeout", "0.5", plain.address)
        assert (ended.code, f"it is stopped; kill -CONT {supervisor} lets it go on" in ended.err) == (4, True)
    finally:
        os.kill(supervisor, signal.SIGCONT)
        os.kill(server, signal.SIGCONT)
    plain.until(lambda status: status["state"] == "running")


def test_a_reader_may_have_seen_enough(plain: Training) -> None:
    command = f"set -o pipefail; {Path(sys.executable).with_name('cs-ctl')} status {plain.address} | head -n 1"
    assert run("/bin/bash", "-c", command).ok().out.startswith("service:   train-")


@pytest.mark.parametrize("how", ["plain", "cs-launch"])
def test_stop_ends_a_service_as_ctrl_c_does(script: Path, tmp_path: Path, how: str) -> None:
    launcher = () if how == "plain" else ("cs-launch",)
    with start(*launcher, script, str(tmp_path / "wait")) as child:
        training = Training(child, tmp_path / "wait")
        said = json.loads(ctl("stop", "--json", training.address).ok().out)
        assert said["signals"] == ["SIGINT"]
        ended = child.wait()
        assert "KeyboardInterrupt" in ended.err
        assert child.left() == []
    assert ctl("status", training.address).code == 3


SLOW_TO_START = """
import os, sys, time
import central_storage as cs

print("up", flush=True)
while os.path.exists(sys.argv[1]):
    time.sleep(0.01)
strategy = cs.CentralStorageStrategy(["cpu:0"])
while True:
    strategy.run(lambda: None)
"""


def test_a_profile_waits_for_a_service_that_is_starting(tmp_path: Path) -> None:
    script, flag = tmp_path / "slow.py", tmp_path / "wait"
    script.write_text(SLOW_TO_START)
    flag.touch()
    with start("cs-launch", script, str(flag)) as child:
        child.wait_for("^up$")
        given_up = ctl("profile", "--wait", "0.1", str(child.pid))
        assert given_up.code == 4
        assert "is still starting after 0.1 s, and waits for the script to choose its devices" in given_up.err
        with start("cs-ctl", "profile", "--json", "--steps", "5", "--seconds", "60", str(child.pid)) as profile:
            profile.wait_for("is starting, and waits for", stream="err")
            flag.unlink()
            assert json.loads(profile.wait().ok().out)["steps"] == 5
        ctl("stop", str(child.pid)).ok()
        child.wait()


STUBBORN = """
import signal
import central_storage as cs

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: None)
strategy = cs.CentralStorageStrategy()
print("address", strategy.address, flush=True)
while True:
    signal.pause()
"""


def test_stop_becomes_harder(tmp_path: Path) -> None:
    with start("-c", STUBBORN) as child:
        address = child.wait_for(r"^address (.*)$")[1]
        refused = ctl("stop", "--wait", "0.1", address)
        assert refused.code == 4
        assert "is still there 0.1 s after SIGTERM; --kill-after SECONDS ends it by SIGKILL" in refused.err
        said = ctl("stop", "--json", "--wait", str(unit(2)), "--kill-after", "0.1", address).ok()
        assert json.loads(said.out)["signals"] == ["SIGINT", "SIGTERM", "SIGKILL"]
        assert child.wait().code == -signal.SIGKILL
        assert child.left() == []
    services.clean()


SAVES = """
import signal
from cs_runtime import saving_mark

with saving_mark.setting():
    print("saving", flush=True)
    while True:
        signal.pause()
"""


def test_a_training_that_is_stopped_in_a_save_is_not_waited_for(tmp_path: Path) -> None:
    """As by Ctrl-Z, which stops script and launcher."""
    script = tmp_path / "saves.py"
    script.write_text(SAVES)
    with start("cs-launch", script) as child:
        child.wait_for("^saving$")
        both = [child.pid, next(each.pid for each in child.processes() if str(script) in each.cmdline()[2:])]
        for pid in both:
            os.kill(pid, signal.SIGSTOP)
        refused = ctl("stop", "--wait", "0.1", str(child.pid))
        assert (refused.code, "is stopped, perhaps by Ctrl-Z" in refused.err) == (4, True), str(refused)
        assert all(str(pid) in refused.err.partition("kill -CONT ")[2] for pid in both)
        ctl("stop", "--wait", "0.1", "--kill-after", "0.1", str(child.pid)).ok()
        child.wait()
        assert child.left() == []
    services.clean()


def test_a_killed_launcher_leaves_an_entry_that_is_seen_and_cleaned(launched: Training) -> None:
    os.kill(launched.child.pid, signal.SIGKILL)
    launched.child.wait()
    assert launched.child.left() == []
    assert [entry["state"] for entry in listed() if entry["address"] == launched.address] == ["over"]
    assert launched.address not in [entry["address"] for entry in listed()]
    assert not os.path.exists(launched.address)


def test_a_service_that_waits_for_workers_in_a_directory_of_its_own_is_found_and_ended() -> None:
    directory = Path(os.environ["TMPDIR"]) / "named"  # short enough for sockets
    with start("cs-launch", "--serve", "1", "--run-dir", directory, environment={"CS_LOG_DIR": None}) as child:
        child.wait_for("from elsewhere", stream="err")
        found: list[dict[str, Any]] = []
        while not found or found[0]["state"] != "starting" or found[0]["waiting"] != ["w0 to be ready"]:
            found = [entry for entry in listed() if entry["address"] == str(directory)]
        assert (found[0]["name"], found[0]["kind"], found[0]["script"]) == ("named", "serve", "--serve 1")
        ctl("stop", "named").ok()
        assert child.wait().code == 0
    assert [entry for entry in listed() if entry["address"] == str(directory)] == []
    with suppress(FileNotFoundError):
        assert list(directory.iterdir()) == []
