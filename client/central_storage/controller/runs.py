"""Runs on their way: what is pickled, placed and sent to the workers, and the wait for what comes of it.

Of all that a link does this is the hot path. Of a series several may be unanswered at a time.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from central_storage.core.composites import Composite
from central_storage.core.handles import Forget, Handle, Hold
from central_storage.core.pipeline import Arguments, Changes, Series
from central_storage.core.random_streams import function_name
from central_storage.diagnostics.callers import warn
from central_storage.pickling.function import Function, Pickled, Pickles, drop_stale
from central_storage.pickling.pickler import Adopt, digest, dump_arguments, dump_function
from cs_proto.arrays import INLINE_NBYTES, Array
from cs_proto.errors import ContextError
from cs_proto.messages import NumericsCheck, OptimizerChange
from cs_proto.records import Frame

from .session import Session

__all__ = ["Runs"]

# Pickled arguments of up to so many bytes go in the header of their Run.
_SMALL_NBYTES = 4096
# To pickle and send a function of more bytes takes longer than most steps (4 ms a megabyte on two cores).
_LARGE_NBYTES = 1 << 20


class Runs:
    """What it takes to send runs over a session and to wait for their end."""

    def __init__(self, session: Session, seed: int, forget: Forget) -> None:
        """``forget`` is told when nobody needs a frozen function any more, in any thread and at any time."""
        self._session = session
        self.seed = seed
        #: What the replicas do about gradients that are not finite.
        self.check_numerics: NumericsCheck = "off"
        self._warned: set[object] = set()
        self._forget = forget
        self._pickles: WeakValueDictionary[int, Pickles] = WeakValueDictionary()
        self._frozen: Counter[bytes] = Counter()  # how many functions have a digest
        #: How handles become numbers; said once by the strategy over this session.
        self.adopt: Adopt = _nothing_adopted
        #: Called before the first run is sent, when all that it reads is in the server; said by the strategy, too.
        self.before_first: Callable[[], None] | None = None

    def send(self, series: Series, function: Callable[..., Any], arguments: Arguments, changes: Changes = ()) -> None:
        """Send the next run of ``series``, with ``changes`` of hyperparameters. Raises where it cannot begin in every
        replica, and then begins in none."""
        session, core = self._session, self._session.core
        if core.lost:
            core.refuse_lost()
        trace = session.trace
        if trace.watched[0]:
            trace.note("begun", core.run + 1)
        if frozen := isinstance(function, Function):
            data, hashed, holds, name = function.pickle_for(self, partial(self._freeze, function))
        else:
            data, hashed, holds, name = self._pickle(function, function)
        # A frozen function lives on in the workers, where it may keep what it is given.
        adopt = partial(self._adopt_into, holds) if frozen else self.adopt
        # Placed when all is pickled: what is adopted meanwhile may be brought by way of the arena, too.
        pickles = [dump_arguments(args, kwargs, adopt, _in_place) for args, kwargs in arguments]
        if self.before_first is not None:
            self.before_first()
            self.before_first = None
        if trace.watched[0]:
            trace.note("pickled", core.run + 1)
        if core.where != (sys.path, directory := os.getcwd()):
            session.carry_out(core.prepare(sys.path, directory))
        beginning = core.next_run(series, name, hashed, frozen)
        run, _, step, first, lookahead, part, parts, lacks, *_ = beginning
        session.arena.reset(part, parts)
        share = session.arena.share
        new = tuple([OptimizerChange(number, tuple(given.items())) for number, given in changes]) if changes else ()
        said: list[tuple[Any, ...]] = []
        for replica, (pickled, buffers) in enumerate(pickles):
            there: bytes | Frame | Array = pickled
            carried, leases = share(data) if lacks[replica] else None, session.results[replica]
            if (size := len(pickled)) > _SMALL_NBYTES:
                there = Frame(pickled) if size <= INLINE_NBYTES else share(pickled)
            places = tuple(map(share, buffers)) if buffers else ()
            held = leases.held() if leases.ranges else ()
            values = run, step, replica, self.seed, hashed, carried, frozen, there, places  # as the fields of a Run
            said.append((*values, first, lookahead, held, name, new, self.check_numerics))
        session.send_run(core.begin_run(series, beginning, said, data, pickles))

    def settle(self, series: Series, left: int = 0, *, cancel: bool = False) -> None:
        """Wait until at most ``left`` runs of ``series`` are unanswered. Ctrl-C cancels the first of them and waits for
        all; a second one ends the service."""
        session, core = self._session, self._session.core
        settling, commands = core.settle(series, left, time.monotonic(), cancel=cancel)
        try:
            session.wait(settling, commands)
        except Exception as error:
            commands = core.fail(settling, error)
            if session.ended is not None:
                raise
            session.carry_out(commands)

    def drop(self, digests: Iterable[bytes]) -> list[bytes]:
        """A function with each of these digests is gone; those that no other function has."""
        self._frozen.subtract(digests)
        gone = [each for each, count in self._frozen.items() if not count]
        for each in gone:
            del self._frozen[each]
        return gone

    def drop_stale(self) -> None:
        """Drop frozen functions whose names stand for something else now, with what they hold."""
        for pickles in list(self._pickles.values()):
            drop_stale(pickles, self)

    def _freeze(self, function: Function, python_function: Callable[..., Any]) -> Pickled:
        self._pickles[id(function.pickles)] = function.pickles
        made = self._pickle(python_function, function)
        self._frozen[made.digest] += 1
        made.holds.add(Hold(self._forget, "function", made.digest))
        return made

    def _pickle(self, function: Callable[..., Any], named: Callable[..., Any]) -> Pickled:
        holds: set[Hold] = set()
        data = dump_function(function, partial(self._adopt_into, holds))
        if len(data) > _LARGE_NBYTES:
            self._warn_of_captures(function, len(data))
        return Pickled(data, digest(data), holds, function_name(named))

    def _warn_of_captures(self, function: Callable[..., Any], nbytes: int) -> None:
        """Warn, once for each function, that what it captures is sent at every run."""
        code = getattr(inspect.unwrap(function), "__code__", type(function))
        if code in self._warned:
            return
        self._warned.add(code)
        warn(
            f"{getattr(function, '__qualname__', repr(function))} captures {nbytes / 1e6:.1f} MB{_largest(function)}, "
            "which is pickled and sent at every run; decorate the function with @cs.function, which sends it once, or "
            "pass the array as an argument, or make it a cs.Variable",
            UserWarning,
        )

    def _adopt_into(self, holds: set[Hold], handle: Handle | Composite) -> tuple[str, int]:
        number = self.adopt(handle)
        if isinstance(handle, Handle) and (hold := handle._cs_hold) is not None:  # noqa: SLF001  (not the handle itself, which holds its strategy)
            holds.add(hold)
        return number


def _largest(function: Callable[..., Any]) -> str:
    """The largest captured array, in words; nothing where none is known."""
    try:
        captured = inspect.getclosurevars(inspect.unwrap(function))
    except (TypeError, ValueError):  # no function of Python's, or one without its cells
        return ""
    values = {**captured.globals, **captured.nonlocals}
    sizes = {name: value.nbytes for name, value in values.items() if isinstance(value, np.ndarray)}
    largest = max(sizes, key=sizes.__getitem__, default="")
    return f", the largest array as {largest!r}" * bool(largest)


def _in_place(data: memoryview) -> memoryview:
    return data


def _nothing_adopted(handle: Handle | Composite) -> tuple[str, int]:
    raise ContextError(f"{handle!r} cannot be sent before its strategy is made")
