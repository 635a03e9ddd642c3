"""Mailboxes: messages between two processes of one machine through shared memory, beside ZeroMQ.

For each direction a mailbox has a ring of bytes and a mark (:mod:`.rings`), and an eventfd as the reader's doorbell.
The writer rings it only while the reader sleeps. A message that is too large, or that finds the ring full, goes
*elsewhere*: over ZeroMQ. This module does not know what messages mean.

A *fence* keeps a load from passing an earlier store: acquiring a free lock is an atomic read-modify-write.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Generic, Protocol, TypeVar

from cs_proto import messages
from cs_proto.errors import PeerProtocolError
from cs_proto.records import Buffer

from .rings import HEAD, LEFT, MARK, NBYTES, SLEEPS, Incoming, Mark, Outgoing

__all__ = [
    "Mailbox",
    "Mailboxes",
    "Patience",
    "Registrar",
]

_log = logging.getLogger("central_storage.mailbox")

# A yield that takes longer than this, in seconds, shows that another process wants the processor.
_WANTED = 500e-6
# After that, the seconds without polling. They double if it happens again soon, up to the longest pause.
_PAUSE = 0.02
_LONGEST_PAUSE = 1.0

K = TypeVar("K")


class Mailbox:
    """One end of a mailbox. Used by one thread."""

    def __init__(
        self,
        number: int,
        memory: memoryview,
        doorbells: Sequence[int],
        *,
        is_maker: bool,
        spins: bool,
        takes_marks: bool = True,
    ) -> None:
        """``memory`` has :data:`NBYTES`. ``doorbells`` are the eventfds of the maker and of the opener; they do not
        block, and this object owns them from now on. ``takes_marks`` tells whether the other end does."""
        rings = (memory[: NBYTES // 2], memory[NBYTES // 2 : NBYTES])
        here, there = doorbells
        self.number = number
        self.spins = spins
        self.takes_marks = takes_marks
        #: Whether the owner looks for the next mark itself, so that it is no mail.
        self.keeps_marks = False
        #: How often the doorbell at the other end was rung.
        self.rung = 0
        #: The two directions.
        self.incoming, self.outgoing = Incoming(rings[not is_maker]), Outgoing(rings[is_maker])
        #: The descriptors of the doorbells of this end and of the other, readable after a ring; -1 once closed.
        self.doorbell, self.other = (here, there) if is_maker else (there, here)
        #: How many messages were sent elsewhere. The first one is.
        self.sent = 0
        #: How many messages of the other end came elsewhere: the opener has received the Offer, or the maker the
        #: MailboxAccepted.
        self.came = 1
        #: Whether the next posted message has to wait for one that was sent elsewhere before it, as far as is known.
        self.must_wait = False

    def address(self, word: int, *, is_incoming: bool) -> int:
        """The address of a word of :mod:`.rings` in one direction, for code that reads or writes it itself."""
        words = (self.incoming if is_incoming else self.outgoing).words
        return ctypes.addressof(ctypes.c_uint64.from_buffer(words, 8 * word))

    def came_elsewhere(self) -> None:
        """Count a message of the other end that came elsewhere."""
        self.came += 1
        self.must_wait = False

    def close(self) -> None:
        """Close the doorbells. Idempotent."""
        if self.doorbell >= 0:
            os.close(self.doorbell)
            os.close(self.other)
            self.doorbell = self.other = -1


class Patience:
    """Polls for mail before a process sleeps. It yields the processor between two looks, and pauses polling while
    other processes want the processor."""

    def __init__(
        self,
        limit: float,
        clock: Callable[[], float] = time.monotonic,
        give_way: Callable[[], object] = os.sched_yield,
    ) -> None:
        """``limit`` is in seconds; 0 switches polling off. ``clock`` returns seconds, ``give_way`` yields."""
        self._limit = limit
        self._clock = clock
        self._give_way = give_way
        self._pause = 0.0
        self._until = 0.0

    def wait(self, look: Callable[[], object], before: float) -> bool:
        """Whether ``look`` came true. ``before`` is the time now."""
        if not self._limit or before < self._until:
            return False
        deadline = before + self._limit
        while True:
            self._give_way()
            is_there, now = bool(look()), self._clock()
            if now - before > _WANTED:
                is_soon = now - self._until < _LONGEST_PAUSE
                self._pause = min(2 * self._pause, _LONGEST_PAUSE) if is_soon and self._pause else _PAUSE
                self._until = now + self._pause
                return is_there
            if is_there or now >= deadline:
                return is_there
            before = now


class Registrar(Protocol):
    """The registering half of :class:`~.poller.Poller`."""

    def register(self, descriptor: int, flags: int) -> object:
        """Wait for ``descriptor``, too."""

    def unregister(self, descriptor: int) -> object:
        """Stop waiting for ``descriptor``."""


class Mailboxes(Generic[K]):
    """The mailboxes of one process, by the peer at the other end, and the messages that came over ZeroMQ in between."""

    def __init__(self, poller: Registrar, patience: float, *, rings_late: bool = False) -> None:
        """``poller`` waits for the doorbells. This process polls for ``patience`` seconds before it sleeps. With
        ``rings_late`` the owner calls :meth:`ring` after it has posted to all peers, because a woken peer may preempt
        it at once."""
        self._poller = poller
        self._fence: AbstractContextManager[object] = threading.Lock()
        self._patience = Patience(patience)
        self._rings_late = rings_late
        #: The peers that got a message or a mark since the last :meth:`ring`, and their mailboxes.
        self.unrung: list[tuple[K, Mailbox]] = []
        self._boxes: dict[K, Mailbox] = {}
        #: The same in the order in which a look goes through them.
        self._in_order: list[tuple[K, Mailbox]] = []
        self._offered: dict[K, Mailbox] = {}
        self._due: deque[tuple[K, Sequence[Buffer] | Mark]] = deque()
        self._rung = 0
        self._is_asleep = False
        #: Called at every look for mail, if set. It does what needs no message, and returns whether there was something
        #: to do.
        self.attend: Callable[[], bool] | None = None
        #: Messages that were posted and marks that were left here, and how often a doorbell woke this process.
        self.posted = 0
        self.woken = 0

    @property
    def rung(self) -> int:
        """How often doorbells of others were rung here."""
        return self._rung + sum(box.rung for box in self._boxes.values())

    def __bool__(self) -> bool:
        """Whether this process has a mailbox."""
        return bool(self._boxes)

    # --- mailboxes come and go ------------------------------------------------------------------------------------

    def offer(self, peer: K, made: messages.Mailbox, descriptors: Sequence[int]) -> messages.Offer | None:
        """The Offer to send ``peer`` over ZeroMQ for a mailbox that the supervisor has made; None if it refused. From
        now on messages to ``peer`` are counted. Until it has answered, none is posted."""
        box = self._mapped(made, descriptors, is_maker=True)
        if isinstance(box, str):
            _log.debug("no mailbox with %r: %s", peer, box)
            self._give_up(peer)  # an earlier one is of a process that has gone
            return None
        if peer in self._offered:
            self._offered[peer].close()
        self._offered[peer] = box
        return messages.Offer(box.number)

    def taken(self, peer: K, answer: messages.MailboxAccepted) -> None:
        """Take the answer of ``peer`` to the offer."""
        if peer not in self._offered or self._offered[peer].number != answer.mailbox:
            return
        box = self._offered.pop(peer)
        if answer.refused:
            _log.info("%r does not open its mailbox: %s", peer, answer.refused)
            box.close()
            self._give_up(peer)  # as above
        else:
            self._add(peer, box)

    def open(self, peer: K, opened: messages.Mailbox, descriptors: Sequence[int]) -> messages.MailboxAccepted:
        """Use a mailbox that ``peer`` has offered. Returns the answer, to be sent over ZeroMQ at once."""
        box = self._mapped(opened, descriptors, is_maker=False)
        if isinstance(box, str):
            _log.info("no mailbox with %r: %s", peer, box)
            return messages.MailboxAccepted(opened.mailbox, box)
        self._add(peer, box)
        return messages.MailboxAccepted(box.number, "")

    def _mapped(self, mailbox: messages.Mailbox, descriptors: Sequence[int], *, is_maker: bool) -> Mailbox | str:
        if mailbox.refused:
            return mailbox.refused
        if len(descriptors) != 3:
            return "its descriptors did not arrive: the supervisor is not of this machine"
        from cs_runtime.shared_memory.mapping import Mapping  # and NumPy, without which the supervisor does

        memory, *doorbells = descriptors
        try:
            mapping = Mapping("mailbox", memory, NBYTES, writable=True)
        except OSError as error:
            for doorbell in doorbells:
                os.close(doorbell)
            return f"its memory cannot be mapped ({error.strerror})"
        return Mailbox(
            mailbox.mailbox,
            mapping.memory,
            doorbells,
            is_maker=is_maker,
            spins=mailbox.spins,
            takes_marks=not mailbox.is_passed_on,
        )

    def _add(self, peer: K, box: Mailbox) -> None:
        """Replace the mailbox with ``peer``. Messages that are left in the old one count as received."""
        before = self._boxes.get(peer)
        if before is not None:
            self._take_rest(peer, before)
            self._drop(before)
        self._boxes[peer] = box
        self._in_order = [*self._boxes.items()]
        self._poller.register(box.doorbell, select.POLLIN)

    def number(self, peer: K) -> int:
        """The number of the mailbox with ``peer``; 0 if there is none."""
        return self._boxes[peer].number if peer in self._boxes else 0

    def peers(self) -> tuple[K, ...]:
        """The peers that have a mailbox here."""
        return tuple(self._boxes)

    def forget(self, peer: K) -> None:
        """Drop the mailbox with ``peer``, which is gone. Messages that it posted before still count."""
        if peer in self._offered:
            self._offered.pop(peer).close()
        self._give_up(peer)

    def _give_up(self, peer: K) -> None:
        """Use the mailbox with ``peer`` no more, and have ``peer`` see that."""
        if peer in self._boxes:
            box = self._boxes.pop(peer)
            self._in_order = [*self._boxes.items()]
            self._leave(box)
            self._take_rest(peer, box)
            self._drop(box)

    def close(self) -> None:
        """Close all mailboxes. Idempotent."""
        for box in (*self._boxes.values(), *self._offered.values()):
            box.close()
        self._boxes.clear()
        self._in_order.clear()
        self._offered.clear()

    # --- messages -------------------------------------------------------------------------------------------------

    def post(self, peer: K, parts: Sequence[Buffer]) -> bool:
        """Post a message. False if it has to go over ZeroMQ; the caller then calls :meth:`sent` once it has gone."""
        box = self._boxes.get(peer)
        if box is None or peer in self._offered or not box.sent or not box.outgoing.post(parts, box.sent):
            return False
        self.posted += 1
        self.unrung.append((peer, box))
        if not self._rings_late:
            self.ring()
        return True

    def mark(self, peer: K, number: int, body: Buffer = b"") -> bool:
        """Leave a mark for ``peer``: a number, which is not that of the mark before, and bytes. They take the place of
        the mark before, seen or not. False if it has to be sent as a message."""
        box = self._boxes.get(peer)
        if box is None or peer in self._offered or not (box.takes_marks and box.sent):
            return False
        if not box.outgoing.mark(number, body):
            return False
        self.posted += 1
        self.unrung.append((peer, box))
        left = () if self._rings_late else self.ring()
        return not left

    def box(self, peer: K) -> Mailbox | None:
        """The mailbox with ``peer``, if both use it."""
        return None if peer in self._offered else self._boxes.get(peer)

    def marked(self, peers: Sequence[K]) -> None:
        """Note marks whose words the owner has stored itself, one for each of ``peers``. It calls :meth:`ring`."""
        for peer in peers:
            self.unrung.append((peer, self._boxes[peer]))
        self.posted += len(peers)

    def ring(self) -> Sequence[tuple[K, int]]:
        """Wake the peers that sleep and got a message or a mark since the last call. Returns those that have left their
        mailboxes, each with the number of its last mark: it takes that mark afterwards, but may have looked before it
        was there."""
        if not self.unrung:
            return ()
        with self._fence:
            pass
        left: list[tuple[K, int]] = []
        for peer, box in self.unrung:
            words = box.outgoing.words
            if words[SLEEPS] and box.other >= 0:
                box.rung += 1
                os.eventfd_write(box.other, 1)
            if words[LEFT]:
                left.append((peer, box.outgoing.last))
        self.unrung = []  # now: after Ctrl-C in between, the next call wakes them
        return left

    def sent(self, peer: K) -> None:
        """Count a message that went to ``peer`` over ZeroMQ."""
        box = self._offered.get(peer) or self._boxes.get(peer)
        if box is not None:
            box.sent += 1

    def came(self, peer: K, parts: Sequence[Buffer]) -> None:
        """Queue a message of ``peer`` that came over ZeroMQ. :meth:`take` returns it after those posted before it."""
        box = self._boxes.get(peer)
        if box is not None:
            if box.keeps_marks:
                self.stop_attending()
            if (mark := box.incoming.take_mark()) is not None:  # as in take
                self._due.append((peer, mark))
            while self._boxes.get(peer) is box and (posted := self._take_from(peer, box)) is not None:
                self._due.append((peer, posted))
            box.came_elsewhere()
        self._due.append((peer, parts))

    def take(self) -> tuple[K, Sequence[Buffer] | Mark] | None:
        """The next message or mark, and its sender; None if there is none that can be taken yet. A mark comes before
        the messages of its sender. A message without parts stands for a damaged mailbox."""
        if self._due:
            return self._due.popleft()
        for each in self._in_order:
            peer, box = each
            incoming = box.incoming
            has_mark = incoming.words[MARK] != incoming.mark and not box.keeps_marks
            if not has_mark and (incoming.words[HEAD] == incoming.tail or box.must_wait):
                continue  # as in _with_mail
            if box.keeps_marks:  # its mark may be older than the message
                self.stop_attending()
            if incoming.words[MARK] != incoming.mark and (mark := incoming.take_mark()) is not None:
                return peer, mark
            if (parts := self._take_from(peer, box)) is not None:
                # A mark that was left since may be older than the message.
                if incoming.words[MARK] != incoming.mark and (mark := incoming.take_mark()) is not None:
                    self._due.append((peer, parts))
                    return peer, mark
                if parts and self._in_order[-1] is not each:  # the others first, next time
                    self._in_order = [*(other for other in self._in_order if other is not each), each]
                return peer, parts
        return None

    def stop_attending(self) -> None:
        """Call :attr:`attend` no more. All marks are mail."""
        self.attend = None
        for box in self._boxes.values():
            box.keeps_marks = False

    # --- waiting --------------------------------------------------------------------------------------------------

    def is_there(self, quiet: K | None = None) -> bool:
        """Whether there may be a message to take, now or after polling for a while. If not, the process may sleep:
        every peer except ``quiet`` rings for what it posts. Call :meth:`awake` after the sleep."""
        return self._with_mail() is not None or self.comes(quiet, time.monotonic())

    def comes(self, quiet: K | None, now: float) -> bool:
        """As :meth:`is_there`, without a look before the wait: :meth:`take` has just found nothing. ``now`` is the
        time."""
        if self._due:
            return True
        if not self._in_order:
            return False
        if self.attend is not None and self.attend():
            return True
        look = self._with_mail if self.attend is None else self._look  # a process looks often
        if self._in_order[0][1].spins and self._patience.wait(look, now):
            return True
        for peer, box in self._in_order:
            if peer != quiet:
                box.incoming.words[SLEEPS] = True
        self._is_asleep = True
        with self._fence:
            pass
        if look():
            self.awake(())
            return True
        return False

    def awake(self, ready: Iterable[object]) -> None:
        """Note the end of the sleep. ``ready`` are the descriptors that were found readable."""
        if not self._is_asleep:
            return
        self._is_asleep = False
        for _, box in self._in_order:
            box.incoming.words[SLEEPS] = False
            if box.doorbell in ready:
                self.woken += 1
                try:  # noqa: SIM105  (suppress() is slower, and this runs at every step)
                    os.eventfd_read(box.doorbell)
                except BlockingIOError:
                    pass

    def _look(self) -> bool:
        return (self.attend is not None and self.attend()) or self._with_mail() is not None

    def _with_mail(self) -> tuple[K, Mailbox] | None:
        """A mailbox with a mark or a posted message that can be taken, as far as is known, and its peer."""
        for each in self._in_order:
            box = each[1]
            incoming = box.incoming
            if incoming.words[MARK] != incoming.mark and not box.keeps_marks:
                return each
            if incoming.words[HEAD] != incoming.tail and not box.must_wait:
                return each
        return None

    def _take_from(self, peer: K, box: Mailbox) -> Sequence[Buffer] | None:
        """The next message of ``box``. A damaged mailbox is dropped, and an empty message stands for it."""
        incoming = box.incoming
        try:
            parts = incoming.take(box.came)
        except PeerProtocolError as error:
            _log.warning("%r: %s", peer, str(error))
            self._boxes.pop(peer, None)
            self._in_order = [*self._boxes.items()]
            self._leave(box)
            if (mark := incoming.take_mark()) is not None:
                self._due.append((peer, mark))
            self._drop(box)
            return ()
        if parts is None:
            box.must_wait = incoming.has_mail
        return parts

    def _take_rest(self, peer: K, box: Mailbox) -> None:
        if (mark := box.incoming.take_mark()) is not None:
            self._due.append((peer, mark))
        with suppress(PeerProtocolError):
            while (parts := box.incoming.take(box.came)) is not None:
                self._due.append((peer, parts))

    def _leave(self, box: Mailbox) -> None:
        """Have the writer send later messages and marks elsewhere. What it has left before can be taken then."""
        box.incoming.leave()
        with self._fence:
            pass

    def _drop(self, box: Mailbox) -> None:
        self.stop_attending()
        self._rung += box.rung
        if box.doorbell >= 0:
            self._poller.unregister(box.doorbell)
            box.close()
