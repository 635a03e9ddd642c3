"""An observer: a process that may look at a running service, and nothing else.

It maps no memory; bytes come in frames. Any process of the same user can be one.
"""

from __future__ import annotations

import os
import secrets
import time
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import zmq

from cs_proto import messages
from cs_proto.codec import BULK_LIMITS, decode, encode
from cs_proto.errors import ConfigurationError, LaunchError, ShutdownError, replica_exception_class
from cs_proto.records import Record
from cs_proto.segments import frame_view

__all__ = ["Observer", "connect"]

R = TypeVar("R", bound=Record)


def connect(address: str | None = None, timeout: float = 10.0) -> Observer:
    """An observer of the service whose run directory is ``address`` (default: ``CS_ADDRESS``).

    ``timeout`` (seconds) limits this and every later question. Raises LaunchError where no service answers.
    """
    address = address or os.environ.get("CS_ADDRESS")
    if not address:
        raise ConfigurationError("connect needs the run directory of a service: strategy.address, or CS_ADDRESS")
    return Observer(address, timeout)


class Observer:
    """A read-only session with a service."""

    def __init__(self, address: str, timeout: float) -> None:
        endpoint = os.path.join(address, "server")
        if not os.path.exists(endpoint):
            raise LaunchError(f"no service answers in {address}; it has ended, or the address names the wrong run")
        self.address = address
        self._timeout = timeout
        self._requests = 0
        self._client = secrets.token_hex(4)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IDENTITY, f"o{self._client}".encode())
        self._socket.connect(f"ipc://{endpoint}")
        try:
            hello = messages.Hello(messages.PROTOCOL, "observer", self._client, os.getpid())
            self.replicas = self._ask(hello, 0, messages.Welcome).replicas
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def variables(self) -> tuple[messages.Variable, ...]:
        """Every variable's record, in the order of creation."""
        self._requests += 1
        return self._ask(messages.Get(self._requests, (), (), False), self._requests, messages.Got).variables

    def get(self, name: str) -> np.ndarray:
        """A copy of a variable's value as of one commit. Raises InvalidArgumentError for an unknown name."""
        self._requests += 1
        got = self._ask(messages.Get(self._requests, (), (name,), True), self._requests, messages.Got)
        return np.array(frame_view(got.arrays[0]))

    def statistics(self) -> messages.Counters:
        """The server's counters."""
        self._requests += 1
        return self._ask(messages.Statistics(self._requests), self._requests, messages.Counters)

    def close(self) -> None:
        """Say goodbye. Idempotent."""
        if not self._context.closed:
            self._socket.send_multipart(encode(messages.Goodbye(self._client)))
            self._context.destroy(linger=100)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Observer of {self.address}{' (closed)' if self._context.closed else ''}>"

    def _ask(self, request: Record, number: int, answer: type[R]) -> R:
        if self._context.closed:
            raise ShutdownError("this observer was closed")
        self._socket.send_multipart(encode(request))
        deadline = time.monotonic() + self._timeout
        while self._socket.poll(int(max(0.0, deadline - time.monotonic()) * 1000)):
            frames = self._socket.recv_multipart(copy=False)
            record = decode([frames[0].bytes, *(frame.buffer for frame in frames[1:])], BULK_LIMITS)
            if isinstance(record, messages.Refused) and record.number == number:
                raise replica_exception_class(record.error.exception)(record.error.message)
            if isinstance(record, answer) and getattr(record, "request", number) == number:
                return record
        raise LaunchError(f"the server in {self.address} did not answer within {self._timeout:.0f} s; has it ended?")
