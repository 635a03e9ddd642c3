"""The undo area, with which a commit survives the server: its progress, and the old values of the current pieces.

A commit is a sequence of phases. A phase changes memory in pieces, which are given to lanes, one lane for each thread,
in an order that depends only on the commit. A lane may go through several phases without the others. The new values of
a piece are computed from its old ones. So before the old values are overwritten, they are copied to the lane's area,
and then the lane's word says that they are kept. The next server over the same memory skips the phases and pieces that
are done, restores the old values of the current piece and computes it again: the result has the bits of an undisturbed
commit.

Every word is written by one aligned store, in an order in which every prefix of the stores is a state from which a
server can continue. A process that is killed has done all stores up to some instruction and none after it, so only the
compiler has to keep their order (`jit` has fences). This module knows no rules and no messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from cs_proto.errors import InvalidArgumentError
from cs_proto.memory_plan import KEPT_NBYTES
from cs_runtime.failpoints import failpoint
from cs_server.rules import Array

from .programs import Instruction, Op

__all__ = ["KEPT_NBYTES", "LANES", "NUMBERS", "UNDO_NBYTES", "Lane", "Place", "Stores", "Undo", "used_nbytes"]

# A piece has at most four arrays: a variable, three slots.
_ARRAYS = 4

#: The most threads that take part in one commit.
LANES = 256

_HEAD_NBYTES = 4096
_NUMBERS_AT = 64

#: How many numbers a commit can note for its next phases.
NUMBERS = (_HEAD_NBYTES - _NUMBERS_AT) // 8

_LINE_NBYTES = 64  # the words of a lane have a cache line of their own
_LANE_NBYTES = _LINE_NBYTES + _ARRAYS * KEPT_NBYTES

#: Bytes of the whole area; only the used part is ever touched.
UNDO_NBYTES = _HEAD_NBYTES + LANES * _LANE_NBYTES

# The head: the current commit and phase as one number, the number of its lanes, the last finished commit, and whether a
# sum of gradients was not finite.
_TAG, _COUNT, _DONE, _ALARM = 0, 1, 2, 3
# A lane: its current phase, inverted while the progress is not yet that of this phase; and the progress, which is
# 2 * (pieces done) + (the next piece is kept).
_LANE_TAG, _PROGRESS = 0, 1
_PHASES = 1 << 24

T = TypeVar("T")
Place: TypeAlias = tuple[Array, Any]
"""An array and an index: what is overwritten is ``array[index]``. All places of a piece have one dtype."""


def used_nbytes(lanes: int) -> int:
    """Bytes, counted from the first, that commits with this many lanes may touch."""
    return _HEAD_NBYTES + min(lanes, LANES) * _LANE_NBYTES


class Lane:
    """One thread's part in a phase. Without memory it keeps nothing and does all pieces."""

    def __init__(self, memory: NDArray[np.uint8] | None = None, alarm: NDArray[np.int64] | None = None) -> None:
        #: One word, which is set to 1 where a sum of gradients is not finite. All lanes of a commit share it.
        self.alarm: NDArray[np.int64] = np.zeros(1, np.int64) if alarm is None else alarm
        if memory is None:
            memory = np.empty(0, np.uint8)
        self._line = memory[:_LINE_NBYTES].view(np.int64)
        self._words = self._line.data  # a memoryview is faster than an array for a single number
        self._area = memory[_LINE_NBYTES:]
        self._tag = 0

    @property
    def line(self) -> NDArray[np.int64]:
        """The words of the lane; empty if nothing is kept."""
        return self._line

    @property
    def progress(self) -> NDArray[np.int64]:
        """The progress word of the phase, for compiled code that goes through the pieces itself; empty if nothing is
        kept."""
        return self._line[_PROGRESS : _PROGRESS + 1]

    def area(self, dtype: np.dtype[Any]) -> Array:
        """The memory in which compiled code keeps the arrays of a piece, back to back."""
        return self._area.view(dtype)

    @property
    def is_kept(self) -> bool:
        """Whether the old values of the current piece are kept: the piece may be half overwritten."""
        return bool(len(self._words) and self._words[_PROGRESS] & 1)

    @property
    def done(self) -> int:
        """The number of finished pieces of the phase."""
        return self._words[_PROGRESS] >> 1 if len(self._words) else 0

    def enter(self, tag: int) -> bool:
        """Begin a phase, or continue it if an earlier server ended in the middle of it; False if the lane is further.
        Tags grow."""
        self._tag = tag
        if not len(self._words):
            return True
        noted = self._words[_LANE_TAG]
        if (noted if noted >= 0 else ~noted - 1) < tag:
            _say(self._words, _LANE_TAG, ~tag)
            _say(self._words, _PROGRESS, 0)
            _say(self._words, _LANE_TAG, tag)
        return self._words[_LANE_TAG] == tag

    def in_turn(self, items: Sequence[T]) -> Iterator[T]:
        """The unfinished ones of ``items``, each of which is a phase of this lane, from the present one on."""
        for tag, item in enumerate(items, self._tag):
            if self.enter(tag):
                yield item

    def rest(self, pieces: Sequence[T], first: int = 0) -> Iterator[T]:
        """The unfinished ones of ``pieces``, which are this lane's from number ``first`` on. Asking for the next one
        marks a piece as done."""
        for number in range(max(self.done, first), first + len(pieces)):
            yield pieces[number - first]
            if len(self._words):
                _say(self._words, _PROGRESS, 2 * number + 2)

    def keep(self, places: Sequence[Place]) -> None:
        """Keep the old values of the current piece, for every place that is overwritten. If they are kept already,
        because a server ended in the middle of the piece, restore them instead."""
        if len(self._words) and not self.give_back(places):
            self.note([array[index] for array, index in places])

    def note(self, values: Sequence[Array]) -> None:
        """Keep these old values of the current piece, of which nothing has been overwritten yet."""
        if not len(self._words):
            return
        first = 0
        for old in values:
            self._area[first : first + old.nbytes].view(old.dtype).reshape(old.shape)[...] = old
            first += old.nbytes
        _say(self._words, _PROGRESS, 2 * self.done + 1)
        failpoint("server.kept")

    def give_back(self, places: Sequence[Place]) -> bool:
        """Restore the kept old values to ``places``; False if none are kept."""
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
    """The progress of commits over one memory. Without memory nothing is kept, and the end of the server loses an
    unfinished commit."""

    def __init__(self, memory: NDArray[np.uint8] | None, lanes: int) -> None:
        """``memory`` has ``UNDO_NBYTES`` bytes, zeros at first; a commit has up to ``lanes`` lanes."""
        self._memory = memory
        head = np.zeros(_HEAD_NBYTES, np.uint8) if memory is None else memory[:_HEAD_NBYTES]
        #: The words of the head.
        self.head: NDArray[np.int64] = head[: 8 * (_ALARM + 1)].view(np.int64)
        #: One word, which is not 0 if a sum of gradients in the last commit was not finite. A server that continues the
        #: commit finds it set; whoever reads it sets it to 0.
        self.alarm: NDArray[np.int64] = self.head[_ALARM:]
        self._head = self.head.data
        #: Noted in one phase and read in those that follow it, also by the next server: what they overwrite cannot be
        #: computed again.
        self.numbers: NDArray[np.float64] = head[_NUMBERS_AT:].view(np.float64)
        #: The most lanes of a commit that begins.
        self.limit = min(lanes, LANES)
        self._phase = self._ticket = 0
        self._lanes: dict[int, Lane] = {}

    @property
    def lanes(self) -> int:
        """The number of lanes of the commit. It decides the pieces of each lane, so the server that begins a commit
        sets it."""
        return self._head[_COUNT]

    @property
    def begun(self) -> int:
        """The ticket of the commit that was begun last."""
        return self._head[_TAG] // _PHASES

    def begin(self, ticket: int) -> None:
        """Begin a commit, or continue it. Tickets grow from 1 and are never reused."""
        self._ticket, self._phase = ticket, 0
        if self._memory is None or self.begun != ticket:
            _say(self._head, _COUNT, self.limit)
            _say(self._head, _TAG, self._tag)

    def is_done(self, ticket: int) -> bool:
        """Whether that commit was the last one and is finished: its contributions may have been overwritten since."""
        return self._head[_DONE] == ticket

    def end(self) -> None:
        """Mark the commit as done."""
        _say(self._head, _DONE, self._ticket)

    def opens(self, count: int = 1) -> bool:
        """Begin the next phase, or so many, through which each lane goes without the others; False if an earlier server
        has done them already."""
        if self._head[_TAG] == self._tag:
            return True
        self._phase += count
        return False

    def close(self, count: int = 1) -> None:
        """Mark so many phases as done by all lanes."""
        self._phase += count
        _say(self._head, _TAG, self._tag)

    def lane(self, which: int) -> Lane:
        """A lane that has entered the phase."""
        lane = self.lane_outside(which)
        lane.enter(self._tag)
        return lane

    def lane_outside(self, which: int) -> Lane:
        """A lane, whose words stay as they are."""
        if which not in self._lanes:
            first = _HEAD_NBYTES + which * _LANE_NBYTES
            memory = None if self._memory is None else self._memory[first : first + _LANE_NBYTES]
            self._lanes[which] = Lane(memory, self.alarm)
        return self._lanes[which]

    @property
    def _tag(self) -> int:
        return self._ticket * _PHASES + self._phase


class Stores:
    """The stores of `Undo` and `Lane` in a commit, in the same order, as instructions of a program.

    Only a commit that nobody has begun may be carried out so: another one may have other lanes, and its finished phases
    must be skipped. The program takes the ticket from words of this object.
    """

    def __init__(self, undo: Undo, lanes: int) -> None:
        """The commit has so many lanes."""
        self._undo, self._lanes = undo, lanes
        #: The ticket, the tag of its first phase, and 0.
        self._given = np.zeros(3, np.int64)
        self._words = self._given.data

    def set_ticket(self, ticket: int) -> None:
        """Let the next run be the commit with this ticket. Raises InvalidArgumentError if it, or a later one, has been
        begun."""
        if self._undo.begun >= ticket:
            raise InvalidArgumentError(f"commit {ticket} cannot begin: {self._undo.begun} has begun")
        self._words[0], self._words[1] = ticket, ticket * _PHASES

    def begin(self) -> list[Instruction]:
        """As `Undo.begin`, which a new server with other lanes continues with this one."""
        head = self._undo.head
        return [self._set(head, _COUNT, self._zero, self._lanes), self._set(head, _TAG, self._tag, 0)]

    def enter(self, phase: int, which: int) -> list[Instruction]:
        """As `Lane.enter`, for the lane with this number. Phases count from 0."""
        line = self._undo.lane_outside(which).line
        if not len(line):
            return []
        inverted = (Op.INVERT, _address(line, _LANE_TAG), self._tag, phase)
        return [inverted, self._set(line, _PROGRESS, self._zero, 0), self._set(line, _LANE_TAG, self._tag, phase)]

    def close(self, phase: int) -> list[Instruction]:
        """As `Undo.close`."""
        return [self._set(self._undo.head, _TAG, self._tag, phase + 1)]

    def end(self) -> list[Instruction]:
        """As `Undo.end`."""
        return [self._set(self._undo.head, _DONE, _address(self._given, 0), 0)]

    @property
    def _tag(self) -> int:
        return _address(self._given, 1)

    @property
    def _zero(self) -> int:
        return _address(self._given, 2)

    def _set(self, words: NDArray[np.int64], which: int, source: int, more: int) -> Instruction:
        return Op.MOVE, _address(words, which), source, more


def _address(words: NDArray[np.int64], which: int) -> int:
    return words.ctypes.data + words.itemsize * which


def _say(words: memoryview, which: int, value: int) -> None:
    """Store a word. Only this function, programs and kernels change words; tests cut the sequence of stores here."""
    words[which] = value
