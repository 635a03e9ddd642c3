"""pyzmq-echo: 64 bytes to another process and back, DEALER to DEALER over ipc. No work: a floor for messages."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import zmq
from program import Trial, main
from works import Work

MESSAGE = b"x" * 64


class Echo:
    """Round trips."""

    def __init__(self, dealer: zmq.Socket[bytes]) -> None:
        self.dealer = dealer

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.dealer.send(MESSAGE)
            self.answer = self.dealer.recv()

    def check(self) -> None:
        assert self.answer == MESSAGE


@contextmanager
def opened(work: Work, steps: int) -> Iterator[Trial]:
    with (
        tempfile.TemporaryDirectory() as directory,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        address = f"ipc://{directory}/echo"
        dealer.bind(address)
        with subprocess.Popen([sys.executable, "-m", "peers.pyzmq_echo", address]) as other:
            yield Echo(dealer)
            dealer.send(b"")
        assert other.returncode == 0


def answer(address: str) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(address)
        while message := dealer.recv():
            dealer.send(message)


if __name__ == "__main__":
    if sys.argv[1].startswith("ipc://"):
        answer(sys.argv[1])
    else:
        main(opened)
