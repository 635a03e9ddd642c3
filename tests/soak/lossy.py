"""A network that loses, between the server of a service in this process and everybody who talks to it.

The channels of server, workers and script are replaced by one that drops, doubles and delays messages, as a seed
decides. Between script and workers it drops none: nobody sends a run again to a worker that lives. Messages of one peer
keep their order. Nobody sends again what is dropped; the supervisor says ``Serving``, as it does after a server's
restart, and the peers have to know what of theirs is unanswered.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args
from unittest import mock

from central_storage.controller import session as controller_session
from central_storage.launch import threads
from central_storage.launch.supervisor.lifecycle import Service
from cs_proto.records import Buffer
from cs_runtime.transport.channel import SERVER, Channel, Received
from cs_server import service
from cs_worker.session import session as worker_session

__all__ = ["WAYS", "Faults", "Lossy", "Way", "lossy_service"]

#: Of a message: to the server, from it, or between the others.
Way = Literal["to the server", "from the server", "past the server"]
WAYS: tuple[Way, ...] = get_args(Way)

_DELAY = 0.002
# Between two looks whether a message was dropped, after which the supervisor says Serving, seconds.
_TELL_EVERY = 0.01


@dataclass(frozen=True)
class Faults:
    """Shares of messages, from 0 to 1."""

    dropped: float = 0.05
    doubled: float = 0.05
    delayed: float = 0.05


class Lossy:
    """What happens to the messages of one service. Nothing does before :meth:`begin`. Used by several threads."""

    def __init__(self, seed: int, faults: Faults) -> None:
        #: How many messages of each way were dropped, doubled and delayed.
        self.dropped, self.doubled, self.delayed = (dict.fromkeys(WAYS, 0) for _ in range(3))
        self._random = random.Random(seed)
        self._faults = faults
        self._is_faulty = False
        self._to_tell = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """From now on messages are lost."""
        self._is_faulty = True

    def end(self) -> None:
        """From now on none is."""
        self._is_faulty = False

    def take_dropped(self) -> bool:
        """Whether a message was dropped since this was asked last."""
        with self._lock:
            told, self._to_tell = self._to_tell, False
        return told

    def copies(self, way: Way) -> tuple[int, float]:
        """How many copies of a message arrive, and after how many seconds."""
        with self._lock:
            chance, faults = self._random.random(), self._faults
            dropped = faults.dropped if way != "past the server" else 0.0
            if not self._is_faulty:
                return 1, 0.0
            if chance < dropped:
                self.dropped[way] += 1
                self._to_tell = True
                return 0, 0.0
            if chance < dropped + faults.doubled:
                self.doubled[way] += 1
                return 2, 0.0
            if chance < dropped + faults.doubled + faults.delayed:
                self.delayed[way] += 1
                return 1, self._random.uniform(0, _DELAY)
            return 1, 0.0


class _LossyChannel(Channel):
    """Loses messages to and of the server, by mailbox before they are posted, over ZeroMQ where they arrive."""

    network: Lossy
    is_server = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._late: dict[bytes, deque[tuple[float, Sequence[Buffer]]]] = {}

    def post(self, peer: bytes, parts: Sequence[Buffer]) -> bool:
        copies, _ = self.network.copies(self._way(peer, is_sent=True))  # nothing is late in memory
        return all(super(_LossyChannel, self).post(peer, parts) for _ in range(copies))

    def _poll(self, timeout: float, now: float) -> set[Any]:
        first = min((late[0][0] for late in self._late.values() if late), default=math.inf)
        return super()._poll(min(timeout, max(0.0, first - now)), now)

    def _at_hand(self) -> Received | None:
        while (received := super()._at_hand()) is None and self._pass_on():
            pass
        return received

    def _came(self, peer: bytes, parts: Sequence[Buffer]) -> None:
        copies, delay = self.network.copies(self._way(peer, is_sent=False))
        self._late.setdefault(peer, deque()).extend([(time.monotonic() + delay, parts)] * copies)
        self._pass_on()

    def _way(self, peer: bytes, *, is_sent: bool) -> Way:
        if self.is_server or peer == SERVER:
            return "from the server" if self.is_server == is_sent else "to the server"
        return "past the server"

    def _pass_on(self) -> bool:
        """Whether a message was late and comes now: one, since what it says may change how the next one is counted."""
        for peer, late in self._late.items():
            if late and late[0][0] <= time.monotonic():
                super()._came(peer, late.popleft()[1])
                return True
        return False


@contextmanager
def lossy_service(seed: int, faults: Faults, *, mailboxes: bool) -> Iterator[Lossy]:
    """Inside the block a strategy that is made ``in_process`` has such a network; the answer says what it does. With
    ``mailboxes`` most messages go by them, and are lost and doubled there, too."""
    made = Lossy(seed, faults)

    class LossyChannel(_LossyChannel):
        network = made

    class ServersChannel(LossyChannel):
        is_server = True

    class Telling(Service):
        """A supervisor that says Serving again whenever a message was dropped."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "mailboxes": mailboxes})
            self._mailroom._spins = False  # in threads, who looks for mail keeps the others from running

        def start(self) -> None:
            super().start()
            self._loop.call_later(_TELL_EVERY, self._tell_again)

        def _tell_again(self) -> None:
            if made.take_dropped() and self._state == "serving":
                self._reception.tell_all(self._serving())
            self._loop.call_later(_TELL_EVERY, self._tell_again)

    with ExitStack() as patches:
        for module, name, replacement in (
            (threads, "Service", Telling),
            (service, "Channel", ServersChannel),
            (worker_session, "Channel", LossyChannel),
            (controller_session, "Channel", LossyChannel),
        ):
            patches.enter_context(mock.patch.object(module, name, replacement))
        yield made
