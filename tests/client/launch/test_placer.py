"""The launcher's side of Ray, with programs in the place of the placer."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from central_storage.launch import placer
from central_storage.launch.placement import Request
from central_storage.launch.placer import Placed, Placer, environment_of
from central_storage.launch.plan import Command
from central_storage.launch.supervisor.loop import Loop
from cs_proto.errors import ConfigurationError, LaunchError

Make = Callable[..., tuple[Placer, Loop, list[str]]]

REQUEST = Request("auto", 2, {"CPU": 1.0}, start_timeout=60.0)
BEGIN = """
import json, os, signal, socket, sys
launcher = socket.socket(fileno=int(sys.argv[sys.argv.index("--descriptor") + 1]))
lines = launcher.makefile()
def tell(**said): launcher.send(json.dumps(said).encode() + b"\\n")
placed = dict(address="192.0.2.7", nodes=["192.0.2.7", "192.0.2.8"], version="2.60.0", cluster_nodes=3)
"""
PLACED = Placed("192.0.2.7", ("192.0.2.7", "192.0.2.8"), "2.60.0", 3)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Make]:
    """A placer that is a program given as text; its loop; what it says."""
    ends: list[Placer] = []

    def make(program: str, request: Request = REQUEST) -> tuple[Placer, Loop, list[str]]:
        argv = (sys.executable, "-c", BEGIN + textwrap.dedent(program))
        monkeypatch.setattr(placer, "_command", lambda *_: Command("observer", 0, argv, dict(os.environ)))
        loop, said = Loop(), list[str]()
        monkeypatch.setattr(placer, "_say_plainly", said.append)
        kept = Placer(request, str(tmp_path))
        ends.append(kept)
        return kept, loop, said

    yield make
    for kept in ends:
        kept.close()
        assert kept.living_pids == set()


def turn_until(loop: Loop, is_so: Callable[[], bool]) -> None:
    while not is_so():
        loop.turn(1.0)


def test_the_workers_are_placed_then_told_where_to_join(made: Make) -> None:
    kept, loop, said = made(
        """
        tell(say="waiting")
        tell(**placed)
        tell(say=lines.readline())
        assert lines.readline() == ""
        """
    )
    assert kept.place() == PLACED
    assert said == ["waiting"]
    kept.listens_at("tcp://192.0.2.7:40123")
    kept.kept(loop, said.append).start()
    turn_until(loop, lambda: len(said) > 1)
    assert said[1] == '{"endpoint": "tcp://192.0.2.7:40123"}\n'
    [pid] = kept.living_pids
    kept.close()
    assert not psutil.pid_exists(pid)
    assert len(said) == 2  # its end was wanted


def test_the_banner_counts_the_workers_of_each_node() -> None:
    assert str(PLACED) == "Ray 2.60.0 with 3 nodes: 1 worker on 192.0.2.7, 1 on 192.0.2.8"
    assert str(Placed("a", ("a", "a"), "2.60.0", 1)) == "Ray 2.60.0 with 1 node: 2 workers on a"


@pytest.mark.parametrize(("is_usage", "kind"), [(True, ConfigurationError), (False, LaunchError)])
def test_what_ray_refuses_is_our_error(made: Make, is_usage: bool, kind: type[Exception]) -> None:
    kept, _, said = made(f'tell(refused="Ray has no places", is_usage={is_usage}); sys.exit(1)')
    with pytest.raises(kind, match=r"^Ray has no places$"):
        kept.place()
    assert said == []


def test_a_placer_that_dies_at_the_start_is_an_error_with_its_last_line(
    made: Make,
) -> None:
    kept, _, _ = made('sys.exit("no module named ray")')
    with pytest.raises(LaunchError, match=r"the placer \(pid \d+\) ended by exit code 1: no module named ray"):
        kept.place()


def test_a_placer_that_hangs_is_ended(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placer, "_MARGIN", 0.0)
    kept, _, _ = made("signal.pause()", Request("auto", 2, {"CPU": 1.0}, start_timeout=0.2))
    with pytest.raises(LaunchError, match=r"Ray \(auto\) has not answered within 0.2 s"):
        kept.place()
    kept.close()
    assert kept.living_pids == set()


def test_one_that_does_not_end_is_killed(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placer, "_END_TIMEOUT", 0.2)
    kept, _, _ = made("signal.signal(signal.SIGTERM, signal.SIG_IGN); tell(**placed); signal.pause()")
    kept.place()
    kept.close()
    assert kept.living_pids == set()


def test_one_that_dies_later_is_started_again_and_told_the_same(
    made: Make,
) -> None:
    kept, loop, said = made("tell(**placed); tell(say=lines.readline()); lines.readline()")
    kept.place()
    kept.listens_at("tcp://192.0.2.7:40123")
    kept.kept(loop, said.append).start()
    turn_until(loop, lambda: len(said) == 1)
    [pid] = kept.living_pids
    os.kill(pid, signal.SIGKILL)
    turn_until(loop, lambda: len(said) == 3)
    assert said[1].startswith(f"the placer (pid {pid}) ended by SIGKILL; its workers are gone, and another")
    assert said[2] == said[0] == '{"endpoint": "tcp://192.0.2.7:40123"}\n'


def test_one_that_ends_as_soon_as_it_has_placed_is_started_again(
    made: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its word and its end are heard together."""
    kept, loop, said = made(
        f"""
        tell(**placed)
        try:
            open({str(tmp_path / "been")!r}, "x").close()
        except FileExistsError:
            tell(say=lines.readline())
            lines.readline()
        """
    )
    wait = Placer._wait

    def wait_for_its_end(self: Placer) -> Placed:
        [pid] = self.living_pids
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return wait(self)

    monkeypatch.setattr(Placer, "_wait", wait_for_its_end)
    assert kept.place() == PLACED
    assert kept.living_pids == set()
    kept.listens_at("tcp://192.0.2.7:40123")
    kept.kept(loop, said.append).start()
    turn_until(loop, lambda: len(said) == 2)
    assert said[0].endswith("ended by exit code 0; its workers are gone, and another placer starts in 1 s")
    assert said[1] == '{"endpoint": "tcp://192.0.2.7:40123"}\n'


def test_a_later_refusal_is_said_and_tried_again(made: Make, tmp_path: Path) -> None:
    kept, loop, said = made(
        f"""
        path = {str(tmp_path / "been")!r}
        if os.path.exists(path):
            tell(refused="Ray has no places", is_usage=False)
        else:
            open(path, "w").close()
            tell(**placed)
        """
    )
    kept.place()
    kept.kept(loop, said.append).start()
    turn_until(loop, lambda: len(said) == 2)
    assert said[0].endswith("ended by exit code 0; its workers are gone, and another placer starts in 1 s")
    assert said[1].startswith("Ray has no places; its workers are gone, and another placer starts in ")


def test_a_cluster_of_its_own_is_on_loopback_behind_a_token() -> None:
    request = Request("local:3", 2, {"CPU": 1.0})
    one, two = (environment_of(request, {"RAY_ADDRESS": "192.0.2.7:6379", "RAY_AUTH_TOKEN": "known"}) for _ in range(2))
    assert "RAY_ADDRESS" not in one
    assert one["RAY_AUTH_MODE"] == "token"
    assert len(one["RAY_AUTH_TOKEN"]) == 64
    assert one["RAY_AUTH_TOKEN"] != two["RAY_AUTH_TOKEN"]
    assert (one["RAY_USAGE_STATS_ENABLED"], one["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]) == ("0", "0")
    assert one["RAY_worker_niceness"] == "0"


def test_a_token_that_the_user_has_is_used(tmp_path: Path) -> None:
    nobody = {"HOME": str(tmp_path)}
    assert "RAY_AUTH_MODE" not in environment_of(REQUEST, nobody)
    assert environment_of(REQUEST, nobody | {"RAY_AUTH_TOKEN": "t"})["RAY_AUTH_MODE"] == "token"
    assert environment_of(REQUEST, nobody | {"RAY_AUTH_TOKEN_PATH": "/t"})["RAY_AUTH_MODE"] == "token"
    told = nobody | {"RAY_AUTH_TOKEN": "t", "RAY_AUTH_MODE": "disabled"}
    assert environment_of(REQUEST, told)["RAY_AUTH_MODE"] == "disabled"
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("t")
    assert environment_of(REQUEST, nobody)["RAY_AUTH_MODE"] == "token"


def test_a_cluster_that_does_not_answer_is_not_tried_for_long() -> None:
    """Pretend nodes are just starting, and may need a while."""
    tries = "RAY_NUM_REDIS_GET_RETRIES"
    assert int(environment_of(REQUEST, {})[tries]) < 10
    assert environment_of(REQUEST, {tries: "30"})[tries] == "30"
    assert tries not in environment_of(Request("local:2", 2, {"CPU": 1.0}), {})


def test_a_node_hears_nothing_of_this_run() -> None:
    kept = environment_of(REQUEST, {"CS_ADDRESS": "/run/cs", "CS_DEVICES": "cpu:0", "CS_LOG": "debug"})
    assert not {"CS_ADDRESS", "CS_DEVICES"} & set(kept)
    assert kept["CS_LOG"] == "debug"
