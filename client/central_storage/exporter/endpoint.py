"""HTTP for one path: GET /metrics, for those who show the token.

One thread reads the requests of all connections, so a slow client delays nobody. A request must be short and arrive
within seconds. If too many connections have not shown the token, the oldest of them is closed, so a client that sends
its request at once finds a place. Another thread makes the answers. Nothing that a client sends is printed or sent
back.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus

from cs_proto.frozen import frozen

__all__ = ["serve"]

_HEAD_NBYTES = 8192
# What is read of a connection after its answer, so that the kernel does not drop the answer.
_REST_NBYTES = 65536
# Seconds for a request to arrive, for an answer to be read, and for the client to hang up after it.
_HEAD_SECONDS, _ANSWER_SECONDS, _END_SECONDS = 5.0, 5.0, 1.0
# How many connections may be without the token, and how many scrapes may be under way.
_STRANGERS, _SCRAPES = 64, 16
#: Prometheus' text format.
_CONTENT = "text/plain; version=0.0.4; charset=utf-8"


@frozen
class Answer:
    """What a client gets."""

    status: HTTPStatus
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


_TOO_LATE = Answer(HTTPStatus.REQUEST_TIMEOUT)
_TOO_LONG = Answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
_BROKEN = Answer(HTTPStatus.BAD_REQUEST)
_REFUSED = Answer(HTTPStatus.UNAUTHORIZED, (("WWW-Authenticate", 'Bearer realm="central-storage metrics"'),))
_ONLY_GET = Answer(HTTPStatus.METHOD_NOT_ALLOWED, (("Allow", "GET"),))
_NO_SUCH = Answer(HTTPStatus.NOT_FOUND)
_TOO_MANY = Answer(HTTPStatus.SERVICE_UNAVAILABLE)


async def serve(listener: socket.socket, token: bytes, text: Callable[[], bytes]) -> None:
    """Answer requests on ``listener``, until this is cancelled. ``text`` makes the metrics, in a thread of its own and
    never twice at once."""
    listener.setblocking(False)
    with ThreadPoolExecutor(1) as executor:
        connections = _Connections(token, text, executor)
        async with await asyncio.start_server(connections.serve, sock=listener, limit=_HEAD_NBYTES) as server:
            await server.serve_forever()


class _Connections:
    def __init__(self, token: bytes, text: Callable[[], bytes], executor: ThreadPoolExecutor) -> None:
        self._token = token
        self._text = text
        self._executor = executor
        # Those that have not shown the token, the oldest first.
        self._strangers: dict[asyncio.Task[None], None] = {}
        self._scrapes = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request and hang up."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._strangers) >= _STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        self._strangers[task] = None
        try:
            answer = await self._answer(reader, task)
            if answer is not None:
                await _send(answer, reader, writer)
        except (OSError, TimeoutError, asyncio.CancelledError):  # the client has gone, is too slow or has to make room
            pass
        finally:
            self._strangers.pop(task, None)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, task: asyncio.Task[None]) -> Answer | None:
        """What to answer; None if the client has hung up."""
        try:
            async with asyncio.timeout(_HEAD_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            return _TOO_LATE
        except asyncio.LimitOverrunError:
            return _TOO_LONG
        except asyncio.IncompleteReadError:
            return None
        refusal = _refusal(head, self._token)
        if refusal is not None:
            return refusal
        self._strangers.pop(task, None)
        if self._scrapes >= _SCRAPES:
            return _TOO_MANY
        self._scrapes += 1
        try:
            body = await asyncio.get_running_loop().run_in_executor(self._executor, self._text)
        finally:
            self._scrapes -= 1
        return Answer(HTTPStatus.OK, (("Content-Type", _CONTENT), ("Cache-Control", "no-store")), body)


def _refusal(head: bytes, token: bytes) -> Answer | None:
    """Why a request is refused; None if it gets the metrics."""
    request, *lines = head[:-4].split(b"\r\n")
    words = request.split(b" ")
    fields = [line.partition(b":") for line in lines]
    if len(words) != 3 or not words[2].startswith(b"HTTP/1.") or not all(colon for _, colon, _ in fields):
        return _BROKEN
    shown = [value.strip() for name, _, value in fields if name.lower() == b"authorization"]
    scheme, _, secret = shown[0].partition(b" ") if len(shown) == 1 else (b"", b"", b"")
    if scheme.lower() != b"bearer" or not hmac.compare_digest(secret.strip(), token):
        return _REFUSED
    if words[0] != b"GET":
        return _ONLY_GET
    return None if words[1].partition(b"?")[0] == b"/metrics" else _NO_SUCH


async def _send(answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    status = answer.status
    headers = (*answer.headers, ("Content-Length", str(len(answer.body))), ("Connection", "close"))
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in headers), "", ""]
    writer.transport.set_write_buffer_limits(high=0)  # so that drain() waits until the kernel has all of it
    writer.write("\r\n".join(lines).encode("ascii") + answer.body)
    async with asyncio.timeout(_ANSWER_SECONDS):
        await writer.drain()
    writer.write_eof()
    left = _REST_NBYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_SECONDS):
            while left > 0 and (read := await reader.read(left)):
                left -= len(read)
