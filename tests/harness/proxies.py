"""A TCP proxy whose connections a test cuts or holds up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

__all__ = ["proxied"]


@contextmanager
def proxied(
    address: str, source: str = "127.0.0.1", carried: dict[str, int] | None = None
) -> Iterator[tuple[str, Callable[[], None], Callable[..., None]]]:
    """An address whose connections lead to ``address``, where they come from ``source``; what cuts them; and what holds
    all bytes back while true, or those of the ways that are its second argument. ``carried`` gets the bytes that have
    passed, ``up`` to ``address`` and ``down`` from it."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    links: list[socket.socket] = []
    threads: list[threading.Thread] = []
    flows = {"up": threading.Event(), "down": threading.Event()}

    def pump(source: socket.socket, sink: socket.socket, way: str) -> None:
        with suppress(OSError):
            while piece := source.recv(65536):
                flows[way].wait()
                sink.sendall(piece)
                if carried is not None:  # one thread for each way of the only connection
                    carried[way] = carried.get(way, 0) + len(piece)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                near = listener.accept()[0]
                try:
                    far = socket.create_connection((host, int(port)), source_address=(source, 0))
                except OSError:  # nobody listens there at the moment
                    near.close()
                    continue
                links.extend((near, far))
                for each in ((near, far, "up"), (far, near, "down")):
                    threads.append(threading.Thread(target=pump, args=each))
                    threads[-1].start()

    def cut() -> None:
        for link in links:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def hold(holds: bool, ways: Sequence[str] = ("up", "down")) -> None:
        for way in ways:
            if holds:
                flows[way].clear()
            else:
                flows[way].set()

    hold(False)
    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", cut, hold
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join()
        hold(False)
        cut()
        for thread in threads:
            thread.join()
        for link in links:
            link.close()
