"""Where an observer finds a service: in a run directory of this machine, or at a TCP address of another one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

import zmq

from cs_proto.errors import ConfigurationError, LaunchError
from cs_proto.peers import server_endpoint
from cs_runtime.transport.curve import ObserverKeys, check_endpoint, protect_client
from cs_runtime.transport.supervisor_link import CARRIED, checked

if TYPE_CHECKING:
    from .connection import Connection

__all__ = ["Place", "place_of"]


# Milliseconds after which the kernel gives up a connection over which nothing of what was sent arrives.
_UNACKNOWLEDGED = 5000
# Milliseconds before the next try over TCP: at first, and at most after many tries.
_PAUSE = (100, 500)
# Milliseconds before the next try on this machine, always: beside connections without end, the server has a place for a
# moment only.
_LOCAL_PAUSE = 10


class Place(Protocol):
    """Where a service answers."""

    #: What the socket connects to.
    endpoint: str
    #: The transport of values, as text.
    transport: str
    #: Whether the memory of the service can be on this machine.
    may_map: bool

    @property
    def has_ended(self) -> bool:
        """Whether it is known that the service has ended."""

    @property
    def doubts(self) -> str:
        """What may be the reason if no answer comes, as the end of a sentence."""

    def connect(self, socket: zmq.Socket[Any]) -> None:
        """Connect the socket. Called once."""

    def connects_again(self) -> bool:
        """Give up an attempt to connect that takes too long, and begin another one. Whether what was sent may be lost,
        because there is another connection since the last call, or another attempt."""

    def close(self) -> None:
        """Close what watches the connection. Idempotent."""


class _RunDirectory:
    """A service of this machine, and of this user."""

    may_map = True
    transport = CARRIED
    doubts = ""

    def __init__(self, address: str) -> None:
        directory = checked(address)
        if not os.path.exists(os.path.join(directory, "server")):
            raise LaunchError(
                f"no service answers in {address}; it is starting or has ended, or the address names the wrong run"
            )
        self._address = address
        self.endpoint = server_endpoint(directory)

    @property
    def has_ended(self) -> bool:
        return not os.path.isdir(self._address)

    def connect(self, socket: zmq.Socket[Any]) -> None:
        socket.setsockopt(zmq.RECONNECT_IVL, _LOCAL_PAUSE)
        socket.connect(self.endpoint)

    def connects_again(self) -> bool:
        return False

    def close(self) -> None:
        pass


class _Elsewhere:
    """A service of any machine, behind its gateway."""

    may_map = False
    transport = "tcp + CURVE, bytes in frames"
    has_ended = False

    def __init__(self, address: str, keys: str | None) -> None:
        host, port = check_endpoint(address, "the address")
        if port == 0:
            raise ConfigurationError(f"{address} names no port; cs-launch --listen prints the address with the port")
        if keys is None:
            raise ConfigurationError(
                f"{address} needs keys=DIR, the directory with service.key and the secret key of this observer, which "
                "cs-launch keys makes"
            )
        self._keys = ObserverKeys.read(keys)
        self._is_ipv6 = ":" in host
        self._connection: Connection | None = None
        self.endpoint = address

    @property
    def doubts(self) -> str:
        return (
            f": nothing listens there, it is another service than the one of service.key, or it does not admit the key "
            f"{self._keys.path}"
        )

    def connect(self, socket: zmq.Socket[Any]) -> None:
        socket.setsockopt(zmq.IPV6, int(self._is_ipv6))
        socket.setsockopt(zmq.TCP_MAXRT, _UNACKNOWLEDGED)
        socket.setsockopt(zmq.RECONNECT_IVL, _PAUSE[0])
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _PAUSE[1])
        protect_client(socket, self._keys)
        from .connection import Connection  # it brings asyncio, and most observers are here

        self._connection = Connection(socket, self.endpoint)

    def connects_again(self) -> bool:
        return self._connection is not None and self._connection.connects_again()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def place_of(address: str, keys: str | os.PathLike[str] | None) -> Place:
    """Where the service at ``address`` answers: a run directory, or ``tcp://HOST:PORT`` with ``keys``.

    Raises ConfigurationError if an address over TCP comes without keys, or keys with a run directory, and what
    `ObserverKeys.read` raises; LaunchError if there is no service in the run directory.
    """
    if "://" in address:
        return _Elsewhere(address, None if keys is None else os.fspath(keys))
    if keys is not None:
        raise ConfigurationError(f"keys are for a service at tcp://HOST:PORT, and {address} is a run directory")
    return _RunDirectory(address)
