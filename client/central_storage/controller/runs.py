"""Runs on their way: what is pickled and sent to the workers, and what comes of it.

Of all that a link does this is the hot path. Of a series several may be unanswered at a time.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from central_storage.core.composites import Composite
from central_storage.core.handles import Handle
from central_storage.core.pipeline import Arguments, Sent, Series
from central_storage.pickling.function import Function, Pickled
from central_storage.pickling.pickler import Adopt, digest, dump_arguments, dump_function
from central_storage.wire_values.value_codec import from_value, to_exception
from cs_proto import messages
from cs_proto.arrays import INLINE_NBYTES, Array
from cs_proto.errors import ContextError
from cs_proto.function_cache import HeldFunctions
from cs_proto.messages import Counters, RunFinished, Serving
from cs_proto.records import Frame, Record, replace
from cs_runtime.channel import SERVER
from cs_runtime.supervisor_link import SupervisorLink

from .result_leases import ResultLeases
from .session import Seam, Threads, log, moment, name_wait

__all__ = ["Runs"]

# The server says about every ten seconds whom a run waits for; a server that has not for so long may be stopped.
_WORDS_HOLD = 25.0
# Pickled arguments of up to so many bytes go in the header of their Run.
_SMALL_NBYTES = 4096


class Runs(Seam):
    """The conversation with what it takes to send runs and to wait for their end."""

    def __init__(
        self,
        lifeline: SupervisorLink,
        serving: Serving,
        seed: int,
        stop: Callable[[], None] | None,
        threads: Threads | None,
    ) -> None:
        self._seed = seed
        self._adopt: Adopt = _nothing_adopted
        self._runs = 0
        self._draws = 0  # as runs, but continued from a restored checkpoint, and without steps that never began
        self._answered = 0  # the last run whose end is known
        self._prepared: messages.Prepare | None = None  # what workers were told last, and from what it was made
        self._where: tuple[list[str], str] | None = None
        self._latest: Series | None = None  # the one of which runs may be unanswered
        self._sent: deque[Sent] = deque()  # its unanswered ones
        self._cancelling: Series | None = None  # the one whose replicas have been told to give up
        self._early: dict[messages.RunId, RunFinished] = {}
        self._awaited_for: tuple[messages.WaitingFor, float] | None = None  # as the server said last, and when
        super().__init__(lifeline, serving, stop, threads)
        self._held = [HeldFunctions() for _ in self.workers]

    def _pickle(self, function: Callable[..., Any]) -> Pickled:
        if isinstance(function, Function):
            return function.pickle_for(self, self._pickle)
        handles: dict[int, object] = {}
        data = dump_function(function, partial(self._adopt_into, handles))
        return Pickled(data, digest(data), handles)

    def _adopt_into(self, handles: dict[int, object], handle: Handle | Composite) -> tuple[str, int]:
        handles[id(handle)] = handle
        return self._adopt(handle)

    def _send_run(self, series: Series, function: Callable[..., Any], arguments: Arguments) -> None:
        self._deaths.refuse()
        moment("begun")
        data, name, handles = self._pickle(function)
        frozen = isinstance(function, Function)
        # A frozen function lives on in the workers, where it may keep what it is given.
        adopt = partial(self._adopt_into, handles) if frozen else self._adopt
        # Placed when all is pickled: what is adopted meanwhile may be brought by way of the arena, too.
        pickles = [dump_arguments(args, kwargs, adopt, _in_place) for args, kwargs in arguments]
        moment("pickled")
        run, draw, parts = (self._runs + 1,), self._draws + 1, series.lookahead + 1
        number = series.number or run[0]
        self._arena.reset((run[0] - number) % parts, parts)
        step = (number, series.lookahead) if series.lookahead else (0, 0)
        sent = Sent(run, [], data, pickles, [*self._held] if series.lookahead else [])
        self._prepare()
        share = self._arena.share
        touched, messages_of_run = [], []
        for replica, (pickled, buffers) in enumerate(pickles):
            is_held, held = self._held[replica].touch(name, frozen)
            touched.append(held)
            carried = None if is_held else share(data)
            there: bytes | Frame | Array = pickled
            if len(pickled) > _SMALL_NBYTES:
                there = Frame(pickled) if len(pickled) <= INLINE_NBYTES else share(pickled)
            placed = tuple(map(share, buffers)) if buffers else ()
            lent = self._results[replica].held()
            said = (run, draw, replica, self._seed, name, carried, frozen, there, placed, *step, lent)
            sent.said.append(said)
            messages_of_run.append(self._encoded(messages.Run, said))
        # Only now is anything sent or counted: where one replica's arguments cannot be placed, no replica begins.
        self._runs, self._draws, series.number, self._held = run[0], draw, number, touched
        for peer, message in zip(self._worker_peers, messages_of_run, strict=True):
            self._channel.send(peer, message)
            moment("sent")
        series.unanswered.append(sent)
        self._latest, self._sent = series, series.unanswered

    def _prepare(self) -> None:
        """Tell the workers where the script lives, where that has changed."""
        if self._threads is not None:  # threads have the script's own path
            return
        directory = os.getcwd()
        if self._where is None or self._where[0] != sys.path or self._where[1] != directory:
            prepared = messages.Prepare(tuple(map(str, sys.path)), directory)
            for peer in self._worker_peers:
                self._send(peer, prepared)
            self._where, self._prepared = ([*sys.path], directory), prepared

    def _take_up(self, restarted: messages.WorkerRestarted) -> None:
        """A worker is in the place of one that died: send it what it has to carry out yet, from the run on that the
        server names. Arguments still lie where they were; it holds no function."""
        worker = restarted.worker
        replica = worker.replica
        if worker.incarnation <= self.workers[replica].incarnation:
            return
        log.info("worker w%d (pid %d) takes the place of one that died", replica, worker.pid)
        self._deaths.took_place(replica)
        self.workers = (*self.workers[:replica], worker, *self.workers[replica + 1 :])
        peer = self._connect_worker(worker)
        self._held[replica] = HeldFunctions()
        if self._prepared is not None:
            self._send(peer, self._prepared)
        is_first = True
        for sent in self._sent:
            if sent.held:
                sent.held[replica] = self._held[replica]
            if sent.run < restarted.run:
                continue
            run = messages.Run(*sent.said[replica])
            if is_first:
                self._tell(messages.Resent(sent.run, replica, run.series))
            is_first = False
            is_held, self._held[replica] = self._held[replica].touch(run.digest, run.frozen)
            self._send(peer, replace(run, function=None if is_held else self._arena.share(sent.function)))
        if self._cancelling is not None and self._cancelling.unanswered:
            self._send(peer, _cancel_of(self._cancelling))
            self._lifeline.send(messages.Interrupt(replica))

    def _tell_wait(self, run: messages.RunId, series: int, seconds: float) -> None:
        if self._threads is None:  # a replica of this process may be at a debugger's prompt: it is not to be named
            self._tell(messages.WaitReport(run, seconds, series))

    def _whom(self) -> str:
        if not self._sent or self._threads is not None:
            return super()._whom()
        said, when = self._awaited_for or (None, 0.0)
        if said is not None and said.run == self._sent[0].run and time.monotonic() - when < _WORDS_HOLD:
            return f": {said.whom}"
        return super()._whom() or f": the server (pid {self.server_pid}) does not say for whom; it may be stopped"

    def _tell(self, record: messages.Resent | messages.WaitReport) -> None:
        """Tell the server something about a run, and another in its place once more."""
        self._told.append(record)
        self._send(SERVER, record)

    def _settle(self, series: Series, left: int = 0, *, cancel: bool = False) -> None:
        """Wait until at most ``left`` runs of ``series`` are unanswered. Ctrl-C cancels the first of them and waits for
        all; a second one ends the service.

        The server hears of a Ctrl-C first, and the replicas when it has: if their interrupted returns came before the
        Cancel, it would commit what they agreed on.
        """
        try:
            self._wait_for_runs(series, left, cancel)
        finally:
            self._asked.clear()  # nobody is to hear of a Cancel again
            if self._told:
                unanswered = [sent.run for sent in series.unanswered]
                self._told = [told for told in self._told if told.run in unanswered]

    def _wait_for_runs(self, series: Series, left: int, cancel: bool) -> None:
        heard = 0  # number of the question whose answer says that the server has got the Cancel
        if cancel and series.unanswered:
            heard = self._cancel(series)
        while len(series.unanswered) > (0 if heard else left):
            run = series.unanswered[0].run
            answer: Record | None
            try:
                answer = self._early.pop(run, None)
                if answer is None:
                    named = name_wait if self._threads is None else self._name_hanging
                    wanted = partial(_ends_or_answers, run, heard)
                    late = partial(self._tell_wait, run, series.number if series.lookahead else 0)
                    answer = self._wait(f"run {run[0]}", wanted, self._deaths.patience, named, late)
            except KeyboardInterrupt:
                if heard:
                    self._end("a second Ctrl-C shut it down")
                    raise
                heard, cancel = self._cancel(series), False
            except Exception as error:
                self._draws -= len(series.failed(error))
                if self._ended is not None:
                    raise
            else:
                if isinstance(answer, RunFinished):
                    self._record(series, answer)
                else:
                    self._interrupt_workers(series)
        self._cancelling = None
        if heard and not cancel:
            raise KeyboardInterrupt

    def _record(self, series: Series, finished: RunFinished) -> None:
        """What came of the first unanswered run of ``series``, copied or held: the memory in which it lies is used
        again."""
        self._answered = finished.run[0]
        self._latest = None  # a handle among the results may be asked for in an operation that waits for no step
        try:
            outcome = self._read_outcome(finished)
            moment("over")
        finally:
            self._latest = series
        if finished.error is None:
            series.answered(outcome)
            return
        assert isinstance(outcome, BaseException)
        dropped = series.failed(outcome)
        self._draws -= len(dropped)  # the next run gets the draw that it would have without steps sent ahead
        for sent in dropped[:1]:  # workers drop it and the rest, with the functions these brought
            self._held = sent.held

    def _read_outcome(self, finished: RunFinished) -> list[Any] | BaseException:
        """The results, or what to raise in their place."""
        try:
            if finished.error is None:
                return [
                    from_value(value, partial(self._take, results), self._resolve)
                    for value, results in zip(finished.values, self._results, strict=True)
                ]
            if finished.error.exception == "SystemExit":  # uncaught, it ends the script without a word
                log.warning("replica %d left run %d by sys.exit", finished.error.replica, finished.run[0])
            return to_exception(finished.error, self._copy, self._resolve)
        except Exception as error:  # noqa: BLE001  (raised where the results would have come)
            return error

    def _take(self, results: ResultLeases, array: Array) -> np.ndarray:
        taken = results.take(array)
        return self._copy(array) if taken is None else taken

    def _cancel(self, series: Series) -> int:
        """Tell the server to give up what is not over; the number of a question that it answers when it has heard."""
        heard = self._next_sequence()
        self._asked = [_cancel_of(series), messages.Statistics(heard)]
        for asked in self._asked:
            self._send(SERVER, asked)
        return heard

    def _interrupt_workers(self, series: Series) -> None:
        self._cancelling = series
        for peer in self._worker_peers:
            self._send(peer, _cancel_of(series))
        for worker in self.workers:
            if not self._deaths.has_worker(worker.replica):
                continue
            if self._threads is not None:
                self._threads.interrupt(worker.replica)
                continue
            self._lifeline.send(messages.Interrupt(worker.replica))  # who started it can signal it, wherever it runs

    def _name_hanging(self, seconds: float, what: str) -> None:
        """Of replicas in this process: a wait for one at a debugger's prompt must not write to it, but who does not
        hear Ctrl-C is named."""
        assert self._threads is not None
        for replica, place in self._threads.hanging:
            log.warning(
                "replica %d does not react to Ctrl-C: it is at %s, in code that does not come back to Python. Press "
                "Ctrl-C again to shut down",
                replica,
                place,
            )
        log.info("waiting %.0f s for %s", seconds, what)

    def _keep(self, record: Record) -> None:
        if isinstance(record, RunFinished) and record.run > (self._answered,):  # of a step after the one at hand
            self._early[record.run] = record
        elif isinstance(record, messages.WaitingFor):
            self._awaited_for = record, time.monotonic()


def _cancel_of(series: Series) -> messages.Cancel:
    return messages.Cancel(series.unanswered[0].run, len(series.unanswered) - 1)


def _in_place(data: memoryview) -> memoryview:
    return data


def _ends_or_answers(run: messages.RunId, number: int, record: Record) -> RunFinished | Counters | None:
    if isinstance(record, RunFinished) and record.run == run:
        return record
    return record if isinstance(record, Counters) and record.request == number else None


def _nothing_adopted(handle: Handle | Composite) -> tuple[str, int]:
    raise ContextError(f"{handle!r} cannot be sent before its strategy is made")
