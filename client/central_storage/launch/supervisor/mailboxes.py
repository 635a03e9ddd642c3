"""The supervisor's part of mailboxes: it makes their memory and doorbells and gives them to two processes.

A mailbox belongs to one connection between two processes. A restarted process gets new ones, so it never reads messages
to its predecessor. The supervisor closes its own descriptors as soon as both processes have theirs.
"""

from __future__ import annotations

import itertools
import os
import re
from contextlib import ExitStack

from central_storage.launch.affinity import core_count
from central_storage.launch.memory import Medium, Memfd
from cs_proto.errors import ConfigurationError
from cs_proto.frozen import frozen
from cs_proto.messages import Mailbox, MakeMailbox, OpenMailbox
from cs_runtime.transport.rings import IS_ORDERED, NBYTES

__all__ = ["Mailroom", "mailboxes_by_default", "transport_of", "why_no_mailboxes"]

_MAKERS = re.compile(r"controller|w\d+")
_OPENERS = re.compile(r"server|w\d+")


def why_no_mailboxes(medium: Medium, *, wanted: bool) -> str:
    """The reason why a service has no mailboxes; empty if it has them."""
    if not wanted:
        return "mailboxes are switched off"
    if not medium.is_shared:
        return "the processes of this service share no memory"
    return (
        ""
        if IS_ORDERED
        else f"mailboxes need a processor that keeps stores in order, which {os.uname().machine} is not"
    )


def transport_of(medium: Medium, *, mailboxes: bool) -> str:
    """The name of a service's transport. It includes mailboxes if they are wanted and possible."""
    has_mailboxes = not why_no_mailboxes(medium, wanted=mailboxes)
    return f"ipc + {'mailboxes + ' * has_mailboxes}{medium.title}"


def mailboxes_by_default() -> str:
    """The value of ``CS_MAILBOXES``, ``on`` or ``off``; ``on`` if it is not set. Raises ConfigurationError for
    others."""
    said = os.environ.get("CS_MAILBOXES") or "on"
    if said not in ("on", "off"):
        raise ConfigurationError(f"CS_MAILBOXES must be on or off, not {said!r:.40}")
    return said


@frozen
class _Made:
    maker: object
    opener: str
    descriptors: tuple[int, ...]


class Mailroom:
    """The mailboxes of one run that only their maker has received so far."""

    def __init__(self, run: str, why_none: str, *, is_passed_on: bool = False) -> None:
        """``run`` is the name of the run, which the kernel shows. If ``why_none`` is not empty, it is the reason with
        which every request is refused. With ``is_passed_on``, one end passes messages on to another machine: it takes
        no marks, and nobody polls for its mail, which comes later than that would last."""
        self._medium = Memfd(run)
        self._why_none = why_none
        self._is_passed_on = is_passed_on
        self._spins = core_count() > 1 and not is_passed_on
        self._numbers = itertools.count(1)
        self._made: dict[int, _Made] = {}

    def answer(self, asker: object, label: str, request: MakeMailbox | OpenMailbox) -> tuple[Mailbox, tuple[int, ...]]:
        """What the process ``asker`` with the label ``label`` gets for its request; the same as of :meth:`make`."""
        if isinstance(request, MakeMailbox):
            return self.make(asker, label, request.peer)
        return self.open(label, request.mailbox)

    def make(self, maker: object, label: str, opener: str) -> tuple[Mailbox, tuple[int, ...]]:
        """Make a mailbox between ``maker``, whose label is ``label``, and the process with the label ``opener``.
        Returns the answer, and the memory and doorbells, which the caller closes after it has sent them."""
        why = self._why_none
        if not why and not (_MAKERS.fullmatch(label) and _OPENERS.fullmatch(opener) and label != opener):
            why = f"there is no mailbox from {label} to {opener[:20]!r}"
        if why:
            return Mailbox(0, False, why), ()
        with ExitStack() as undo:
            try:
                opened = [_owned(undo, self._medium.make("mailbox", NBYTES, ""))]
                opened += [_owned(undo, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)) for _ in range(2)]
                copies = [_owned(undo, os.dup(descriptor)) for descriptor in opened]
            except OSError as error:
                return Mailbox(0, False, f"a mailbox cannot be made ({error.strerror})"), ()
            undo.pop_all()
        for number in [number for number, made in self._made.items() if (made.maker, made.opener) == (maker, opener)]:
            _close(self._made.pop(number).descriptors)  # the offer was lost, or is too late
        number = next(self._numbers)
        self._made[number] = _Made(maker, opener, tuple(opened))
        return Mailbox(number, self._spins, "", self._is_passed_on), tuple(copies)

    def open(self, label: str, number: int) -> tuple[Mailbox, tuple[int, ...]]:
        """The other end of a mailbox, for the process with the label ``label``. Returns the same as :meth:`make`."""
        made = self._made.get(number)
        if made is None or made.opener != label:
            return Mailbox(number, False, f"{label} was not offered mailbox {number}, or has it already"), ()
        del self._made[number]
        return Mailbox(number, self._spins, "", self._is_passed_on), made.descriptors

    def forget(self, maker: object) -> None:
        """Drop the mailboxes of ``maker``, which is gone."""
        for number in [number for number, made in self._made.items() if made.maker is maker]:
            _close(self._made.pop(number).descriptors)

    def close(self) -> None:
        """Close all descriptors. Idempotent."""
        for made in self._made.values():
            _close(made.descriptors)
        self._made.clear()


def _owned(undo: ExitStack, descriptor: int) -> int:
    undo.callback(os.close, descriptor)
    return descriptor


def _close(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
