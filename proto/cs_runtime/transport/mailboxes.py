"""Mailboxes: records between two processes of one machine by memory that both map, beside ZeroMQ.

A mailbox has two ends and, for each direction, a ring of bytes with one writer and one reader, and an eventfd as the
reader's doorbell, which is rung only while the reader sleeps. Too large a message, or one for a full ring, goes over
ZeroMQ as ever: each message in a ring says how many of the same sender went *elsewhere* before it, so the reader puts
both together in the order in which they were sent. Nothing here knows what messages mean.

A store must not pass an earlier store, nor a load an earlier load, as on x86-64: :data:`IS_ORDERED` says whether this
machine is one of these. Where a load must not pass a store, a *fence* stands between them: to enter a lock that nobody
else has is an atomic read-modify-write.
"""

from __future__ import annotations

import logging
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Generic, Protocol, TypeVar

from cs_proto import messages
from cs_proto.errors import PeerProtocolError
from cs_proto.records import Buffer

__all__ = [
    "IS_ORDERED",
    "NBYTES",
    "Incoming",
    "Mailbox",
    "Mailboxes",
    "Outgoing",
    "Patience",
    "Registrar",
]

_log = logging.getLogger("central_storage.mailbox")

#: Whether mailboxes work on this machine.
IS_ORDERED = os.uname().machine in ("x86_64", "AMD64")

# Each of the four words of 8 bytes has a cache line of its own, and the lines that the processor fetches beside it.
_WORDS_NBYTES = 4096
_HEAD, _TAIL, _SLEEPS, _LEFT = 0, 64, 128, 192
# Messages begin at multiples of this.
_UNIT = 64
#: Memory of a mailbox: two rings of 256 KiB. A message takes at most half of one, since it is never cut in two.
NBYTES = 2 * (_WORDS_NBYTES + 256 * 1024)

# How many messages went elsewhere before; bytes of the whole; number of parts. Then the length of each part.
_PREFIX = struct.Struct("<QII")
_WITH_LENGTHS = tuple(struct.Struct(f"<QII{count}I") for count in range(9))

# A yield that took longer than this many seconds: somebody else wants the processor.
_WANTED = 500e-6
# For so many seconds nothing is tried then, doubled where that happens again soon, up to the most.
_PAUSE = 0.02
_LONGEST_PAUSE = 1.0

K = TypeVar("K")


class Outgoing:
    """The writer's end of a ring."""

    def __init__(self, memory: memoryview) -> None:
        """``memory`` (uint8, writable) is zero at first. All but a page of it holds messages: a multiple of 128."""
        self.words = memory[:_WORDS_NBYTES].cast("Q")
        self._data = memory[_WORDS_NBYTES:]
        self._nbytes = len(self._data)
        self._head = 0
        self._tail = 0  # as far as was seen

    def post(self, parts: Sequence[Buffer], elsewhere: int) -> bool:
        """Write a message, after so many that went elsewhere. False where it is too large, there is no room, or the
        reader has left."""
        words = self.words
        if words[_LEFT]:
            return False
        count, header = len(parts), parts[0]
        if count == 1 and type(header) is bytes:
            lengths = [len(header)]
        else:
            lengths = [len(part) if type(part) is bytes else memoryview(part).nbytes for part in parts]
        size = _PREFIX.size + 4 * count + sum(lengths)
        if 2 * size > self._nbytes:
            return False
        head = self._head
        start, room = head % self._nbytes, size + -size % _UNIT
        skipped = self._nbytes - start if start + size > self._nbytes else 0
        if head + skipped + room - self._tail > self._nbytes:
            self._tail = words[_TAIL]
            if head + skipped + room - self._tail > self._nbytes:
                return False
        if skipped:
            _PREFIX.pack_into(self._data, start, 0, 0, 0)
            start = 0
        prefix = _with_lengths(count).pack(elsewhere, size, count, *lengths)
        self._data[start : start + size] = b"".join((prefix, *parts))
        self._head = words[_HEAD] = head + skipped + room
        return True


class Incoming:
    """The reader's end of a ring."""

    def __init__(self, memory: memoryview) -> None:
        """As :class:`Outgoing`."""
        self.words = memory[:_WORDS_NBYTES].cast("Q")
        #: What has been taken ends here.
        self.tail = 0
        self._data = memory[_WORDS_NBYTES:]
        self._nbytes = len(self._data)

    @property
    def has_mail(self) -> bool:
        """Whether something has been posted and not taken."""
        return self.words[_HEAD] != self.tail

    def take(self, elsewhere: int) -> list[bytes] | None:
        """The parts of the next message, where so many that went elsewhere have come: one that was posted after more
        has to wait. None where there is none.

        Raises :class:`PeerProtocolError` where the memory holds what no writer writes; it is of no more use then.
        """
        head, tail = self.words[_HEAD], self.tail
        if head == tail:
            return None
        start, there = tail % self._nbytes, head - tail
        if there > self._nbytes or there <= 0 or there % _UNIT:
            raise _damaged()
        before, size, count = _PREFIX.unpack_from(self._data, start)
        if not count:
            tail += self._nbytes - start
            start, there = 0, head - tail
            if there <= 0:
                raise _damaged()
            before, size, count = _PREFIX.unpack_from(self._data, 0)
        if before > elsewhere:
            return None
        at = start + _PREFIX.size + 4 * count
        end = start + size
        if not count or size > there or at > end or end > self._nbytes:
            raise _damaged()
        lengths = _with_lengths(count).unpack_from(self._data, start)[3:]
        if at + sum(lengths) != end:
            raise _damaged()
        parts = []
        for length in lengths[:-1]:
            parts.append(bytes(self._data[at : at + length]))
            at += length
        parts.append(bytes(self._data[at:end]))
        self.tail = self.words[_TAIL] = tail + size + -size % _UNIT
        return parts

    def sleep(self, sleeps: bool) -> None:
        """Have the doorbell rung for what is posted from now on, or not. A fence must follow before the last look."""
        self.words[_SLEEPS] = sleeps

    def leave(self) -> None:
        """Have what is posted from now on go elsewhere: its writer may live although it is thought dead."""
        self.words[_LEFT] = True


class Mailbox:
    """One end of a mailbox. Used by one thread."""

    def __init__(
        self, number: int, memory: memoryview, doorbells: Sequence[int], *, is_maker: bool, spins: bool
    ) -> None:
        """``memory`` has :data:`NBYTES`; ``doorbells`` are the maker's and the opener's eventfds, which do not block
        and are owned from here on."""
        rings = (memory[: NBYTES // 2], memory[NBYTES // 2 : NBYTES])
        here, there = doorbells
        self.number = number
        self.spins = spins
        #: How often the doorbell at the other end was rung.
        self.rung = 0
        self._in, self._out = Incoming(rings[not is_maker]), Outgoing(rings[is_maker])
        self._words = self._in.words
        self._own, self._other = (here, there) if is_maker else (there, here)
        self._sent = 0
        self._came = 1  # the Offer to who opens it, or the Taken to who made it
        self._must_wait = False  # what is posted next, for what was sent elsewhere before it

    def fileno(self) -> int:
        """Readable when the doorbell was rung; -1 once closed."""
        return self._own

    def post(self, parts: Sequence[Buffer]) -> bool:
        """Send a message, of which :meth:`ring` tells. False where it has to go elsewhere, as the first does; then
        :meth:`sent_elsewhere` has to be called."""
        return bool(self._sent) and self._out.post(parts, self._sent)

    def ring(self) -> None:
        """Wake the reader of what was posted, where it sleeps. A fence must come before."""
        if self._out.words[_SLEEPS] and self._other >= 0:
            self.rung += 1
            os.eventfd_write(self._other, 1)

    def sent_elsewhere(self) -> None:
        """A message was sent that was not posted."""
        self._sent += 1

    def came_elsewhere(self) -> None:
        """A message of the other end came that was not posted."""
        self._came += 1
        self._must_wait = False

    @property
    def has_mail(self) -> bool:
        """Whether something was posted and not taken, and is not known to have to wait."""
        return self._words[_HEAD] != self._in.tail and not self._must_wait

    def take(self) -> list[bytes] | None:
        """As :meth:`Incoming.take`."""
        parts = self._in.take(self._came)
        if parts is None:
            self._must_wait = self._in.has_mail
        return parts

    def sleep(self, sleeps: bool) -> None:
        """As :meth:`Incoming.sleep`."""
        self._words[_SLEEPS] = sleeps

    def leave(self) -> None:
        """As :meth:`Incoming.leave`."""
        self._in.leave()

    def heard(self) -> None:
        """The doorbell may ring again."""
        try:  # noqa: SIM105  (at every step)
            os.eventfd_read(self._own)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close the doorbells. Idempotent."""
        if self._own >= 0:
            os.close(self._own)
            os.close(self._other)
            self._own = self._other = -1


class Patience:
    """How a process waits for mail before it sleeps: it looks again and again and gives way in between, as long as
    nobody else wants its processor."""

    def __init__(
        self,
        limit: float,
        clock: Callable[[], float] = time.monotonic,
        give_way: Callable[[], object] = os.sched_yield,
    ) -> None:
        """``limit`` in seconds; 0: do not. ``clock`` tells seconds, ``give_way`` lets others run."""
        self._limit = limit
        self._clock = clock
        self._give_way = give_way
        self._pause = 0.0
        self._until = 0.0

    def wait(self, look: Callable[[], bool]) -> bool:
        """Whether ``look`` came true."""
        if not self._limit:
            return False
        before = self._clock()
        if before < self._until:
            return False
        deadline = before + self._limit
        while True:
            self._give_way()
            is_there, now = look(), self._clock()
            if now - before > _WANTED:
                is_soon = now - self._until < _LONGEST_PAUSE
                self._pause = min(2 * self._pause, _LONGEST_PAUSE) if is_soon and self._pause else _PAUSE
                self._until = now + self._pause
                return is_there
            if is_there or now >= deadline:
                return is_there
            before = now


class Registrar(Protocol):
    """Whom a process tells what it waits for."""

    def register(self, descriptor: int, flags: int) -> object:
        """Wait for ``descriptor``, too."""

    def unregister(self, descriptor: int) -> object:
        """Not any more."""


class Mailboxes(Generic[K]):
    """The mailboxes of one process, by who is at the other end, with what came over ZeroMQ in between."""

    def __init__(self, poller: Registrar, patience: float, *, rings_late: bool = False) -> None:
        """Doorbells are registered with ``poller``. This process looks for mail for ``patience`` seconds before it
        sleeps. With ``rings_late`` the owner calls :meth:`ring` for what it has
        posted: whom it wakes may take its processor at once, before others have what is for them."""
        self._poller = poller
        self._fence: AbstractContextManager[object] = threading.Lock()
        self._patience = Patience(patience)
        self._rings_late = rings_late
        self._unrung: list[Mailbox] = []
        self._boxes: dict[K, Mailbox] = {}
        self._offered: dict[K, Mailbox] = {}
        self._due: deque[tuple[K, Sequence[Buffer]]] = deque()
        self._rung = 0
        self._is_asleep = False
        #: Messages that were posted here, and how often a doorbell woke this process.
        self.posted = 0
        self.woken = 0

    @property
    def rung(self) -> int:
        """How often doorbells of others were rung here."""
        return self._rung + sum(box.rung for box in self._boxes.values())

    def __bool__(self) -> bool:
        """Whether there is a mailbox."""
        return bool(self._boxes)

    # --- mailboxes come and go ------------------------------------------------------------------------------------

    def offer(self, peer: K, made: messages.Mailbox, descriptors: Sequence[int]) -> messages.Offer | None:
        """What to tell ``peer``, over ZeroMQ, of the mailbox that the supervisor has made; None where it has made none.
        From now on what is sent is counted; until ``peer`` has answered, nothing is posted to it."""
        box = self._mapped(made, descriptors, is_maker=True)
        if isinstance(box, str):
            _log.debug("no mailbox with %r: %s", peer, box)
            return None
        if peer in self._offered:
            self._offered[peer].close()
        self._offered[peer] = box
        return messages.Offer(box.number)

    def taken(self, peer: K, answer: messages.MailboxAccepted) -> None:
        """``peer`` has answered the offer, over ZeroMQ."""
        if peer not in self._offered or self._offered[peer].number != answer.mailbox:
            return
        box = self._offered.pop(peer)
        if answer.refused:
            _log.warning("%r does not open its mailbox: %s", peer, answer.refused)
            box.close()
        else:
            self._add(peer, box)

    def open(self, peer: K, opened: messages.Mailbox, descriptors: Sequence[int]) -> messages.MailboxAccepted:
        """Use the mailbox that ``peer`` has offered; what to answer, over ZeroMQ, at once."""
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
        return Mailbox(mailbox.mailbox, mapping.memory, doorbells, is_maker=is_maker, spins=mailbox.spins)

    def _add(self, peer: K, box: Mailbox) -> None:
        """What is left in the mailbox with ``peer`` before this one has come, too."""
        before = self._boxes.get(peer)
        if before is not None:
            self._take_rest(peer, before)
            self._drop(before)
        self._boxes[peer] = box
        self._poller.register(box.fileno(), select.POLLIN)

    def number(self, peer: K) -> int:
        """Of the mailbox with ``peer``; 0 where there is none."""
        return self._boxes[peer].number if peer in self._boxes else 0

    def peers(self) -> tuple[K, ...]:
        """Who has a mailbox here."""
        return tuple(self._boxes)

    def forget(self, peer: K) -> None:
        """``peer`` is gone. What it posted before counts."""
        if peer in self._offered:
            self._offered.pop(peer).close()
        if peer in self._boxes:
            box = self._boxes.pop(peer)
            box.leave()
            self._take_rest(peer, box)
            self._drop(box)

    def close(self) -> None:
        """Let go of all of them. Idempotent."""
        for box in (*self._boxes.values(), *self._offered.values()):
            box.close()
        self._boxes.clear()
        self._offered.clear()

    # --- messages -------------------------------------------------------------------------------------------------

    def post(self, peer: K, parts: Sequence[Buffer]) -> bool:
        """Send by mailbox. False where it has to go over ZeroMQ; then :meth:`sent` has to be called if it did."""
        box = self._boxes.get(peer)
        if box is None or peer in self._offered or not box.post(parts):
            return False
        self.posted += 1
        self._unrung.append(box)
        if not self._rings_late:
            self.ring()
        return True

    def ring(self) -> None:
        """Wake whoever sleeps of those to whom something was posted since the last time."""
        if self._unrung:
            with self._fence:
                pass
            for box in self._unrung:
                box.ring()
            self._unrung.clear()

    def sent(self, peer: K) -> None:
        """A message went to ``peer`` over ZeroMQ."""
        box = self._offered.get(peer) or self._boxes.get(peer)
        if box is not None:
            box.sent_elsewhere()

    def came(self, peer: K, parts: Sequence[Buffer]) -> None:
        """A message of ``peer`` came over ZeroMQ: :meth:`take` gives it after what was posted before it."""
        box = self._boxes.get(peer)
        if box is not None:
            while box.has_mail and (posted := self._take_from(peer, box)) is not None:
                self._due.append((peer, posted))
            box.came_elsewhere()
        self._due.append((peer, parts))

    def take(self) -> tuple[K, Sequence[Buffer]] | None:
        """The next message and who sent it; None where none has come that may be taken yet. One without parts stands
        for a mailbox that was damaged."""
        if self._due:
            return self._due.popleft()
        for peer, box in self._boxes.items():
            if box.has_mail and (parts := self._take_from(peer, box)) is not None:
                if len(self._boxes) > 1:  # the others first, next time
                    self._boxes[peer] = self._boxes.pop(peer)
                return peer, parts
        return None

    # --- waiting --------------------------------------------------------------------------------------------------

    def is_there(self, quiet: K | None = None) -> bool:
        """Whether there may be something to take, now or after a little patience. If not, whoever posts from now on
        rings, but for ``quiet``: the process may sleep, and has to call :meth:`awake` afterwards."""
        if self._due:
            return True
        if not self._boxes:
            return False
        if self._look():
            return True
        if next(iter(self._boxes.values())).spins and self._patience.wait(self._look):
            return True
        for peer, box in self._boxes.items():
            if peer != quiet:
                box.sleep(True)
        self._is_asleep = True
        with self._fence:
            pass
        if self._look():
            self.awake(())
            return True
        return False

    def awake(self, ready: Iterable[object]) -> None:
        """The process does not sleep any more; ``ready`` are the descriptors that were found readable."""
        if not self._is_asleep:
            return
        self._is_asleep = False
        for box in self._boxes.values():
            box.sleep(False)
            if box.fileno() in ready:
                box.heard()
                self.woken += 1

    def _look(self) -> bool:
        for box in self._boxes.values():  # noqa: SIM110  (looked again and again: a generator costs more than a loop)
            if box.has_mail:
                return True
        return False

    def _take_from(self, peer: K, box: Mailbox) -> Sequence[Buffer] | None:
        """What is next in ``box``. One that is damaged is given up, with a message that is none in its place."""
        try:
            return box.take()
        except PeerProtocolError as error:
            _log.warning("%r: %s", peer, str(error))
            self._boxes.pop(peer, None)
            box.leave()
            self._drop(box)
            return ()

    def _take_rest(self, peer: K, box: Mailbox) -> None:
        with suppress(PeerProtocolError):
            while (parts := box.take()) is not None:
                self._due.append((peer, parts))

    def _drop(self, box: Mailbox) -> None:
        self._rung += box.rung
        if box.fileno() >= 0:
            self._poller.unregister(box.fileno())
            box.close()


def _with_lengths(count: int) -> struct.Struct:
    return _WITH_LENGTHS[count] if count < len(_WITH_LENGTHS) else struct.Struct(f"<QII{count}I")


def _damaged() -> PeerProtocolError:
    return PeerProtocolError("its mailbox holds what nobody posts; something has written over that memory")
