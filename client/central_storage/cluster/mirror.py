"""Which variables another machine has as they are here.

The server counts the changes of each variable in a word of the segment ``versions``. A :class:`Copy` remembers the
word with which a variable was brought to that machine last, for whichever of its workers. A :class:`Mirror` brings a
variable that its worker knows again if the word is another one. The first word counts the starts of the server; another
one makes all variables stale.

Several workers of a machine share a copy, as the workers of the service's own machine share the variables. The server
changes no variable that any of them may read at that time, so neither does what is brought for another one, as long as
all of it comes in one order.

The server raises a word before it writes the bytes, within a commit, of which the counter in the segment ``control`` is
odd. So words count only if no commit was under way while they were read. The bytes are read after the words: a change
in between is brought again. What the mirror brings of a sparse variable is its word alone; the worker fetches rows.

The module reads two arrays of numbers and no other memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cs_proto.errors import PeerProtocolError
from cs_proto.messages import Cancel, Forget, Prepare, Preserve, Run
from cs_proto.records import Record

from .ranges import GAP_NBYTES, Catalogue, Known, Range, joined

__all__ = ["Copy", "Fresh", "Mirror"]

_WORD_NBYTES = 8


class Fresh(NamedTuple):
    """What is brought before a record: the ranges first, then the words."""

    ranges: list[Range]
    #: Bytes of the segment ``versions``, each with the offset at which they begin.
    words: list[tuple[int, bytes]]


class Copy:
    """The variables in the memory of one machine, of which nothing has been brought at first."""

    def __init__(self) -> None:
        #: The count of the server's starts with which variables were brought last.
        self.start: int | None = None
        #: By the number of a variable: the word with which it was brought last, and whether that counts.
        self.words = np.empty(0, np.uint64)
        self.is_fresh = np.empty(0, bool)
        # By number, where those lie that a worker knows.
        self._places: dict[int, Range] = {}

    def follow(self, known: Known) -> None:
        """A worker has learned of a variable. It is stale unless it was brought to the same place before."""
        number = known.number
        if number >= len(self.words):
            more = number + 1  # so the arrays grow to twice their length at least
            self.words = np.append(self.words, np.zeros(more, np.uint64))
            self.is_fresh = np.append(self.is_fresh, np.zeros(more, bool))
        if self._places.get(number) != known.range:
            self._places[number] = known.range
            self.is_fresh[number] = False

    def drop(self, number: int) -> None:
        """A worker knows a variable no longer: it was freed."""
        self._places.pop(number, None)
        self.is_fresh[number] = False


class Mirror:
    """The variables of one worker. Its catalogue learns from a record before the mirror is asked about it."""

    def __init__(self, copy: Copy | None = None) -> None:
        """``copy`` is that of the worker's machine; without it, the worker is the only one there."""
        self._copy = copy or Copy()
        self._catalogue: Catalogue | None = None
        self._revision = -1
        # The variables, ascending by number: where they lie, and their numbers.
        self._known: list[Known] = []
        self._numbers = np.empty(0, np.int64)
        # The variables that were stale last, and their ranges: those that a step changes are often the same.
        self._last: tuple[np.ndarray, list[Range]] | None = None

    def before(self, record: Record, catalogue: Catalogue, control: np.ndarray, versions: np.ndarray) -> Fresh:
        """What is brought before ``record`` goes to the worker. The caller reads the bytes of the ranges after this
        call. ``control`` and ``versions`` are the whole segments, uint64.

        Raises PeerProtocolError if ``versions`` has no word for a variable.
        """
        if isinstance(record, Preserve):  # the worker first preserves what it has read
            return Fresh([], [])
        self._follow(catalogue, len(versions))
        copy, commits = self._copy, int(control[0])
        start, words = int(versions[0]), versions[self._numbers]
        is_steady = commits % 2 == 0 and int(control[0]) == commits
        if not is_steady and not _lets_read(record):
            return Fresh([], [])  # they come when the commit is over
        if start != copy.start:
            copy.is_fresh[:] = False
        stale = ~copy.is_fresh[self._numbers] | (words != copy.words[self._numbers])
        if start == copy.start and not stale.any():
            return Fresh([], [])
        ranges = self._ranges(stale)
        told, their = self._numbers[stale], words[stale]
        if not is_steady:
            copy.is_fresh[told] = False
            return Fresh(ranges, [])
        copy.words[told], copy.is_fresh[told] = their, True
        if start != copy.start:
            told, their = np.append(0, told), np.append(versions.dtype.type(start), their)
            copy.start = start
        return Fresh(ranges, _pieces(told, their))

    def _follow(self, catalogue: Catalogue, count: int) -> None:
        """Take over which variables there are. Those that the worker did not know are stale, unless the copy has
        them."""
        if catalogue is self._catalogue and catalogue.revision == self._revision:
            return
        before = {id(known): known for known in self._known}
        known = [catalogue.variables[number] for number in sorted(catalogue.variables)]
        if known and known[-1].number >= count:
            raise PeerProtocolError(f"variable {known[-1].number} has no version, of which there are {count - 1}")
        new = [each for each in known if before.pop(id(each), None) is None]
        for gone in before.values():
            self._copy.drop(gone.number)
        for each in new:
            self._copy.follow(each)
        self._catalogue, self._revision, self._last = catalogue, catalogue.revision, None
        self._known = known
        self._numbers = np.array([each.number for each in known], np.int64)

    def _ranges(self, stale: np.ndarray) -> list[Range]:
        if self._last is None or not np.array_equal(self._last[0], stale):
            known = [self._known[place] for place in np.flatnonzero(stale)]
            self._last = stale, joined([each.range for each in known if not each.is_sparse], GAP_NBYTES)
        return self._last[1]


def _lets_read(record: Record) -> bool:
    """Whether the worker may read variables after ``record`` without hearing from the server first. It begins a step of
    a series when the server has said that the step before it is over."""
    is_later_step = isinstance(record, Run) and record.series not in (0, record.run[0])
    return not (is_later_step or isinstance(record, Prepare | Forget | Cancel))


def _pieces(numbers: np.ndarray, words: np.ndarray) -> list[tuple[int, bytes]]:
    """The words of these variables, ascending by number: one piece for numbers that follow each other."""
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    runs = zip(np.split(numbers, cuts), np.split(words, cuts), strict=True)
    return [(_WORD_NBYTES * int(run[0]), of_run.tobytes()) for run, of_run in runs]
