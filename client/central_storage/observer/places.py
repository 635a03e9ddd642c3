"""Where an observer finds a service: in a run directory of this machine, or at a TCP address of another one."""

from __future__ import annotations

import os
from typing import Any, Protocol

import zmq

from cs_proto.errors import ConfigurationError, LaunchError
from cs_proto.peers import server_endpoint
from cs_runtime.transport.curve import ObserverKeys, check_endpoint, protect_client
from cs_runtime.transport.supervisor_link import CARRIED, checked

__all__ = ["Place", "place_of"]


# Milliseconds after which the kernel gives up a connection over which nothing of what was sent arrives.
_UNACKNOWLEDGED = 5000
# Milliseconds in which TCP must connect: a fifth of what a question may take, because it takes five round trips to
# connect and to get the first answer; but at least the first number, and at most the second, since no connection holds
# longer without an acknowledgement. What is sent while a network is down is lost, and another try is quicker than the
# kernel, which repeats it at growing intervals.
_CONNECTS = 2000, _UNACKNOWLEDGED
# Milliseconds: the longest pause before the next try.
_PAUSE = 500


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

    def protect(self, socket: zmq.Socket[Any], timeout: float) -> None:
        """Set what the connection needs, before it is made. A question may take ``timeout`` seconds."""


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

    def protect(self, socket: zmq.Socket[Any], timeout: float) -> None:
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
        self.endpoint = address

    @property
    def doubts(self) -> str:
        return (
            f": nothing listens there, it is another service than the one of service.key, or it does not admit the key "
            f"{self._keys.path}"
        )

    def protect(self, socket: zmq.Socket[Any], timeout: float) -> None:
        shortest, longest = _CONNECTS
        socket.setsockopt(zmq.IPV6, int(self._is_ipv6))
        socket.setsockopt(zmq.TCP_MAXRT, _UNACKNOWLEDGED)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, int(min(max(shortest, 1000 * timeout / 5), longest)))
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _PAUSE)
        protect_client(socket, self._keys)


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
