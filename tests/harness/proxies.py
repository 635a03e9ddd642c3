"""A TCP proxy whose connections a test cuts or holds up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

__all__ = ["proxied"]


@contextmanager
def proxied(
    address: str, source: str = "127.0.0.1"
) -> Iterator[tuple[str, Callable[[], None], Callable[[bool], None]]]:
    """An address whose connections lead to ``address``, where they come from ``source``; what cuts them; and what holds
    all bytes back while true."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    links: list[socket.socket] = []
    threads: list[threading.Thread] = []
    flows = threading.Event()
    flows.set()

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(65536):
                flows.wait()
                sink.sendall(piece)
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
                for pair in ((near, far), (far, near)):
                    threads.append(threading.Thread(target=pump, args=pair))
                    threads[-1].start()

    def cut() -> None:
        for link in links:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield (
            f"tcp://127.0.0.1:{listener.getsockname()[1]}",
            cut,
            lambda holds: flows.clear() if holds else flows.set(),
        )
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join()
        flows.set()
        cut()
        for thread in threads:
            thread.join()
        for link in links:
            link.close()
