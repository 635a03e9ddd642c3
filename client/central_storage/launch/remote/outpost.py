"""``cs-launch --join tcp://ADDRESS:PORT``: workers of a service on another machine.

It is linked to the gateway of the service, is assigned a worker for each of its places, and runs them as children,
each in a private run directory with surroundings of its own (:mod:`.seat`, :mod:`.node`). A cut of the link changes
nothing as long as it is mended in time. If the gateway was started again, the workers are, too. ``join_options`` calls
:func:`hold`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial

from central_storage.cluster import items
from central_storage.cluster.link import Link
from central_storage.cluster.memory import NodeMemory
from central_storage.launch.plan import Command
from central_storage.launch.supervisor.children import reap_adopted
from cs_proto.codec import encode
from cs_proto.errors import CentralStorageError, ConfigurationError, Fenced, LaunchError
from cs_proto.messages import PROTOCOL, Join, Joined
from cs_proto.records import Buffer
from cs_runtime import heap, open_files
from cs_runtime.transport.curve import WorkerKeys

from .launcher import Terminal
from .node import wake
from .seat import Seat

__all__ = ["Place", "hold"]

#: The run directory of a worker, and what returns the command to start it.
Place = tuple[str, Callable[[Joined], Command]]

# Seconds after which somebody who waits for the gateway hears what for.
_SAY_AFTER = 4.0
# Seconds in which a gateway is told, over a network that is down, that this launcher has ended on its own.
_FAREWELL = 5.0


def hold(
    endpoint: str, keys: WorkerKeys, places: Sequence[Place], start_timeout: float, *, mailboxes: bool = True
) -> int:
    """Run workers of the service behind ``endpoint``, one in each of ``places``, until the service ends or releases
    them. A worker that dies is started again when the service asks for that. Without ``mailboxes``, all messages of the
    workers go over ZeroMQ.

    Returns the exit code: 0 after SIGTERM or Ctrl-C, or if the service ended in order, 4 otherwise. Raises LaunchError
    if no service answers within ``start_timeout`` seconds or if it has no place for one of the workers, and
    ConfigurationError if it does not admit the key, or not for so many.
    """
    open_files.raise_limit()
    heap.keep_freed_blocks()
    return _Outpost(endpoint, keys, places, start_timeout, mailboxes).run()


class _Outpost:
    def __init__(
        self, endpoint: str, keys: WorkerKeys, places: Sequence[Place], start_timeout: float, mailboxes: bool
    ) -> None:
        self._endpoint, self._keys, self._start_timeout = endpoint, keys, start_timeout
        self._terminal = Terminal()
        self._loop = self._terminal.loop
        self._link: Link | None = None
        self._farewell = 0.0
        self._of_items = items.Places(len(places), self._put)
        # The places for which no worker has been asked yet over this link, and the one for which it was asked last.
        self._unasked: list[int] = []
        self._asked = 0
        # The dense variables, for all workers.
        self._shared = NodeMemory("this machine")
        self._seats = [
            Seat(
                self._terminal,
                *place,
                endpoint,
                partial(self._put_of, number),
                self._shared,
                lambda: self._link is None,
                mailboxes=mailboxes,
            )
            for number, place in enumerate(places)
        ]

    def run(self) -> int:
        with self._terminal.signals(self._signalled):
            try:
                for seat in self._seats:
                    seat.open()
                self._connect()
                while any(seat.code is None for seat in self._seats):
                    self._loop.turn(None if self._link is None else self._link.timeout())
                    self._look()
                    if any(seat.code for seat in self._seats):  # one cannot go on, so the service cannot either
                        self._end()
                    elif self._link is None and self._is_empty and not self._is_told:
                        self._connect()
            finally:
                self._close()
        return max(seat.code or 0 for seat in self._seats)

    def _connect(self) -> None:
        """Ask the gateway for workers. None runs now, and the memory that they have shared is not used again."""
        self._shared.close()
        self._link = Link.connect(self._endpoint, self._keys, self._start_timeout)
        self._loop.on_readable(self._link.fileno(), wake)
        self._loop.call_later(_SAY_AFTER, partial(self._say_if_unanswered, self._link))
        self._of_items = items.Places(len(self._seats), self._put)
        self._unasked = [number for number, seat in enumerate(self._seats) if not seat.is_told]
        self._ask()

    def _ask(self) -> None:
        """Ask for the next worker. The service has refused the first if it has no place for all of them."""
        if self._unasked:
            join = Join(PROTOCOL, os.getpid(), workers=len(self._unasked))
            self._asked = self._unasked.pop(0)
            self._put_of(self._asked, items.JOIN, encode(join))

    def _say_if_unanswered(self, link: Link) -> None:
        """Say what is waited for, if that may be in vain."""
        if link is self._link and not link.is_open and not self._is_told:
            left = max(0.0, self._start_timeout - _SAY_AFTER)
            self._terminal.say(
                f"no gateway answers at {self._endpoint} yet; waiting another {left:g} s: {link.why_not_open()}"
            )

    def _put(self, kind: bytes, parts: Sequence[Buffer]) -> None:
        if self._link is not None:
            self._link.put(kind, parts)

    def _put_of(self, number: int, kind: bytes, parts: Sequence[Buffer]) -> None:
        """Put an item of the worker in a place."""
        self._of_items.put(number, kind, parts)

    def _look(self) -> None:
        """Pass on all that has come, from either side, until nothing more comes."""
        try:
            while (link := self._link) is not None:
                link.turn()
                for kind, parts in link.received():
                    number = self._of_items.of(kind, parts)
                    if number is not None:
                        self._seats[number].heard(kind, parts)
                    if kind == items.JOIN and number == self._asked:
                        self._ask()
                has_spoken = [seat.turn() for seat in self._seats]
                if not any(has_spoken):
                    break
        except CentralStorageError as error:
            self._hang_up(error)
        except OSError as error:  # such as that this process has no descriptors left
            self._hang_up(LaunchError(f"this launcher cannot go on: {error}"))
        if self._link is not None and self._link.is_over:
            self._hang_up(self._link.reason or LaunchError("the service is gone"))

    def _hang_up(self, reason: CentralStorageError) -> None:
        """The session is over: the workers end. When all have, another session begins if the gateway was only started
        again."""
        assert self._link is not None
        self._loop.forget(self._link.fileno())
        self._link.close()
        self._link = None
        if self._is_told:
            return
        if not all(seat.has_joined for seat in self._seats):
            raise reason if isinstance(reason, ConfigurationError | LaunchError) else LaunchError(str(reason))
        is_anew = isinstance(reason, Fenced)
        other = "other workers are" if len(self._seats) > 1 else "another worker is"
        self._terminal.say(f"{reason}{f'; {other} asked for' if is_anew else ''}")
        for seat in self._seats:
            if is_anew:
                seat.replace()
            else:
                seat.fail()

    # --- the end ------------------------------------------------------------------------------------------------------

    @property
    def _is_empty(self) -> bool:
        """Whether no worker runs."""
        return all(seat.is_empty for seat in self._seats)

    @property
    def _is_told(self) -> bool:
        """Whether all workers were told to end."""
        return all(seat.is_told for seat in self._seats)

    def _signalled(self, number: int) -> None:
        if number == signal.SIGCHLD:
            reap_adopted({pid for seat in self._seats if (pid := seat.living_pid) is not None})
        elif self._is_told:
            for seat in self._seats:
                seat.kill()
        else:
            self._end()

    def _end(self) -> None:
        """End the workers, of which the service has not asked that."""
        self._farewell = _FAREWELL
        for seat in self._seats:
            seat.end()

    def _close(self) -> None:
        for seat in self._seats:
            seat.close()
        self._terminal.flush()
        for seat in self._seats:
            seat.close_node()
        self._shared.close()
        if self._link is not None:
            self._loop.forget(self._link.fileno())
            self._link.close(self._farewell)
