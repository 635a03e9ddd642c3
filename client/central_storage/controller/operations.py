"""The client's link to its service: what the cross-replica context may do, over the conversation of ``session.py``.

It implements :class:`~central_storage.core.backends.ControllerBackend`.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from central_storage.core.backends import Carriage
from central_storage.core.pipeline import Arguments, Series
from central_storage.pickling.pickler import Adopt
from cs_proto import messages, segment_names
from cs_proto.arrays import INLINE_NBYTES, Array
from cs_proto.errors import ReplicaLostError, ShutdownError
from cs_proto.messages import AssignOp, Counters, Serving, VariableSpec, WriteOp
from cs_proto.records import Record, replace
from cs_proto.schedules import Schedule
from cs_runtime import mapping
from cs_runtime.channel import SERVER
from cs_runtime.remote_segment import aligned_copy
from cs_runtime.supervisor_link import SupervisorLink

from .input_segment import InputSegment
from .runs import Runs
from .session import Threads, wait_until_serving

__all__ = ["ServiceLink", "wait_until_serving"]

# Variables named in one request to free them.
_FREED_AT_ONCE = 10_000


class ServiceLink(Runs):
    """One controller session. Operations of several threads come one after the other."""

    def __init__(
        self,
        lifeline: SupervisorLink,
        serving: Serving,
        *,
        seed: int,
        stop: Callable[[], None] | None,
        threads: Threads | None = None,
    ) -> None:
        """Say hello to the server behind ``serving``. ``stop`` ends the service; None where it is a launcher's.
        ``threads``: it is one of this process."""
        self._is_held: Callable[[str, int], object] = _nothing_held
        self._forgotten: deque[int] = deque()  # a thread may add to it at any time, in the midst of an operation too
        super().__init__(lifeline, serving, seed, stop, threads)

    def resolve_handles(
        self, resolve: Callable[[str, int], object], adopt: Adopt, is_held: Callable[[str, int], object]
    ) -> None:
        """How handles become objects and back, and which object somebody holds; said once by the strategy over this
        link."""
        self._resolve = resolve
        self._is_held = is_held
        self._adopt = adopt

    # --- ControllerBackend --------------------------------------------------------------------------------------

    def run(
        self, function: Callable[..., Any], arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> list[Any]:
        """Run ``function`` once per replica with that replica's (args, kwargs); the results in replica order."""
        self._require_process()
        with self._lock, self._interrupts:  # as _operation has it, whose generator would cost more, at every run
            self._begin()
            alone = Series(self, 0)
            self._send_run(alone, function, arguments)
            self._settle(alone)
            return alone.take()

    def series(self, lookahead: int) -> Series:
        """Steps of which ``lookahead`` may be sent before those ahead of them are over."""
        return Series(self, lookahead)

    def send_step(self, series: Series, function: Callable[..., Any], arguments: Arguments) -> None:
        """Send the next step of ``series``, and wait until at most its lookahead are unanswered."""
        self._require_process()
        with self._lock, self._interrupts:  # as in run
            self._begin(series)
            if not series.has_failed:
                self._send_run(series, function, arguments)
            # Nothing of the script's runs beside replicas that share its random state.
            left = series.lookahead if self._threads is None else 0
            if len(series.unanswered) > left:
                with suppress(Exception):  # it is among the outcomes, or comes again
                    self._settle(series, left)

    def settle(self, series: Series, left: int = 0, *, cancel: bool = False) -> None:
        """Wait until at most ``left`` steps of ``series`` are unanswered."""
        with self._lock:
            if self._interrupts.is_entered:
                return  # the garbage collector left a loop in the midst of an operation, which waits for the steps
            if self._ended is not None and series.unanswered:
                series.failed(ShutdownError(self._why_ended()))
                return
            with self._operation(series):
                self._settle(series, left, cancel=cancel)

    def create(self, spec: VariableSpec, value: np.ndarray, site: str) -> messages.Variable:
        """Make a variable. The server checks the plan before a byte of a large value is copied anywhere; zeros are
        there without that."""
        with self._operation():
            inline = self._inline(value)
            sequence = self._next_sequence()
            request = messages.Create(self._client, sequence, spec, inline)
            record = self._ask(request, sequence, messages.Created).variable
            if inline is None and not _is_zero(value):
                try:
                    self._assign(record.number, "assign", value)
                except BaseException:  # nobody gets to know it
                    self._forgotten.append(record.number)
                    raise
            return record

    def assign(self, number: int, op: AssignOp, value: np.ndarray, site: str, *, scalar: bool) -> None:
        """Write a variable once."""
        with self._operation():
            self._assign(number, op, value)

    def write(self, number: int, op: WriteOp, value: np.ndarray, rows: np.ndarray | None, site: str) -> None:
        """Write a variable once, or rows of it."""
        with self._operation():
            self._assign(number, op, value, rows)

    def read(self, number: int) -> np.ndarray:
        """A copy of the variable's current value, which begins at a multiple of 64 bytes."""
        with self._operation():
            return aligned_copy(self._view(self._place(number)))

    def read_rows(self, number: int, rows: np.ndarray) -> np.ndarray:
        """A copy of these rows of the variable's current value."""
        with self._operation():
            array = self._place(number)
            return self._lifeline.segment_of(array).rows(array, rows)

    def forget(self, number: int) -> None:
        """Free the variable before the next operation, unless somebody got a handle of it again."""
        self._forgotten.append(number)

    def configure(
        self,
        number: int,
        kind: str,
        hyperparameters: Mapping[str, float],
        schedule: Schedule | None,
        iterations: int,
    ) -> int:
        """Make an optimizer (``number`` 0) or change one; its number."""
        with self._operation():
            sequence = self._next_sequence()
            pairs = tuple(hyperparameters.items())
            request = messages.Configure(self._client, sequence, number, kind, pairs, schedule, iterations)
            return self._ask(request, sequence, messages.Done).number

    def slot(self, optimizer: int, variable: int, slot: str) -> np.ndarray:
        """A copy of what an optimizer keeps beside a variable."""
        with self._operation():
            sequence = self._next_sequence()
            found = self._ask(messages.DescribeSlots(sequence, optimizer, variable), sequence, messages.Slots)
            return self._copy(found.arrays[found.names.index(slot)])

    def assign_slot(self, optimizer: int, variable: int, slot: str, value: np.ndarray) -> None:
        """Write a slot once."""
        with self._operation():
            self._arena.reset()
            sequence = self._next_sequence()
            placed = self._arena.place(value)
            request = messages.AssignSlot(self._client, sequence, optimizer, variable, slot, placed)
            self._ask(request, sequence, messages.Done)

    def variable(self, number: int) -> messages.Variable:
        """The variable's record as it stands."""
        with self._operation():
            sequence = self._next_sequence()
            return self._ask(messages.Describe(sequence, (number,), ()), sequence, messages.Described).variables[0]

    def variables(self) -> tuple[messages.Variable, ...]:
        """Every variable's record, in the order in which they were made."""
        with self._operation():
            sequence = self._next_sequence()
            return self._ask(messages.Get(sequence, (), (), False), sequence, messages.Got).variables

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Operations of other threads wait for the end of the block."""
        with self._lock:
            yield

    def optimizer(self, number: int) -> messages.Optimizer:
        """The optimizer's record as it stands."""
        with self._operation():
            return self._describe_optimizer(number).optimizers[0]

    def slotted(self, optimizer: int) -> tuple[int, ...]:
        """The numbers of the variables beside which an optimizer has slots."""
        with self._operation():
            return self._describe_optimizer(optimizer).slotted[0]

    def carrier(self) -> Carriage:
        """What copies an array to where all workers read it; plain memory where there is none. Beside replicas
        in this process no thread reads: a data set that draws random numbers would draw theirs."""
        if self._inputs is None and not self.carries:
            with suppress(ShutdownError), self._operation():
                shared = self._lifeline.segment(segment_names.inputs())
                if isinstance(shared, mapping.Mapping):
                    self._inputs = InputSegment(shared)
        return Carriage(np.copy if self._inputs is None else self._inputs.carry, in_thread=self._threads is None)

    @property
    def seed(self) -> int:
        """The strategy's seed."""
        return self._seed

    def draws(self) -> int:
        """The number of runs that have begun, counted from the last :meth:`set_draws`."""
        with self._operation():
            return self._draws

    def set_draws(self, draws: int) -> None:
        """Give the next run the draw ``draws`` + 1."""
        with self._operation():
            self._draws = draws

    def statistics(self) -> Counters:
        """The server's counters."""
        with self._operation():
            sequence = self._next_sequence()
            counters = self._ask(messages.Statistics(sequence), sequence, Counters)
            return replace(counters, doorbells=counters.doorbells + self._channel.mailboxes.rung)

    def close(self) -> None:
        """Say goodbye, stop the service where it is ours, let go of everything. Idempotent."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._left_off = None
            try:
                if self._ended is None:
                    with suppress(ReplicaLostError, ShutdownError), self._operation():
                        pass  # but wait for steps that were sent ahead
            finally:
                if self._ended is None:
                    self._ended = "this strategy was shut down"
                    self._own_results()  # the next script may be served as soon as the server hears this
                    with suppress(ShutdownError):
                        self._send(SERVER, messages.Goodbye(self._client))
                self._release()
        if self._listener is not None:
            self._listener.join()

    # --- parts of the operations ----------------------------------------------------------------------------------

    def _assign(self, number: int, op: WriteOp, value: np.ndarray, rows: np.ndarray | None = None) -> None:
        mark = self._arena.mark()  # of a run that is being sent: it may be what takes a local variable along
        try:
            sequence = self._next_sequence()
            place = self._arena.place
            indices = None if rows is None else place(rows)
            self._ask(
                messages.Assign(self._client, sequence, number, op, place(value), indices), sequence, messages.Done
            )
        finally:
            self._arena.release(mark)

    def _free_forgotten(self) -> None:
        numbers = []
        for number in [self._forgotten.popleft() for _ in range(min(len(self._forgotten), _FREED_AT_ONCE))]:
            handle = self._is_held("variable", number)
            if handle is None:
                numbers.append(number)
            else:  # it came back, as the result of a run
                weakref.finalize(handle, self.forget, number).atexit = False
        if numbers:
            sequence = self._next_sequence()
            self._ask(messages.Free(self._client, sequence, tuple(numbers)), sequence, messages.Done)
            self._tell_freed(tuple(numbers))

    def _tell_freed(self, numbers: tuple[int, ...]) -> None:
        for peer in self._worker_peers:
            self._send(peer, messages.Forget(numbers))

    def _finish_write(self, request: Record, number: int, answer: type[Record]) -> None:
        """Wait for the answer to a write that Ctrl-C has left: until it comes the server may read what the write names,
        and takes no other. What it was refused with is nobody's."""
        found = self._wait_for_answer(request, number, answer)
        if isinstance(found, messages.Created):
            self._forgotten.append(found.variable.number)
        elif isinstance(request, messages.Free):
            self._tell_freed(request.variables)

    def _describe_optimizer(self, number: int) -> messages.Described:
        sequence = self._next_sequence()
        return self._ask(messages.Describe(sequence, (), (number,)), sequence, messages.Described)

    def _inline(self, value: np.ndarray) -> Array | None:
        return self._arena.place(value) if value.nbytes <= INLINE_NBYTES else None

    def _place(self, number: int) -> Array:
        sequence = self._next_sequence()
        return self._ask(messages.Get(sequence, (number,), (), False), sequence, messages.Got).arrays[0]

    @contextmanager
    def _operation(self, series: Series | None = None) -> Iterator[None]:
        """One operation: the lock, the check that the link lives, and Ctrl-C only at safe points. It comes after the
        steps that were sent ahead, unless it is one of the same ``series``."""
        self._require_process()
        with self._lock, self._interrupts:
            self._begin(series)
            yield

    def _require_process(self) -> None:
        # Asked before the lock: a thread that the child does not have may hold the child's copy of it.
        if os.getpid() != self._process:
            raise ShutdownError("this strategy belongs to the process that made it; a forked child cannot use it")

    def _begin(self, series: Series | None = None) -> None:
        """What an operation begins with, once it has the lock."""
        if self._ended is not None:
            raise ShutdownError(self._why_ended())
        if self._left_off is not None:
            self._finish_write(*self._left_off)
        if self._latest is not None and self._latest is not series:
            self._settle(self._latest)
        if self._forgotten and series is None:
            self._free_forgotten()


def _nothing_held(kind: str, number: int) -> object:
    return None


def _is_zero(value: np.ndarray) -> bool:
    """Whether every byte is; False, too, where that is not said at a glance."""
    return value.flags.c_contiguous and not value.reshape(-1).view(np.uint8).any()
