"""Two machines that are network namespaces of this one, joined by a link with a rate. Needs root and iproute2."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEAD_ADDRESS, NODE_ADDRESS = "10.201.0.1", "10.201.0.2"
LINK = "link0"  # the name of its end on either machine
_END = 10.0  # seconds


@contextmanager
def namespaces(rate: float) -> Iterator[tuple[list[str], list[str]]]:
    """Two machines whose link carries ``rate`` bytes a second each way, or as many as it can if that is 0.

    Gives the beginnings of commands that run on the head and on the node. What still runs there at the end is killed.
    """
    mark = secrets.token_hex(3)
    head, node = f"cs-{mark}-head", f"cs-{mark}-node"
    with ExitStack() as ends:
        for name in (head, node):
            _ip("netns", "add", name)
            ends.callback(_ip, "netns", "del", name)
            ends.callback(_empty, name)
        _ip("link", "add", LINK, "netns", head, "type", "veth", "peer", "name", LINK, "netns", node)
        for name, address in ((head, HEAD_ADDRESS), (node, NODE_ADDRESS)):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", LINK)
            for each in ("lo", LINK):
                _ip("-n", name, "link", "set", each, "up")
            if rate:
                bucket = ["rate", f"{rate * 8:.0f}bit", "burst", "256kb", "latency", "100ms"]
                done("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", LINK, "root", "tbf", *bucket)
        yield ["ip", "netns", "exec", head], ["ip", "netns", "exec", node]


@contextmanager
def started(*command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is told to end afterwards."""
    process = subprocess.Popen(command, env=os.environ | environment, cwd=HERE, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def done(*command: str) -> None:
    """Run a command. Raises CalledProcessError if it fails."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _ip(*arguments: str) -> None:
    done("ip", *arguments)


def _empty(name: str) -> None:
    """Kill what runs in a namespace, until nothing does."""
    deadline = time.monotonic() + _END
    while pids := subprocess.run(["ip", "netns", "pids", name], check=True, stdout=subprocess.PIPE).stdout.split():
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {b' '.join(pids).decode()} of {name} do not end")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)
