"""Which clusters the placer uses: those that ask for a token, and those on loopback."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from central_storage.launch.placement import Request
from central_storage.ray.host import _devices, _threads
from central_storage.ray.placer import _asks_for_a_token, _Keys, _Placing, _Seat
from cs_proto.errors import LaunchError

Check = Callable[..., None]


@pytest.mark.parametrize(
    ("mode", "version", "asks"),
    [
        ("token", "2.52.0", True),
        ("TOKEN", "2.60.1", True),
        ("k8s", "2.55.0", True),
        ("", "2.60.0", False),
        ("", "2.61.0", True),
        ("", "3.0.0", True),
        ("disabled", "3.0.0", False),
    ],
)
def test_a_node_asks_for_a_token(mode: str, version: str, asks: bool) -> None:
    assert _asks_for_a_token(mode, version) == asks


def test_the_gpus_of_an_actor_are_those_of_its_workers() -> None:
    assert [_devices(count, 1) for count in range(3)] == ["1", "gpu:0", "gpu:0+gpu:1"]
    assert [_devices(count, 2) for count in (0, 2, 4)] == ["2", "gpu:0,gpu:1", "gpu:0+gpu:1,gpu:2+gpu:3"]


def test_the_threads_that_ray_gives_an_actor_are_divided_among_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a worker has as many as with an actor of its own, and the same bits."""
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert _threads(8.0, 4) == {"OMP_NUM_THREADS": "2"}
    assert _threads(8.0, 16) == {"OMP_NUM_THREADS": "1"}
    assert _threads(8.0, 1) == {}
    assert _threads(6.0, 3) == {}  # the user has said it
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert _threads(8.0, 4) == {}


@pytest.fixture
def check() -> Check:
    """Whether a cluster with this node, and one of a worker with this mode, is used."""

    def checked(address: str, of_worker: str, mode: str, *, without_token: bool = False) -> None:
        request = Request("auto", 1, {"CPU": 1.0}, without_token=without_token)
        here, there = socket.socketpair()
        with here, there:
            placing = _Placing(request, _Keys("", ""), address, here, 0.0)
            placing._check_token([_Seat(0, 1, None, "key", of_worker, mode, "node")])

    return checked


def test_a_cluster_on_a_network_that_asks_nobody_is_refused_by_name(check: Check) -> None:
    for address, of_worker in (("192.0.2.7", "127.0.0.1"), ("127.0.0.1", "192.0.2.8"), ("::2", "::2")):
        with pytest.raises(LaunchError, match=f"Ray cluster at {address} asks nobody for a token.*--ray-without-token"):
            check(address, of_worker, "disabled")
        check(address, of_worker, "token")
        check(address, of_worker, "disabled", without_token=True)


def test_on_loopback_nobody_else_reaches_it(check: Check) -> None:
    check("127.0.0.1", "127.0.0.1", "disabled")
    check("::1", "127.0.0.2", "")
