"""The doorbells of mailboxes, for a process that waits in a loop of callbacks.

A :class:`~cs_runtime.transport.mailboxes.Mailboxes` registers its doorbells here, and the loop watches them. Before the
loop waits, ``is_there`` must have returned False; after it has waited, :meth:`Doorbells.woken` comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cs_runtime.transport.mailboxes import Mailboxes

__all__ = ["Doorbells"]


class Doorbells:
    """Has a loop watch doorbells, and remembers those that have rung. ::

    doorbells = Doorbells(loop.watch, loop.unwatch)
    mailboxes = Mailboxes(doorbells, 0.0)
    """

    def __init__(self, watch: Callable[[int, Callable[[], None]], object], unwatch: Callable[[int], object]) -> None:
        """``watch`` has the loop call something whenever a descriptor is readable, and ``unwatch`` ends that."""
        self._watch, self._unwatch = watch, unwatch
        self._rung: set[int] = set()

    def register(self, descriptor: int, flags: int) -> None:
        """Watch a doorbell."""
        self._watch(descriptor, partial(self._rung.add, descriptor))

    def unregister(self, descriptor: int) -> None:
        """Watch it no more."""
        self._unwatch(descriptor)
        self._rung.discard(descriptor)

    def woken(self, mailboxes: Mailboxes[bytes]) -> None:
        """The loop has waited: reset the doorbells that have rung."""
        mailboxes.awake(self._rung)
        self._rung.clear()
