"""Sockets between the processes of one machine, where the system refuses one."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import zmq

from central_storage.cluster.sockets import Sockets


def test_a_process_without_descriptors_is_told_so_in_one_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both callers handle an OSError, as that of any other descriptor."""

    def refuse(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    sockets = Sockets()
    with monkeypatch.context() as patched:
        patched.setattr(zmq.Context, "socket", refuse)
        for make in (sockets.router, lambda endpoint: sockets.dealer(endpoint, b"n1")):
            with pytest.raises(OSError, match="no socket can be made: Too many open files") as refused:
                make(f"ipc://{tmp_path}/here")
            assert refused.value.errno == errno.EMFILE
    sockets.close()
