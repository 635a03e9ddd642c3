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
from typing import Any
from unittest import mock

from central_storage.controller import session as controller_session
from central_storage.launch import threads
from central_storage.launch.supervisor.lifecycle import Service
from cs_proto.records import Buffer
from cs_runtime.transport.channel import SERVER, Channel, Received
from cs_server import service
from cs_worker.session import session as worker_session

__all__ = ["Faults", "Lossy", "lossy_service"]

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
        self.dropped = self.doubled = self.delayed = self.repeated = self.held_up = 0
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

    def copies(self) -> tuple[int, float]:
        """How many copies of a message arrive, and after how many seconds."""
        with self._lock:
            chance, faults = self._random.random(), self._faults
            if not self._is_faulty:
                return 1, 0.0
            if chance < faults.dropped:
                self.dropped += 1
                self._to_tell = True
                return 0, 0.0
            if chance < faults.dropped + faults.doubled:
                self.doubled += 1
                return 2, 0.0
            if chance < faults.dropped + faults.doubled + faults.delayed:
                self.delayed += 1
                return 1, self._random.uniform(0, _DELAY)
            return 1, 0.0

    def kept(self) -> tuple[int, float]:
        """As :meth:`copies`, of a message that is not dropped."""
        with self._lock:
            chance, faults = self._random.random(), self._faults
            if not self._is_faulty:
                return 1, 0.0
            if chance < faults.doubled:
                self.repeated += 1
                return 2, 0.0
            if chance < faults.doubled + faults.delayed:
                self.held_up += 1
                return 1, self._random.uniform(0, _DELAY)
            return 1, 0.0


class _LossyChannel(Channel):
    """Loses messages to and of the server, by mailbox before they are posted, over ZeroMQ where they arrive."""

    network: Lossy

    def __init__(self, supervisor: Any, wake: int, role: str, *arguments: Any, **options: Any) -> None:
        super().__init__(supervisor, wake, role, *arguments, **options)
        self._is_server = role == "server"
        self._late: dict[bytes, deque[tuple[float, Sequence[Buffer]]]] = {}

    def post(self, peer: bytes, parts: Sequence[Buffer]) -> bool:
        # Nothing is late in memory.
        copies, _ = self.network.copies() if self._is_server or peer == SERVER else self.network.kept()
        return all(super(_LossyChannel, self).post(peer, parts) for _ in range(copies))

    def _poll(self, timeout: float) -> set[Any]:
        first = min((late[0][0] for late in self._late.values() if late), default=math.inf)
        return super()._poll(min(timeout, max(0.0, first - time.monotonic())))

    def _at_hand(self) -> Received | None:
        while (received := super()._at_hand()) is None and self._pass_on():
            pass
        return received

    def _came(self, peer: bytes, parts: Sequence[Buffer]) -> None:
        # A link between script and worker, or of two workers, does not lose.
        copies, delay = self.network.copies() if self._is_server or peer == SERVER else self.network.kept()
        self._late.setdefault(peer, deque()).extend([(time.monotonic() + delay, parts)] * copies)
        self._pass_on()

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
            (service, "Channel", LossyChannel),
            (worker_session, "Channel", LossyChannel),
            (controller_session, "Channel", LossyChannel),
        ):
            patches.enter_context(mock.patch.object(module, name, replacement))
        yield made
