"""The supervisor after one that was killed: who comes back goes on, who does not has died; and what is written down."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.client.launch.standins import LIMIT, Client, World, standin_command, standin_environment
from tests.harness.timing import unit

from central_storage.launch.cli import _goes_on
from central_storage.launch.memory import Files
from central_storage.launch.plan import of_incarnation
from central_storage.launch.remote.serve import start_child
from central_storage.launch.run_directory import RunDirectory
from central_storage.launch.supervisor.lifecycle import Service
from cs_proto.messages import PROTOCOL, ClientGone, Died, Introduce, Join, Joined, Ready, Serving, StartFailed
from cs_runtime.run_file import RunFile

KILLED = RunFile("a run", 2, "cpu:0", LIMIT, server=2, workers=(1, 3), serves=True)
FRESH = RunFile("a run", 2, "cpu:0", LIMIT, server=1, workers=(1, 1))


def serve(world: World, run_file: RunFile) -> Service:
    """A service of two workers from elsewhere, whose server is a stand-in."""
    directory, environment = world.directory.path, standin_environment()
    run_file.write(directory)
    roles = [("server", 0), ("worker", 0), ("worker", 1)]
    numbers = (run_file.server + run_file.serves, *run_file.workers)
    world.service = Service(
        world.loop,
        directory,
        [
            of_incarnation(standin_command(*role, directory, environment), number)
            for role, number in zip(roles, numbers, strict=True)
        ],
        world.sink,
        start_timeout=LIMIT,
        start_child=start_child,
        medium=Files(directory),
        run_file=run_file,
    )
    world.service.start()
    return world.service


OLD = b"an earlier name"


def joins(world: World, *known: int | bytes) -> Client:
    """A launcher; ``known``: rank, incarnation and name of the worker that it runs already."""
    launcher = world.client(role="")
    launcher.send(Join(PROTOCOL, 17, *known))
    return launcher


def joined(launcher: Client) -> tuple[int, int]:
    while not isinstance(answer := launcher.receive(), Joined):
        assert not isinstance(answer, StartFailed), answer
        assert answer is not None
    launcher.name = answer.name
    return answer.rank, answer.incarnation


def introduced(world: World, rank: int, incarnation: int, name: bytes) -> Client:
    worker = world.client(role="")
    worker.send(Introduce(PROTOCOL, "worker", rank, incarnation, 18, "", name))
    return worker


def test_who_comes_back_goes_on(world: World) -> None:
    service = serve(world, KILLED)
    early = introduced(world, 1, 3, OLD)  # before its launcher
    assert isinstance(early.receive(), Serving)
    assert joined(joins(world, 1, 3, OLD)) == (1, 3)
    launcher = joins(world, 0, 1, b"another")
    assert joined(launcher) == (0, 1)
    assert launcher.name == b"another"
    assert isinstance(introduced(world, 0, 1, b"another").receive(), Serving)
    assert isinstance(world.client().receive(), Serving)
    assert RunFile.read(world.directory.path) == replace(KILLED, server=3)
    assert not service.has_lost
    late = joins(world)
    assert isinstance(late.receive(), StartFailed)


def test_a_machine_gets_places_for_all_its_workers_or_none(world: World) -> None:
    serve(world, FRESH)

    def asks(workers: int, pid: int = 17) -> Client:
        launcher = world.client(role="")
        launcher.send(Join(PROTOCOL, pid, workers=workers))
        return launcher

    refused = asks(3).receive()
    assert isinstance(refused, StartFailed)
    assert "this machine has 3 workers to run, and the service only 2 of 2 left" in refused.error.message
    first = asks(2)
    assert joined(first) == (0, 1)
    refused = asks(2).receive()
    assert isinstance(refused, StartFailed)
    assert "2 workers to run, and the service only 1 of 2 left" in refused.error.message
    assert isinstance(asks(1, pid=18).receive(), StartFailed)  # another machine, which would end the start of the first
    assert joined(asks(1)) == (1, 1)
    refused = asks(1).receive()
    assert isinstance(refused, StartFailed)
    assert "all 2 workers of this service run already" in refused.error.message


def test_a_worker_elsewhere_is_known_by_the_name_of_its_launcher(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    serve(world, FRESH)
    launcher = joins(world)
    assert joined(launcher) == (0, 1)
    assert len(launcher.name) == 16
    assert launcher.introduced == []  # it is no worker
    for name in (b"", b"0123456789abcdef"):
        assert introduced(world, 0, 1, name).receive() is None
    assert "says it is worker 0, but it was not started as that" in caplog.text
    worker = introduced(world, 0, 1, launcher.name)
    world.until(lambda: "joined" in world.sink.text)
    worker.send(Ready())
    world.until(lambda: world.service._children[1].ready_since is not None)
    assert introduced(world, 0, 1, launcher.name).receive() is None  # there is one already


def test_a_worker_that_died_meanwhile_is_replaced_where_it_ran(world: World) -> None:
    serve(world, KILLED)
    joins(world, 0, 1)
    launcher = joins(world, 1, 3)
    launcher.send(Died("worker", 1, 3, 18, "SIGSEGV", "its last words"))
    assert [joined(launcher), joined(launcher)] == [(1, 3), (1, 4)]
    world.until(lambda: "ended by SIGSEGV; restart 1 of 3" in world.sink.text)
    assert RunFile.read(world.directory.path).workers == (1, 4)


def test_a_launcher_that_had_not_heard_of_the_next_worker_is_told(world: World) -> None:
    serve(world, KILLED)
    launcher = joins(world, 1, 2)
    launcher.send(Died("worker", 1, 2, 18, "SIGSEGV", ""))  # which the supervisor before had acted on
    assert joined(launcher) == (1, 3)
    joins(world, 0, 1)
    world.until(lambda: "worker w0 is back" in world.sink.text)
    assert "SIGSEGV" not in world.sink.text


def test_the_place_of_one_that_does_not_come_back_goes_to_another_that_waits(world: World) -> None:
    serve(world, replace(KILLED, return_timeout=0.05))
    others = [joins(world), joins(world)]
    assert sorted(map(joined, others)) == [(0, 2), (1, 4)]
    assert "not coming back within 0.05 s after the supervisor was killed; restart 1 of 3" in world.sink.text


def test_what_is_written_down(world: World) -> None:
    directory = world.directory.path
    service = serve(world, FRESH)
    for rank in range(2):
        launcher = joins(world)
        assert joined(launcher) == (rank, 1)
        assert RunFile.read(directory) == FRESH  # there is nothing to take up yet
        introduced(world, rank, 1, launcher.name).send(Ready())
    assert isinstance(world.client().receive(), Serving)
    assert RunFile.read(directory) == replace(FRESH, serves=True)
    launcher.send(Died("worker", 1, 1, 18, "SIGSEGV", ""))
    assert joined(launcher) == (1, 2)
    assert RunFile.read(directory) == replace(FRESH, serves=True, workers=(1, 2))
    service.stop(0.0)
    assert RunFile.read(directory) is None


def test_a_script_that_does_not_come_back_has_left(world: World) -> None:
    directory = world.directory.path
    serve(world, replace(KILLED, return_timeout=unit(0.5), clients=("gone", "here")))
    script = world.client(role="")
    script.send(Introduce(PROTOCOL, "controller", 0, 1, 17, "here"))
    assert isinstance(script.receive(), Serving)
    assert RunFile.read(directory).clients == ("gone", "here")
    world.until(lambda: world.service._left == ["gone"])  # to be told to the server, which says when it has heard it
    script.link.close()
    world.until(lambda: world.service._left == ["gone", "here"])
    assert RunFile.read(directory).clients == ("gone", "here")
    world.service._give_up(None, ClientGone("here"))
    assert RunFile.read(directory).clients == ("gone",)


def test_a_full_volume_is_said_and_ends_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: RunFile, directory: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    serve(world, FRESH)
    launcher = joins(world)
    assert joined(launcher) == (0, 1)
    monkeypatch.setattr(RunFile, "write", full)
    for rank in range(2):
        introduced(world, rank, 1, launcher.name).send(Ready())
        if rank == 0:
            launcher = joins(world)
            assert joined(launcher) == (1, 1)
    assert isinstance(world.client().receive(), Serving)
    assert "the run file cannot be written (No space left on device)" in world.sink.text
    assert RunFile.read(world.directory.path) is None


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"workers": 3}', '{"run": "r", "workers": [1], "more": 1}'])
def test_what_is_no_run_file_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "run").write_text(text)
    assert RunFile.read(str(tmp_path)) is None


def test_a_directory_keeps_what_is_taken_up_and_loses_the_sockets_of_the_dead(tmp_path: Path) -> None:
    names = {"lock", "server", "supervisor", "run", "w0.1", "segment.server.control", "mine"}
    for name in names:
        (tmp_path / name).touch()
    tmp_path.chmod(0o700)
    taken = RunDirectory(str(tmp_path), is_taken_up=lambda path: path == str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == names - {"server", "supervisor"}
    taken.remove()
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}


def test_a_run_with_other_options_is_dropped_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not _goes_on(str(tmp_path), FRESH)
    FRESH.write(str(tmp_path))
    assert not _goes_on(str(tmp_path), FRESH)  # it never served
    KILLED.write(str(tmp_path))
    assert _goes_on(str(tmp_path), FRESH)
    assert capsys.readouterr().err == ""
    assert not _goes_on(str(tmp_path), replace(FRESH, replicas=3))
    assert capsys.readouterr().err == (
        f"cs-launch: warning: a run of 2 workers with parameters on cpu:0 was killed in {tmp_path}; it is dropped, "
        "because this run has 3 workers and parameters on cpu:0\n"
    )
