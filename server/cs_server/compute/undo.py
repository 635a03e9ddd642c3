"""What makes a commit survive the server: how far it is, and the old values of what is being overwritten.

A commit is a row of phases, one after the other. A phase changes memory in pieces, which go to lanes, one for each
thread, in an order that the commit alone decides. A piece's new values are computed from its old ones, so before they
are overwritten they are copied to the lane's area, and the lane's word then says that they are kept. A server that is
started over the same memory skips the phases and pieces that are done, gives the piece at hand its old values back and
does it again: the result has the bits of a commit that nobody disturbed.

Every word is written by one aligned store, in an order in which every prefix of the stores is such a state. A process
that is killed has done all stores up to some instruction and none behind it, so it is enough that the compiler keeps
their order (`jit` has fences). This module knows no rules and no messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from cs_runtime.failpoints import failpoint
from cs_server.rules import Array

__all__ = ["KEPT_NBYTES", "LANES", "UNDO_NBYTES", "Lane", "Place", "Undo", "used_nbytes"]

#: What a lane can keep of one array of a piece, and of the at most four arrays (a variable, three slots) of one.
KEPT_NBYTES = 256 * 1024
_ARRAYS = 4

#: More threads than this do not take part in one commit.
LANES = 256

_HEAD_NBYTES = 4096
_LINE_NBYTES = 64  # the words of a lane have a cache line of their own
_LANE_NBYTES = _LINE_NBYTES + _ARRAYS * KEPT_NBYTES

#: The whole memory; only what is used of it is ever touched.
UNDO_NBYTES = _HEAD_NBYTES + LANES * _LANE_NBYTES

# The head: the commit and phase at hand as one number, how many lanes that commit has, and the last one that is done.
_TAG, _COUNT, _DONE = 0, 1, 2
# A lane: the phase it is in (else it has not begun it), and 2 * (pieces done) + (the next piece is kept).
_LANE_TAG, _PROGRESS = 0, 1
_PHASES = 1 << 24

T = TypeVar("T")
Place: TypeAlias = tuple[Array, Any]
"""An array and an index: what is overwritten is ``array[index]``. All places of a piece have one dtype."""


def used_nbytes(lanes: int) -> int:
    """Bytes, from the first on, that commits of so many lanes may touch."""
    return _HEAD_NBYTES + min(lanes, LANES) * _LANE_NBYTES


class Lane:
    """One thread's part in a phase. Without memory it keeps nothing, and does everything."""

    def __init__(self, memory: NDArray[np.uint8] | None = None) -> None:
        if memory is None:
            memory = np.empty(0, np.uint8)
        self._line = memory[:_LINE_NBYTES].view(np.int64)
        self._words = self._line.data  # an array takes long for a single number
        self._area = memory[_LINE_NBYTES:]

    @property
    def progress(self) -> NDArray[np.int64]:
        """The word that says how far the phase is, for compiled code that goes through the pieces itself; empty where
        nothing is kept."""
        return self._line[_PROGRESS : _PROGRESS + 1]

    def area(self, dtype: np.dtype[Any]) -> Array:
        """Where compiled code keeps the arrays of a piece, back to back."""
        return self._area.view(dtype)

    @property
    def is_kept(self) -> bool:
        """Whether the old values of the piece at hand are kept: it may be half overwritten."""
        return bool(len(self._words) and self._words[_PROGRESS] & 1)

    @property
    def done(self) -> int:
        """How many pieces of the phase are done."""
        return self._words[_PROGRESS] >> 1 if len(self._words) else 0

    def enter(self, tag: int) -> None:
        """Begin a phase, or go on with it where a server before this one ended in the midst of it."""
        if len(self._words) and self._words[_LANE_TAG] != tag:
            _say(self._words, _PROGRESS, 0)
            _say(self._words, _LANE_TAG, tag)

    def rest(self, pieces: Sequence[T]) -> Iterator[T]:
        """Those of this lane's ``pieces`` that are not done. Each is done when the next one is asked for."""
        for number in range(self.done, len(pieces)):
            yield pieces[number]
            if len(self._words):
                _say(self._words, _PROGRESS, 2 * number + 2)

    def keep(self, places: Sequence[Place]) -> None:
        """Keep the old values of the piece at hand: of every place that is overwritten. Where they are kept already,
        because a server ended in the midst of it, they are given back."""
        if len(self._words) and not self.give_back(places):
            self.note([array[index] for array, index in places])

    def note(self, values: Sequence[Array]) -> None:
        """Keep these old values of the piece at hand, of which nothing has been overwritten."""
        if not len(self._words):
            return
        first = 0
        for old in values:
            self._area[first : first + old.nbytes].view(old.dtype).reshape(old.shape)[...] = old
            first += old.nbytes
        _say(self._words, _PROGRESS, 2 * self.done + 1)
        failpoint("server.kept")

    def give_back(self, places: Sequence[Place]) -> bool:
        """Put the old values that are kept back to ``places``; False where none are kept."""
        if not self.is_kept:
            return False
        first = 0
        for array, index in places:
            shape = array[index].shape
            nbytes = array.itemsize * int(np.prod(shape))
            array[index] = self._area[first : first + nbytes].view(array.dtype).reshape(shape)
            first += nbytes
        return True


class Undo:
    """The progress of commits over one memory. Without memory nothing is kept, and a commit that the end of the server
    interrupts is lost."""

    def __init__(self, memory: NDArray[np.uint8] | None, lanes: int) -> None:
        """``memory`` is of ``UNDO_NBYTES`` bytes, zeros at first; a commit has up to ``lanes`` lanes."""
        self._memory = memory
        self._head = (np.zeros(3, np.int64) if memory is None else memory[:24].view(np.int64)).data
        self._limit = min(lanes, LANES)
        self._phase = self._ticket = 0
        self._lanes: dict[int, Lane] = {}

    @property
    def lanes(self) -> int:
        """How many lanes the commit has. That decides which lane does what, so it is that of whoever began it."""
        return self._head[_COUNT]

    def begin(self, ticket: int) -> None:
        """A commit begins, or is taken up. Tickets grow from 1 and are never used again."""
        self._ticket, self._phase = ticket, 0
        if self._memory is None or self._head[_TAG] // _PHASES != ticket:
            _say(self._head, _COUNT, self._limit)
            _say(self._head, _TAG, self._tag)

    def is_done(self, ticket: int) -> bool:
        """Whether that commit, the last one, has ended: what it was made of may have been overwritten since."""
        return self._head[_DONE] == ticket

    def end(self) -> None:
        """The commit is done."""
        _say(self._head, _DONE, self._ticket)

    def opens(self) -> bool:
        """Whether the next phase is to be done: it is not where it was done before the server ended."""
        if self._head[_TAG] == self._tag:
            return True
        self._phase += 1
        return False

    def close(self) -> None:
        """The phase is done by all lanes."""
        self._phase += 1
        _say(self._head, _TAG, self._tag)

    def lane(self, which: int) -> Lane:
        """A lane, which has entered the phase."""
        if which not in self._lanes:
            first = _HEAD_NBYTES + which * _LANE_NBYTES
            memory = None if self._memory is None else self._memory[first : first + _LANE_NBYTES]
            self._lanes[which] = Lane(memory)
        lane = self._lanes[which]
        lane.enter(self._tag)
        return lane

    @property
    def _tag(self) -> int:
        return self._ticket * _PHASES + self._phase


def _say(words: memoryview, which: int, value: int) -> None:
    """The only way in which a word changes, but for those that compiled code writes. Tests cut the row of them."""
    words[which] = value
