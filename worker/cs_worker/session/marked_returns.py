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

from cs_proto import marks
from cs_proto.messages import Note, Return, Run, Value

__all__ = ["MarkedReturns"]

# After a Return that is no base: no number of records equals it.
_NEVER = -1


class MarkedReturns:
    """What the server has of this worker's Returns."""

    def __init__(self) -> None:
        self._bases = marks.Bases()
        self._controller = b""
        # How many records the server was sent up to the last Return.
        self._sent = _NEVER
        self._is_taken = False
        # The base that the last bytes of :meth:`body` name.
        self._named: Return | None = None
        # A base that is kept and has no name, and the bytes of a mark with its own notes, up to the value: a dense step
        # brings the notes of its base again and again.
        self._own: tuple[Return, bytes] | None = None

    def said(self, controller: bytes, returned: Return, sent: int) -> None:
        """The server was sent ``returned`` in full, of a run of ``controller``. It was the record number ``sent``."""
        if controller != self._controller:
            self._bases, self._controller = marks.Bases(), controller
        self._sent = sent if self._bases.keep(returned) else _NEVER
        self._is_taken, self._own = False, None

    def marked(self, run: Run, body: bytes) -> Callable[[], Return]:
        """The mark with these bytes, the last ones of :meth:`body`, said that ``run`` has returned. The result makes
        the Return for which it stands."""
        assert self._named is not None
        self._is_taken = False
        return partial(marks.returned, self._named, run.run[0], body)

    def taken(self) -> None:
        """The last Return has been acted on, so the server has taken it and all that it was sent before."""
        self._is_taken = True

    def forget(self) -> None:
        """Another server serves."""
        self._bases, self._own = marks.Bases(), None

    def body(
        self, controller: bytes, run: Run, notes: Sequence[Note], count: int, value: Value, sent: int
    ) -> bytes | None:
        """The bytes of the mark that says the Return of ``run``; None if it has to be said in full. The server was sent
        ``sent`` records so far."""
        if not self._is_taken or sent != self._sent or controller != self._controller:
            return None
        if run.changes or len(run.run) > 1 or value.arrays:
            return None
        given = tuple(notes)
        if self._own is not None:
            base, beginning = self._own
            is_like = (base.series, base.lookahead, base.count) == (run.series, run.lookahead, count)
            if is_like and base.notes == given:
                self._named = base
                return beginning + value.body
        found = self._named = self._bases.find(run.series, run.lookahead, given, count, run.name)
        if found is None:
            return None
        places = list(marks.places_of(given))
        if not found.name and found.notes == given:
            self._own = found, marks.marked(found.run[0], b"", None, places)
        return marks.marked(found.run[0], value.body, run.step if found.name else None, places)
