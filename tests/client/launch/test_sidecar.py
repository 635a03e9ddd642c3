"""A process that is kept running beside a service, and what is printed of it."""

from __future__ import annotations

import os
import socket
import sys
import time

from tests.harness.timing import unit

from central_storage.launch.plan import Command
from central_storage.launch.sidecar import Sidecar, Sidecars
from central_storage.launch.supervisor.loop import Loop

BAR = "import sys; sys.stderr.write('10 %\\r20 %\\rdone\\nnext\\n')"


def test_its_lines_are_printed_without_what_others_are_drawn_over() -> None:
    said: list[tuple[str, str]] = []
    loop = Loop()
    command = Command("observer", 0, (sys.executable, "-c", BAR), dict(os.environ))
    deadline = time.monotonic() + unit(20)

    def say(text: str, label: str = "supervisor") -> None:
        said.append((label, text))

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Sidecars(loop, say, [Sidecar("gateway", "nobody is heard", command, listener)]) as sidecars,
    ):
        sidecars.start()
        while not any(label == "supervisor" for label, _ in said):
            assert time.monotonic() < deadline
            loop.turn(unit())
    printed = [line for label, text in said if label == "gateway" for line in text.split("\n")]
    assert printed[:2] == ["done", "next"]
    assert {*printed} == {"done", "next"}
