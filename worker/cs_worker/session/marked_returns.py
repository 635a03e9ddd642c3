"""Decides which Returns are said by a mark, because they differ from an earlier one only in their run and value.

The *base* is the last Return that the server was sent in full. A mark has the number of a run, and as bytes the number
of the base's run and the encoded value. It stands for the base with that run and that value.

A mark overtakes messages, and takes the place of the mark before it. So a worker leaves one only if the server has
taken all that it was sent before. Nothing says that about a single message. The worker knows it if two things hold:

- The last thing that the server was sent is the Return before. It is the base, or was said by a mark.
- That Return has been acted on since: for a step of a series the server has said that the step is over; and a
  controller sends a run on its own only when it has the results of all runs before it.

Both Returns belong to runs of the same controller and the same series, or of none, since the base has to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from cs_proto.messages import ApplyPoint, Note, Return, Run, Value
from cs_proto.records import altered

__all__ = ["MarkedReturns"]


class MarkedReturns:
    """What the server has of this worker's Returns."""

    def __init__(self) -> None:
        self._base: Return | None = None
        self._controller = b""
        self._base_run = b""
        # How many records the server was sent up to the last Return.
        self._sent = 0
        self._is_taken = False

    def said(self, controller: bytes, returned: Return, sent: int) -> None:
        """The server was sent ``returned`` in full, of a run of ``controller``. It was the record number ``sent``."""
        self._base = returned if _can_serve(returned) else None
        self._controller, self._base_run = controller, returned.run[0].to_bytes(8, "little")
        self._sent, self._is_taken = sent, False

    def marked(self, run: Run, value: Value) -> Callable[[], Return]:
        """A mark said that ``run`` has returned ``value``. The result makes the Return for which it stands."""
        assert self._base is not None
        self._is_taken = False
        return partial(altered, self._base, run=run.run, value=value)

    def taken(self) -> None:
        """The last Return has been acted on, so the server has taken it and all that it was sent before."""
        self._is_taken = True

    def forget(self) -> None:
        """Another server serves."""
        self._base = None

    def body(
        self, controller: bytes, run: Run, notes: Sequence[Note], count: int, value: Value, sent: int
    ) -> bytes | None:
        """The bytes of the mark that says the Return of ``run``; None if it has to be said in full. The server was sent
        ``sent`` records so far."""
        base = self._base
        if (
            base is None
            or not self._is_taken
            or sent != self._sent
            or controller != self._controller
            or run.series != base.series
            or run.lookahead != base.lookahead
            or run.changes
            or len(run.run) > 1
            or count != base.count
            or value.arrays
            or tuple(notes) != base.notes
        ):
            return None
        return self._base_run + value.body


def _can_serve(returned: Return) -> bool:
    """Whether later Returns may be as ``returned`` but for their run and value. The base is kept, and compared with
    every Return, so what it holds must be small."""
    value = returned.value
    if value is None or value.arrays or returned.changes or len(returned.run) > 1:
        return False
    for note in returned.notes:
        if type(note) is not ApplyPoint or any(update.sparse for update in note.updates):
            return False
    return True
