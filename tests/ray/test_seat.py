"""The place of a rank's worker, without Ray: what becomes of launchers that cannot be started."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.harness.timing import unit

from central_storage.ray import seat
from central_storage.ray.seat import Seat
from cs_proto.errors import LaunchError

OPENED = {"address": "10.0.0.7", "node": "node", "key": "key"}


class Hosts:
    """Stands for a host: each start of a launcher gives or raises the next of these, and each launcher ends at once,
    but the last one when it is told to."""

    def __init__(self, *starts: dict[str, str] | OSError) -> None:
        self.starts = list(starts)
        self.is_last_one_running, self._is_told = threading.Event(), threading.Event()

    def open(self, version: str, protocol: int, training: str) -> dict[str, str]:
        start = self.starts.pop(0)
        if isinstance(start, OSError):
            raise start
        return start

    def run(self, name: str, endpoint: str, service_key: str) -> tuple[int, str]:
        if not self.starts:
            self.is_last_one_running.set()
            assert self._is_told.wait(unit(20))
        return 1, ""

    def end(self) -> None:
        self._is_told.set()


def call(answer: Any) -> SimpleNamespace:
    """A method of an actor."""
    return SimpleNamespace(remote=lambda *_: answer)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Callable[[Hosts], Seat]:
    """A seat with such hosts."""

    def made(hosts: Hosts) -> Seat:
        monkeypatch.setattr(seat, "Host", lambda: hosts)
        monkeypatch.setattr(seat, "ray", SimpleNamespace(get=lambda answer: answer))
        return Seat(
            "worker-1",
            "training",
            SimpleNamespace(admit=call(("tcp://10.0.0.4:1", "key")), is_over=call(False)),
            "1",
            1,
        )

    return made


def test_a_launcher_that_cannot_be_started_again_is_tried_again(
    place: Callable[[Hosts], Seat], capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = Hosts(OPENED, OSError("no memory"), OPENED)
    found = place(hosts)
    found.take()
    assert hosts.is_last_one_running.wait(unit(20))
    found.leave()
    said = "the launcher of worker-1 could not be started: no memory; another one starts in 1 s"
    assert said in capsys.readouterr().out


def test_the_first_one_is_not_tried_again(place: Callable[[Hosts], Seat]) -> None:
    found = place(Hosts({"address": "10.0.0.7", "refused": "has no central-storage"}))
    with pytest.raises(LaunchError, match=r"the node 10.0.0.7 has no central-storage"):
        found.take()
    found.leave()
