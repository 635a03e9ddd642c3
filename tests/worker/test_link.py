"""A worker's sockets, without a worker behind them."""

from __future__ import annotations

import os
import socket
import tempfile
from typing import NoReturn

import pytest

from central_storage.lifeline import Lifeline
from cs_proto.codec import encode
from cs_proto.errors import InvalidArgumentError
from cs_proto.failures import error_of
from cs_proto.messages import Died, SegmentRefused
from cs_worker.config import Config
from cs_worker.link import SUPERVISOR, Link
from cs_worker.turns import ProcessTurns


def _gone() -> NoReturn:
    raise AssertionError("the supervisor is there")


def test_what_the_supervisor_says_while_a_segment_is_awaited_is_heard() -> None:
    ours, supervisor = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    died = Died("worker", 1, 1, 43, "SIGKILL", "", True)
    doorbell, writer = os.pipe2(os.O_CLOEXEC)
    with tempfile.TemporaryDirectory(prefix="w-") as directory, supervisor:
        lifeline = Lifeline(ours, "worker")
        link = Link(Config(directory, 0, 1, "cpu:0"), lifeline, _gone, doorbell, ProcessTurns())
        try:
            supervisor.sendall(b"".join(encode(died)))
            supervisor.sendall(b"".join(encode(SegmentRefused("inputs", error_of(InvalidArgumentError("none"))))))
            with pytest.raises(InvalidArgumentError, match="none"):
                lifeline.segment("inputs")
            assert link.receive(0) == (SUPERVISOR, died)
            assert link.receive(0) is None
        finally:
            link.close()
            lifeline.close()
            os.close(doorbell)
            os.close(writer)
