"""Finding a service: what was started for a strategy ends where the strategy does not come to be."""

from __future__ import annotations

import socket

import pytest

from central_storage.errors import ShutdownError
from central_storage.launch import service as launch
from central_storage.service import open_service


class Started:
    """A supervisor that has died before the script could say a word to it."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.close()
        self.stops = 0

    def stop(self) -> None:
        self.stops += 1


def test_a_supervisor_that_dies_at_once_is_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started()
    monkeypatch.setattr(launch, "start", lambda *_: started)
    monkeypatch.delenv("CS_ADDRESS", raising=False)
    with pytest.raises(ShutdownError, match="supervisor is gone"):
        open_service(["cpu:0"], None, seed=0, start_timeout=1.0, in_process=False)
    assert started.stops == 1
    assert started.socket.fileno() == -1
