"""The pages of variables and arguments that this process has written: how they are found, named and given back.

Variables and large arguments are mapped so that a write by native code, such as an in-place operation of torch, gives
this process a copy of the page. No other process sees it. But the copy also hides what the server writes later, so it
must be found and given back.

The kernel says which pages are such copies. To read that takes about a millisecond for 100 MB, so it is done at the end
of every run while the variables are small, and otherwise at the end of every hundredth. What is *preserved*
(:meth:`Mapping.preserve`) is a copy, too: the pages of a mapping are looked at before any of them is preserved, and
after that the variables are read from a new mapping. So some writes are not found: to an array that was read before an
update and is still held after it, which is no longer the variable's value; and to a copy, which shows the replica's own
noted writes, or a variable whose segment cannot be mapped. They last until the end of the run at most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Mapping as Pairs
from typing import NamedTuple
from weakref import ref

import numpy as np

from cs_proto.arrays import Array, Location
from cs_proto.errors import VariableWrittenError
from cs_proto.messages import Run, RunId, Variable
from cs_runtime.shared_memory.mapping import Mapping, pages_of
from cs_runtime.shared_memory.pagemap import Pagemap
from cs_runtime.transport.supervisor_link import SupervisorLink
from cs_worker.session.core import path_text

__all__ = ["WrittenPages"]

_log = logging.getLogger("central_storage.worker")

# A run: its number, its step and the name of its function.
_Place = tuple[RunId, int, str]

# Variables of so many bytes in all are looked at in every run, larger ones in every hundredth.
_SMALL_NBYTES = 16 << 20
_RUNS_BETWEEN = 100
# The most variables that an error names.
_NAMED = 8
# What was written is compared with the segment in pieces of so many bytes, which is a multiple of the page size.
_PIECE_NBYTES = 1 << 20


class _Shown:
    """The variables that were read in a mapping: their bytes (start, stop) by number, and the pages of all."""

    def __init__(self) -> None:
        self.ranges: dict[int, tuple[int, int]] = {}
        self._pages: list[tuple[int, int]] | None = None

    def add(self, number: int, start: int, stop: int) -> None:
        self.ranges[number] = start, stop
        self._pages = None

    def remove(self, number: int) -> None:
        del self.ranges[number]
        self._pages = None

    @property
    def pages(self) -> list[tuple[int, int]]:
        if self._pages is None:
            self._pages = pages_of(self.ranges.values())
        return self._pages


class _Pages(NamedTuple):
    """The pages of the variables that were read in all mappings: where they lie, and how many bytes they have."""

    addresses: list[tuple[int, int]]
    nbytes: int


class WrittenPages:
    """The pages of one worker. It counts runs from its start."""

    def __init__(self, lifeline: SupervisorLink, replica: int, name: Callable[[int], str]) -> None:
        """``name`` gives the name of a variable by its number."""
        self._lifeline = lifeline
        self._replica = replica
        self._name = name
        # By mapping, as long as that lives.
        self._shown: dict[ref[Mapping], _Shown] = {}
        self._pages: _Pages | None = None  # None: they have changed
        self._protected: set[int] = set()
        self._pagemap: Pagemap | None = None
        self._is_blind = False
        # The variables that were found written since the last end of a run: the place of the write by name, where it is
        # known.
        self._found: dict[str, str] = {}
        # The first run after the last look at all variables, and the number of runs since.
        self._since: _Place | None = None
        self._now: _Place = ((0,), 0, "")
        self._runs = 0

    # --- variables ------------------------------------------------------------------------------------------------

    def show(self, mapping: Mapping, record: Variable) -> None:
        """The function is about to be shown a variable, in this mapping."""
        found = record.place.offset, record.place.offset + record.array.nbytes
        if not mapping.copies_on_write or found[0] == found[1]:
            return
        key = ref(mapping)
        if key not in self._shown:
            key = ref(mapping, self._leave)
            self._shown[key] = _Shown()
        self._shown[key].add(record.number, *found)
        self._pages = None
        if record.number in self._protected:
            mapping.protect([found])

    def leave(self, mapping: Mapping) -> None:
        """Variables are preserved in this mapping, and are read from another one from now on."""
        self._leave(ref(mapping))

    def _leave(self, key: ref[Mapping]) -> None:
        self._shown.pop(key, None)
        self._pages = None

    def forget(self, numbers: Iterable[int]) -> None:
        """These variables are freed: others may lie in their places from now on."""
        numbers = set(numbers)
        self._protected -= numbers
        for mapping, shown in self._living():
            gone = numbers & shown.ranges.keys()
            if gone:
                self.look(mapping)
            for number in gone:
                shown.remove(number)
        self._pages = None

    def protect(self, numbers: Iterable[int]) -> None:
        """Make these variables unwritable, here and wherever they are mapped later."""
        numbers = set(numbers) - self._protected
        for mapping, shown in self._living():
            mapping.protect([shown.ranges[number] for number in numbers & shown.ranges.keys()])
        self._protected |= numbers

    def restore(self, numbers: Iterable[int]) -> None:
        """Give back what was written to these variables."""
        numbers = set(numbers)
        for mapping, shown in self._living():
            mapping.restore([shown.ranges[number] for number in numbers & shown.ranges.keys()])

    def fail(self, sites: Pairs[int, str]) -> VariableWrittenError:
        """The error about a write in this run to these variables, by number, with its line or the empty string. Their
        pages are given back, and the run fails even if the function handles the error."""
        since = self._since if self._found else self._now
        self.restore(sites)
        self._found.update((self._name(number), site) for number, site in sites.items())
        return self._error(since)

    def look(self, mapping: Mapping) -> None:
        """Find the variables that were written in a mapping, and give their pages back. :meth:`refuse` and
        :meth:`end_run` raise the error about them. Where pages cannot be looked at any more, all are given back."""
        shown = self._shown.get(ref(mapping))
        if shown is not None:
            self._look(mapping, shown)

    def _look(self, mapping: Mapping, shown: _Shown) -> None:
        pages = shown.pages
        own = self._own_pages(mapping, pages)
        if own is None:
            mapping.restore(pages)
            return
        if own:
            for number in _written(mapping, own, shown.ranges):
                self._found.setdefault(self._name(number), "")

    @property
    def are_small(self) -> bool:
        """Whether all variables that were read are so small that looking at them costs next to nothing."""
        return (self._pages or self._all_pages()).nbytes <= _SMALL_NBYTES

    def _all_pages(self) -> _Pages:
        """The pages of all variables that were read, which are the same in most runs."""
        living = self._living()
        addresses = [each for mapping, shown in living for each in mapping.addresses(shown.pages)]
        found = self._pages = _Pages(addresses, sum([stop - start for start, stop in addresses]))
        return found

    def _living(self) -> list[tuple[Mapping, _Shown]]:
        """What was shown in each mapping. A mapping may go at any moment, but not while the list holds it."""
        living = []
        for key, shown in list(self._shown.items()):
            mapping = key()
            if mapping is not None:
                living.append((mapping, shown))
        return living

    def refuse(self) -> None:
        """Raise VariableWrittenError if variables were found written in this run."""
        if self._found:
            raise self._error(self._since)

    # --- runs -----------------------------------------------------------------------------------------------------

    def begin_run(self, run: Run) -> None:
        """A run of the script begins."""
        self._runs += 1
        self._now = run.run, run.step, run.name
        self._since = self._since or self._now

    def end_run(self) -> None:
        """The function has returned. Raises VariableWrittenError if a variable is found written now or was in the
        middle of the run."""
        pages = self._pages or self._all_pages()
        if pages.nbytes <= _SMALL_NBYTES or self._runs >= _RUNS_BETWEEN:
            if pages.addresses and (self._pagemap is None or self._pagemap.may_have_own(pages.addresses)):
                for mapping, shown in self._living():
                    self._look(mapping, shown)
            since, self._since, self._runs = self._since, None, 0
        else:
            since = self._since
        if self._found:
            try:
                raise self._error(since)
            finally:
                self._found.clear()

    def verdict(self, raised: BaseException) -> BaseException:
        """The error of a run whose function has raised ``raised``: another one if a variable was written, because what
        the run has brought to merge points may be wrong."""
        try:
            self.end_run()
        except VariableWrittenError as error:
            if not isinstance(raised, VariableWrittenError):
                error.__cause__ = raised
                return error
        return raised

    # --- arguments ------------------------------------------------------------------------------------------------

    def restore_array(self, array: Array) -> None:
        """Give back what was written where a large argument lies, so that this shows what its sender has put there.
        Before an array is mapped, too: the function may have kept an earlier one that lay in the same place."""
        mapping = self._lifeline.segment_of(array)
        if not isinstance(mapping, Mapping) or not mapping.copies_on_write:
            return
        assert isinstance(array.place, Location)
        pages = pages_of([(array.place.offset, array.place.offset + array.nbytes)])
        own = self._own_pages(mapping, pages)
        mapping.restore(pages if own is None else own)

    # --- how it is done -------------------------------------------------------------------------------------------

    def _own_pages(self, mapping: Mapping, pages: list[tuple[int, int]]) -> list[tuple[int, int]] | None:
        """The pages, of ``pages``, that are copies of this process; None where the kernel no longer says so."""
        try:
            if self._pagemap is None and not self._is_blind:
                self._pagemap = Pagemap()
            return None if self._pagemap is None else mapping.own_pages(self._pagemap, pages)
        except OSError as error:
            self._pagemap, self._is_blind = None, True
            _log.warning(
                "writes in place to variables are not found here, because pages cannot be looked at: %s", error
            )
            return None

    def _error(self, since: _Place | None) -> VariableWrittenError:
        names = [f"{name!r} ({site})" if site else repr(name) for name, site in self._found.items()]
        told = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        what = f"variable {told}" if len(names) == 1 else f"at least one of the variables {told}"
        return VariableWrittenError(
            f"replica {self._replica}: something wrote in place to {what}, which a replica may only read. The write "
            "reached no other process and is undone; this run fails. "
            + (
                "Earlier runs are right. "
                if since is None or since == self._now
                else f"Numbers of this replica may be wrong since {_title(since)}: go back to a checkpoint from before "
                "it. "
            )
            + "Write to a copy (variable.numpy(), x.clone()), or change the variable with assign, assign_add or "
            "scatter_update"
        )


def _title(place: _Place) -> str:
    run, step, name = place
    return f"run {path_text(run)}" + (f" (step {step} of {name})" if name else "")


def _written(mapping: Mapping, own: Sequence[tuple[int, int]], ranges: Pairs[int, tuple[int, int]]) -> list[int]:
    """Give back the pages ``own``, and say which of the variables (bytes by number) were written there. Small variables
    share pages: those that had other bits than the segment, or all if there are no such bits."""
    memory = mapping.elements("uint8")
    touched: dict[int, None] = {}
    changed: dict[int, None] = {}
    for start, stop in own:
        for first in range(start, stop, _PIECE_NBYTES):
            last = min(first + _PIECE_NBYTES, stop)
            before, after = memory[first:last].copy(), memory[first:last]
            mapping.restore([(first, last)])
            for number, (low, high) in ranges.items():
                part = slice(max(low, first) - first, min(high, last) - first)
                if part.start < part.stop:
                    touched[number] = None
                    if not np.array_equal(before[part], after[part]):
                        changed[number] = None
    return list(changed or touched)
