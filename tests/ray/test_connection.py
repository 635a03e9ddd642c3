"""Pretend nodes, without Ray: which failures are those of their start."""

from __future__ import annotations

from typing import Any

import pytest
import ray.cluster_utils

from central_storage.launch.placement import Request
from central_storage.ray.connection import _pretending
from cs_proto.errors import LaunchError

ASKED = Request("local:2", 2, {"CPU": 1.0})


class Cluster:
    """Stands for one, and can be unable to start so many nodes."""

    address = "127.0.0.1:6379"
    room = 1

    def __init__(self, **node: Any) -> None:
        pass

    def add_node(self, **node: Any) -> None:
        if not self.room:
            raise RuntimeError("no room\nfor a node")

    def shutdown(self) -> None:
        pass


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.cluster_utils, "Cluster", Cluster)
    for name in ("RAY_TMPDIR", "RAY_prestart_worker_first_driver"):
        monkeypatch.setenv(name, "")  # what the start sets goes with the test


def test_what_fails_at_the_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "room", 0)
    with pytest.raises(LaunchError, match=r"^pretend nodes of Ray could not be started: no room$"), _pretending(ASKED):
        pass


def test_what_fails_later_keeps_its_words() -> None:
    with pytest.raises(LaunchError, match=r"^the actors did not start$"), _pretending(ASKED):
        raise LaunchError("the actors did not start")
