"""Observers as coroutines: ``central_storage.connect`` for programs that run an event loop.

    async with central_storage.aio.connect(address) as observer:
        value = await observer.get("w")

After the cancellation of a question the observer is still usable; a late answer is dropped.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import zmq.asyncio

from cs_proto import messages
from cs_proto.codec import encode

from .core.public_objects import Closed
from .observer.blocking import Patience, Question, Session

__all__ = ["Connecting", "Observer", "connect"]

T = TypeVar("T")


def connect(
    address: str | None = None, timeout: float = 10.0, *, keys: str | os.PathLike[str] | None = None
) -> Connecting:
    """An observer of a running service: await it and close it, or enter it with ``async with``.

    Args:
        address: The run directory of the service, ``strategy.address``, or ``tcp://HOST:PORT``. None: the environment
            variable ``CS_ADDRESS``.
        timeout: Seconds that this and every later question may take.
        keys: As for ``central_storage.connect``.

    Raises:
        ConfigurationError: When awaited: there is no address, or the timeout makes no sense.
        LaunchError: When awaited: there is no service.
        NoAnswerError: When awaited: the service does not answer in time (a TimeoutError).

    Examples:
        >>> import asyncio
        >>> import central_storage as cs
        >>> async def look(address):
        ...     async with cs.aio.connect(address) as observer:
        ...         return await observer.get("w")
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy:
        ...     with strategy.scope():
        ...         w = cs.Variable([1.0, 2.0], name="w")
        ...     print(asyncio.run(look(strategy.address)))
        [1. 2.]
    """
    return Connecting(address, timeout, keys=keys)


class Connecting(Closed):
    """The result of :func:`connect`: an awaitable, and an asynchronous context manager, for an :class:`Observer`.

    Examples:
        >>> import central_storage as cs
        >>> connecting = cs.aio.connect("/run/user/1000/central-storage/run")
    """

    def __init__(self, address: str | None, timeout: float, *, keys: str | os.PathLike[str] | None = None) -> None:
        self._address = address
        self._timeout = timeout
        self._keys = keys
        self._observer: Observer | None = None

    def __await__(self) -> Generator[Any, None, Observer]:
        return self._open().__await__()

    async def _open(self) -> Observer:
        # In a thread, because a session waits for the supervisor, and other tasks go on meanwhile.
        making = asyncio.get_running_loop().run_in_executor(
            None, partial(Session, self._address, self._timeout, keys=self._keys)
        )
        try:
            session = await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(_close)
            raise
        return await Observer.open(session)

    async def __aenter__(self) -> Observer:
        self._observer = await self
        return self._observer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._observer is not None:
            await self._observer.close()


def _close(making: asyncio.Future[Session]) -> None:
    """Close a session that nobody awaits any more."""
    if not making.cancelled() and making.exception() is None:
        making.result().close()


class Observer(Closed):
    """A read-only session with a service, for one event loop. Questions of several tasks are sent one after the other.

    Every question raises NoAnswerError (a TimeoutError) if the answer does not come in time, and ShutdownError (a
    RuntimeError) if the service has ended or the observer was closed.

    Examples:
        >>> import asyncio
        >>> import central_storage as cs
        >>> async def look(address):
        ...     observer = await cs.aio.connect(address)
        ...     try:
        ...         records = await observer.variables()
        ...         print([record.spec.name for record in records], await observer.get("w"))
        ...         print(await observer.get_all(["w"]), (await observer.statistics()).variables == 1)
        ...     finally:
        ...         await observer.close()
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy:
        ...     with strategy.scope():
        ...         w = cs.Variable([1.0, 2.0], name="w")
        ...     asyncio.run(look(strategy.address))
        ['w'] [1. 2.]
        [array([1., 2.], dtype=float32)] True
    """

    def __init__(self, session: Session) -> None:
        """Use :func:`connect`."""
        self._session = session
        self._turn = asyncio.Lock()
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = session.open(self._context)
        self.address = session.address
        self.replicas = 0

    @classmethod
    async def open(cls, session: Session) -> Observer:
        """An observer that the server has welcomed."""
        observer = cls(session)
        try:
            observer.replicas = await observer._ask(session.hello())
        except BaseException:  # a cancellation must not leave the socket open, either
            await observer.close()
            raise
        return observer

    async def variables(self) -> tuple[messages.Variable, ...]:
        """Every variable's record, in the order of creation."""
        return await self._ask(self._session.variables())

    async def get(self, name: str) -> np.ndarray:
        """A copy of a variable's value as of one commit.

        Args:
            name: The variable's name.

        Raises:
            InvalidArgumentError: There is no such variable (a ValueError).
        """
        seen = await self._see([name])
        return await self._ask(self._session.get(name)) if seen is None else seen[0]

    async def get_all(self, names: Sequence[str]) -> list[np.ndarray]:
        """Copies of several variables' values, all as of the same commit.

        Args:
            names: The variables' names, at least one.

        Returns:
            The values in the order of ``names``.

        Raises:
            InvalidArgumentError: There is no such variable, or no name (a ValueError).
        """
        question = self._session.get_all(names)
        seen = await self._see(names)
        return await self._ask(question) if seen is None else seen

    async def statistics(self) -> messages.Counters:
        """The server's counters."""
        return await self._ask(self._session.statistics())

    async def close(self) -> None:
        """Close the session. Tasks that wait for an answer get ShutdownError. Idempotent; returns quickly."""
        if not self._context.closed:
            self._socket.send_multipart(self._session.goodbye())  # sent at once, so there is nothing to await
            self._session.close(self._context)

    def __repr__(self) -> str:
        return f"<Observer of {self.address}{' (closed)' if self._context.closed else ''}>"

    async def _see(self, names: Sequence[str]) -> list[np.ndarray] | None:
        self._check_open()
        question = self._session.unknown(names)
        if question is not None:
            await self._ask(question)
        return self._session.seen(names)

    async def _ask(self, question: Question[T]) -> T:
        async with self._turn:
            self._check_open()
            await self._socket.send_multipart(encode(question.request))
            patience = Patience(self._session.timeout)
            while True:
                # Poll first, and then receive without waiting, so that a cancellation cannot lose a message.
                try:
                    ready = await self._socket.poll(patience.milliseconds)
                finally:
                    self._check_open()
                if not ready:
                    if self._session.check_waiting(question, patience):
                        await self._socket.send_multipart(encode(question.request))
                elif found := self._session.answer(question, await self._socket.recv_multipart(copy=False)):
                    return found[0]
                else:
                    for message in self._session.repeats(question):
                        await self._socket.send_multipart(message)

    def _check_open(self) -> None:
        if self._context.closed:
            raise self._session.closed()
