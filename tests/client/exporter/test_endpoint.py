"""HTTP: who gets the metrics, and what hostile clients get; over real sockets, in a thread."""

from __future__ import annotations

import asyncio
import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from tests.harness.timing import unit

from central_storage.exporter import endpoint

TOKEN = b"0123456789abcdef"
GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + TOKEN + b"\r\n\r\n"


class Server:
    """An endpoint whose metrics come when :attr:`may_answer` is set."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(endpoint.serve(self.listener, TOKEN, self._text))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _text(self) -> bytes:
        self.may_answer.wait()
        return b"metrics 1\n"

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._wait())

    async def _wait(self) -> None:
        with pytest.raises(asyncio.CancelledError):
            await self._task

    def close(self) -> None:
        self.may_answer.set()
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=unit(20))

    def ask(self, request: bytes) -> bytes:
        with self.connect() as link:
            link.sendall(request)
            return read(link)


def read(link: socket.socket) -> bytes:
    """What comes until the other side hangs up."""
    found = b""
    while piece := link.recv(1 << 16):
        found += piece
    return found


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def test_who_shows_the_token_gets_the_metrics(server: Server) -> None:
    answer = server.ask(GET)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n")
    assert b"Content-Length: 10" in head
    assert body == b"metrics 1\n"
    assert server.ask(GET.replace(b"/metrics", b"/metrics?a=b").replace(b"Bearer", b"bearer")).endswith(body)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\n\r\n", b"401 Unauthorized"),
        (GET.replace(TOKEN, TOKEN[:-1]), b"401 Unauthorized"),
        (GET.replace(TOKEN, TOKEN + b"0"), b"401 Unauthorized"),
        (GET.replace(TOKEN, b""), b"401 Unauthorized"),
        (GET.replace(TOKEN, b"\xff\x00\x1b[31m"), b"401 Unauthorized"),
        (GET.replace(b"Bearer", b"Basic"), b"401 Unauthorized"),
        (GET[:-2] + b"Authorization: Bearer " + TOKEN + b"\r\n\r\n", b"401 Unauthorized"),
        (b"GET /elsewhere HTTP/1.1\r\n\r\n", b"401 Unauthorized"),
        (GET.replace(b"/metrics", b"/"), b"404 Not Found"),
        (GET.replace(b"/metrics", b"/metrics/../../etc/passwd"), b"404 Not Found"),
        (GET.replace(b"GET", b"POST"), b"405 Method Not Allowed"),
        (GET.replace(b"GET", b"HEAD"), b"405 Method Not Allowed"),
        (GET.replace(b"GET", b"DELETE"), b"405 Method Not Allowed"),
        (b"\r\n\r\n", b"400 Bad Request"),
        (b"GET /metrics\r\n\r\n", b"400 Bad Request"),
        (b"GET /metrics SSH-2.0\r\n\r\n", b"400 Bad Request"),
        (GET.replace(b"Host: x", b"no colon"), b"400 Bad Request"),
        (b"\x16\x03\x01" + bytes(200) + b"\r\n\r\n", b"400 Bad Request"),
        (b"x" * 20_000, b"431 Request Header Fields Too Large"),
        (GET[:-2] + b"X: " + b"y" * 9000 + b"\r\n\r\n", b"431 Request Header Fields Too Large"),
    ],
)
def test_others_are_refused(
    server: Server, request_: bytes, status: bytes, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    answer = server.ask(request_)
    assert answer.startswith(b"HTTP/1.1 " + status + b"\r\n")
    assert (b"WWW-Authenticate: Bearer" in answer) == (b"401" in status)
    assert b"metrics 1" not in answer
    assert server.ask(GET).endswith(b"metrics 1\n")
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_a_client_that_sends_nothing_is_refused_in_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_HEAD_SECONDS", 0.1)
    assert server.ask(GET[:-1]).startswith(b"HTTP/1.1 408 Request Timeout")


def test_many_silent_clients_keep_nobody_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_STRANGERS", 4)
    with ExitStack() as stack:
        links = [stack.enter_context(server.connect()) for _ in range(40)]
        assert server.ask(GET).endswith(b"metrics 1\n")
        for link in links[:36]:  # those that were there first had to make room
            with suppress(ConnectionResetError):
                assert link.recv(1) == b""


def test_clients_that_hang_up_harm_nobody(server: Server) -> None:
    for part in (b"", b"GET", GET[:-2], GET):
        with server.connect() as link:
            link.sendall(part)
    assert server.ask(GET).endswith(b"metrics 1\n")


def test_scrapes_at_once_all_get_an_answer_up_to_a_limit(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_SCRAPES", 3)
    server.may_answer.clear()
    with ExitStack() as stack:
        links = [stack.enter_context(server.connect()) for _ in range(4)]
        for link in links:
            link.sendall(GET)
        selector = stack.enter_context(selectors.DefaultSelector())
        for link in links:
            selector.register(link, selectors.EVENT_READ)
        ((key, _),) = selector.select(unit(20))  # one of the four is the one too many
        refused = key.fileobj
        assert isinstance(refused, socket.socket)
        assert read(refused).startswith(b"HTTP/1.1 503 Service Unavailable")
        # A slow look delays no refusal.
        assert server.ask(b"GET /metrics HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 401")
        server.may_answer.set()
        for link in links:
            if link is not refused:
                assert read(link).endswith(b"metrics 1\n")
