"""Which variables a worker on another machine has as they are here.

The server counts the changes of each variable in a word of the segment ``versions``. The mirror remembers the word with
which it brought a variable last, and brings a variable again if its word is another one. The first word counts the
starts of the server; another one makes all variables stale.

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

__all__ = ["Fresh", "Mirror"]

_WORD_NBYTES = 8


class Fresh(NamedTuple):
    """What is brought before a record: the ranges first, then the words."""

    ranges: list[Range]
    #: Bytes of the segment ``versions``, each with the offset at which they begin.
    words: list[tuple[int, bytes]]


class Mirror:
    """The variables of one worker. Its catalogue learns from a record before the mirror is asked about it."""

    def __init__(self) -> None:
        self.start_anew()

    def start_anew(self) -> None:
        """The worker, or its machine's memory, is a new one: nothing has been brought."""
        self._catalogue: Catalogue | None = None
        self._revision = -1
        # Of the variables, ascending by number: where they lie, their numbers, the words with which they were brought
        # last, and whether that counts.
        self._known: list[Known] = []
        self._numbers = np.empty(0, np.int64)
        self._words = np.empty(0, np.uint64)
        self._is_fresh = np.empty(0, bool)
        # The count of the server's starts with which variables were brought last.
        self._start: int | None = None
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
        commits = int(control[0])
        start, words = int(versions[0]), versions[self._numbers]
        is_steady = commits % 2 == 0 and int(control[0]) == commits
        if not is_steady and not _lets_read(record):
            return Fresh([], [])  # they come when the commit is over
        if start != self._start:
            self._is_fresh[:] = False
        stale = ~self._is_fresh | (words != self._words)
        if start == self._start and not stale.any():
            return Fresh([], [])
        ranges = self._ranges(stale)
        if not is_steady:
            self._is_fresh[stale] = False
            return Fresh(ranges, [])
        told, their = self._numbers[stale], words[stale]
        if start != self._start:
            told, their = np.append(0, told), np.append(versions.dtype.type(start), their)
        self._words, self._start = words, start
        self._is_fresh[:] = True
        return Fresh(ranges, _pieces(told, their))

    def _follow(self, catalogue: Catalogue, count: int) -> None:
        """Take over which variables there are. What the catalogue has learned anew is stale."""
        if catalogue is self._catalogue and catalogue.revision == self._revision:
            return
        before = {id(known): place for place, known in enumerate(self._known)}
        known = [catalogue.variables[number] for number in sorted(catalogue.variables)]
        if known and known[-1].number >= count:
            raise PeerProtocolError(f"variable {known[-1].number} has no version, of which there are {count - 1}")
        places = np.array([before.get(id(each), -1) for each in known], np.int64)
        is_old = places >= 0
        words, is_fresh = np.zeros(len(known), np.uint64), np.zeros(len(known), bool)
        words[is_old], is_fresh[is_old] = self._words[places[is_old]], self._is_fresh[places[is_old]]
        self._catalogue, self._revision, self._last = catalogue, catalogue.revision, None
        self._known, self._words, self._is_fresh = known, words, is_fresh
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
