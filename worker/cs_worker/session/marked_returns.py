"""Decides which Returns are said by a mark, because they differ from an earlier one only in their run, their value, and
where the rows of their sparse gradients lie.

A *base* is a Return that the server was sent in full; the last ones are kept (:class:`cs_proto.marks.Bases`). A mark
has the number of a run, and as bytes the number of the base's run, these places, and the encoded value. It stands for
the base with that run, these places and that value.

A mark overtakes messages, and takes the place of the mark before it. So a worker leaves one only if the server has
taken all that it was sent before. Nothing says that about a single message. The worker knows it if two things hold:

- The last thing that the server was sent is the Return before. It is a base, or was said by a mark.
- That Return has been acted on since: for a step of a series the server has said that the step is over; and a
  controller sends a run on its own only when it has the results of all runs before it.

The base belongs to a run of the same controller and the same series, or of none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from cs_proto import marks
from cs_proto.messages import Note, Return, Run, Value

__all__ = ["Mark", "MarkedReturns"]

#: The bytes of a mark, and what makes the Return for which it stands.
Mark: TypeAlias = tuple[bytes, Callable[[], Return]]

# After a Return that is no base: no number of records equals it.
_NEVER = -1
# So many beginnings of marks are kept.
_KNOWN = 64


class MarkedReturns:
    """What the server has of this worker's Returns."""

    def __init__(self) -> None:
        #: The controller of the run under way.
        self.controller = b""
        #: Whether the last Return has been acted on, so the server has taken it and all that it was sent before.
        self.is_taken = False
        self._bases = marks.Bases()
        self._bases_of = b""  # the controller of their runs
        # How many records the server was sent up to the last Return.
        self._sent = _NEVER
        # A step that repeats brings the same notes, as the same objects, again and again. By series, lookahead, count
        # and the identities of the notes: the notes, which are held so that no others get these; their base, which has
        # no name; and the bytes of its mark up to the value.
        self._known: dict[tuple[int, ...], tuple[tuple[Note, ...], Return, bytes]] = {}

    def said(self, returned: Return, sent: int) -> None:
        """The server was sent ``returned`` in full. It was the record number ``sent``."""
        if self.controller != self._bases_of:
            self._bases, self._bases_of = marks.Bases(), self.controller
        self._sent = sent if self._bases.keep(returned) else _NEVER
        self.is_taken = False
        self._known.clear()  # a base may be kept no more

    def forget(self) -> None:
        """Another server serves."""
        self._bases = marks.Bases()
        self._known.clear()

    def mark_of(self, run: Run, notes: Sequence[Note], count: int, value: Value, sent: int) -> Mark | None:
        """The mark that says the Return of ``run``; None if it has to be said in full. One of the two follows. The
        server was sent ``sent`` records so far."""
        if not self.is_taken or sent != self._sent or self.controller != self._bases_of:
            return None
        if run.changes or len(run.run) > 1 or value.arrays:
            return None
        key = (run.series, run.lookahead, count, *map(id, notes))
        known = self._known.get(key)
        if known is None:
            given = tuple(notes)
            base = self._bases.find(run.series, run.lookahead, given, count, run.name)
            if base is None:
                return None
            places = list(marks.places_of(given))
            known = given, base, marks.marked(base.run[0], b"", run.step if base.name else None, places)
            if not base.name:  # else the mark has the step, too
                if len(self._known) >= _KNOWN:
                    self._known.clear()
                self._known[key] = known
        _, base, beginning = known
        body = beginning + value.body
        self.is_taken = False
        return body, partial(marks.returned, base, run.run[0], body)
