"""How an outpost parts from its gateway."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from central_storage.cluster.link import Link
from central_storage.launch.plan import Command
from central_storage.launch.remote import outpost as module
from cs_proto.messages import Joined
from cs_runtime.transport.curve import WorkerKeys, make_keys


@pytest.mark.parametrize(("by_signal", "patience"), [(True, 5.0), (False, 0.0)])
def test_only_an_outpost_that_ends_on_its_own_waits_for_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_signal: bool, patience: float
) -> None:
    """Where the service has ended, the gateway is gone, too."""
    keys = str(tmp_path / "keys")
    make_keys(keys, worker="n1")
    asked: list[float] = []
    close, connect = Link.close, module._Outpost._connect

    def noted(link: Link, patience: float = 0.0) -> None:
        asked.append(patience)
        close(link)

    def connected(outpost: module._Outpost) -> None:
        connect(outpost)
        if by_signal:
            os.kill(os.getpid(), signal.SIGTERM)
        else:  # as where the service tells a worker to end
            outpost._seats[0].end()

    def no_command(joined: Joined) -> Command:
        raise AssertionError("nobody has assigned a worker")

    monkeypatch.setattr(Link, "close", noted)
    monkeypatch.setattr(module._Outpost, "_connect", connected)
    with tempfile.TemporaryDirectory(prefix="cs-", dir="/tmp") as run_directory:  # a short path, for its sockets
        places = [(run_directory, no_command)]
        outpost = module._Outpost("tcp://127.0.0.1:1", WorkerKeys.read(keys), places, 1.0, True)
        assert (outpost.run(), asked) == (0, [patience])
