"""A network that loses: between the server of a service in this process and everybody who talks to it.

Nothing but messages can be lost, so the proxy stands in the ROUTER's place: the server listens under another name, and
the proxy listens at the server's path. A seed decides which messages are dropped, doubled and delayed, in both
directions. As over a socket that breaks and comes again, messages of one peer keep their order. What is dropped is
never sent again by libzmq; the supervisor says ``Serving``, as it does after a server's restart, and the peers have to
know what of theirs is unanswered.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import zmq

from central_storage.controller import session as controller_session
from central_storage.launch import threads
from central_storage.launch.supervisor.lifecycle import Service
from cs_proto.records import Buffer
from cs_runtime.admission import Admission
from cs_runtime.mailboxes import Mailboxes
from cs_runtime.poller import Poller
from cs_server import service
from cs_worker import session as worker_session

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
    """The proxy of one server. Nothing happens to messages before :meth:`begin`."""

    def __init__(self, front: str, behind: str, seed: int, faults: Faults) -> None:
        self.dropped = self.doubled = self.delayed = 0
        self._random = random.Random(seed)
        self._faults = faults
        self._behind = behind
        self._is_faulty = False
        self._is_over = False
        self._to_tell = False
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._front.setsockopt(zmq.LINGER, 0)
        self._front.bind(f"ipc://{front}")
        self._poller = zmq.Poller()
        self._poller.register(self._front, zmq.POLLIN)
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._queues: dict[tuple[bytes, bool], deque[tuple[float, list[bytes]]]] = {}
        self._thread = threading.Thread(target=self._run, name="cs-lossy")
        self._thread.start()

    def begin(self) -> None:
        """From now on messages are lost."""
        self._is_faulty = True

    def end(self) -> None:
        """From now on none is."""
        self._is_faulty = False

    def close(self) -> None:
        """End the thread."""
        self._is_over = True
        self._thread.join()

    def take_dropped(self) -> bool:
        """Whether a message was dropped since this was asked last."""
        told, self._to_tell = self._to_tell, False
        return told

    def _run(self) -> None:
        while not self._is_over:
            waiting = any(self._queues.values())
            for sender, _ in self._poller.poll(1 if waiting else 20):
                if sender is self._front:
                    peer, *parts = self._front.recv_multipart()
                    self._heard(peer, True, parts)
                else:
                    peer = next(name for name, back in self._backs.items() if back is sender)
                    self._heard(peer, False, sender.recv_multipart())
            self._pass_on()
        self._context.destroy(linger=0)

    def copies(self) -> int:
        """How many copies arrive of a message that is posted now."""
        chance, faults = self._random.random(), self._faults
        if self._is_faulty and chance < faults.dropped:
            self.dropped += 1
            self._to_tell = True
            return 0
        if self._is_faulty and chance < faults.dropped + faults.doubled:
            self.doubled += 1
            return 2
        return 1

    def _heard(self, peer: bytes, inward: bool, parts: list[bytes]) -> None:
        queue = self._queues.setdefault((peer, inward), deque())
        copies, due, chance, faults = 1, 0.0, self._random.random(), self._faults
        if self._is_faulty and chance < faults.dropped:
            copies = 0
            self.dropped += 1
            self._to_tell = True
        elif self._is_faulty and chance < faults.dropped + faults.doubled:
            copies = 2
            self.doubled += 1
        elif self._is_faulty and chance < faults.dropped + faults.doubled + faults.delayed:
            due = time.monotonic() + self._random.uniform(0, _DELAY)
            self.delayed += 1
        queue.extend([(due, parts)] * copies)

    def _pass_on(self) -> None:
        now = time.monotonic()
        for (peer, inward), queue in self._queues.items():
            while queue and queue[0][0] <= now:
                _, parts = queue.popleft()
                if inward:
                    self._back(peer).send_multipart(parts)
                else:
                    self._front.send_multipart([peer, *parts])

    def _back(self, peer: bytes) -> zmq.Socket[bytes]:
        if peer not in self._backs:
            back = self._context.socket(zmq.DEALER)
            back.setsockopt(zmq.IDENTITY, peer)
            back.setsockopt(zmq.LINGER, 0)
            back.connect(f"ipc://{self._behind}")
            self._poller.register(back, zmq.POLLIN)
            self._backs[peer] = back
        return self._backs[peer]


def _is_server(peer: zmq.Socket[bytes]) -> bool:
    return bool(peer.getsockopt(zmq.LAST_ENDPOINT).endswith(b"/server"))  # type: ignore[union-attr]


@contextmanager
def lossy_service(seed: int, faults: Faults, *, mailboxes: bool) -> Iterator[Callable[[], Lossy]]:
    """Inside the block a strategy that is made ``in_process`` has such a network; the answer is its proxy, once it is
    up. With ``mailboxes`` most messages go by them, and are lost and doubled there, too."""
    made: list[Lossy] = []

    def lossy_mailboxes(concerns_server: Callable[[Any], bool]) -> type[Mailboxes[Any]]:
        class LossyMailboxes(Mailboxes[Any]):
            """Nothing is late in memory, but messages to the server and of the server are lost and doubled."""

            def post(self, peer: Any, parts: Sequence[Buffer]) -> bool:
                copies = made[0].copies() if made and self and concerns_server(peer) else 1
                return all(super(LossyMailboxes, self).post(peer, parts) for _ in range(copies))

        return LossyMailboxes

    def admission(
        poller: Poller[zmq.Socket[bytes]], router: zmq.Socket[bytes], config: service.ServerConfig
    ) -> Admission:
        path = config.endpoint.removeprefix("ipc://")
        behind = Admission(poller, router, f"{path}.behind")
        made.append(Lossy(path, f"{path}.behind", seed, faults))
        return behind

    class Telling(Service):
        """A supervisor that says Serving again whenever a message was dropped."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "mailboxes": mailboxes})
            self._mailroom._spins = False  # in threads, who looks for mail keeps the others from running

        def start(self) -> None:
            super().start()
            self._loop.call_later(_TELL_EVERY, self._tell_again)

        def _tell_again(self) -> None:
            if made and made[0].take_dropped() and self._state == "serving":
                self._tell_all(self._serving())
            self._loop.call_later(_TELL_EVERY, self._tell_again)

    with ExitStack() as patches:
        for module, name, replacement in (
            (service, "_admission", admission),
            (threads, "Service", Telling),
            (service, "Mailboxes", lossy_mailboxes(lambda peer: True)),
            (worker_session, "Mailboxes", lossy_mailboxes(lambda peer: peer == worker_session.SERVER)),
            (controller_session, "Mailboxes", lossy_mailboxes(_is_server)),
        ):
            patches.enter_context(mock.patch.object(module, name, replacement))
        try:
            yield lambda: made[0]
        finally:
            for lossy in made:
                lossy.close()
