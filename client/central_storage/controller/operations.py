"""The client's link to its service: what the cross-replica context may do, over the conversation of ``session.py``.

It implements :class:`~central_storage.core.backends.ControllerBackend`.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Self

import numpy as np

from central_storage.core.backends import Carriage, Column, ReadRows, Values, assign_each, every, is_zero
from central_storage.core.made_in_replicas import MadeInReplicas
from central_storage.core.pipeline import Arguments, Changes, Series
from central_storage.pickling.pickler import Adopt
from cs_proto import messages, segment_names
from cs_proto.arithmetic.schedules import Schedule
from cs_proto.arrays import INLINE_NBYTES, Array, Location
from cs_proto.errors import ReplicaLostError, ShutdownError
from cs_proto.messages import AssignOp, Counters, NumericsCheck, Serving, VariableSpec, WriteOp
from cs_proto.records import replace
from cs_runtime.shared_memory import mapping
from cs_runtime.shared_memory.remote_segment import aligned_copy
from cs_runtime.transport.supervisor_link import SupervisorLink

from .bulk_values import LARGE_NBYTES, Place, Sent, image, in_parts, place_of, row_reader, slot_places, values_at
from .input_segment import InputSegment
from .runs import Runs
from .session import Session, Threads, wait_until_serving
from .waits import Question

__all__ = ["ServiceLink", "wait_until_serving"]

# Seconds that another thread gets to show what the service prints, which takes the lock as a run does.
_FREE_WITHIN = 0.2
# Variables and optimizers named in one request to free them.
_FREED_AT_ONCE = 10_000


class ServiceLink:
    """One controller session: a facade of all that the strategy, its variables and its optimizers ask. Operations of
    several threads come one after the other."""

    def __init__(
        self,
        lifeline: SupervisorLink,
        serving: Serving,
        *,
        seed: int,
        stop: Callable[[], None] | None,
        threads: Threads | None = None,
    ) -> None:
        """A link to the server behind ``serving``, to be opened with :meth:`open`. ``stop`` ends the service; None
        where it is a launcher's. ``threads``: it is one of this process."""
        self._session = Session(lifeline, serving, stop=stop, threads=threads)
        self._core = self._session.core
        self._ask, self._number = self._session.ask, self._core.next_sequence
        self._client = lifeline.client
        self._runs = Runs(self._session, seed, self.forget)
        self._is_held: Callable[[str, int], Any] = _nothing_held
        self._made_in_replicas: MadeInReplicas | None = None
        #: Where variables lie, by number. None moves as long as it exists, and no number is used again.
        self._places: dict[int, Place] = {}
        # A thread may add to it at any time, in the midst of an operation too.
        self._forgotten: deque[tuple[str, Any]] = deque()
        self.address = serving.run_directory
        self.replicas = 0
        self.parameter_device = ""
        self.compute_devices: tuple[str, ...] = ()
        #: Called once, when the service has been let go of.
        self.after_close: Callable[[], None] = _nothing
        #: Where the service listens for other machines; "" for nowhere.
        self.listens_at: Callable[[], str] = str

    @property
    def check_numerics(self) -> NumericsCheck:
        """What the replicas do about gradients that are not finite, in the runs that follow."""
        return self._runs.check_numerics

    @check_numerics.setter
    def check_numerics(self, check: NumericsCheck) -> None:
        self._runs.check_numerics = check

    @property
    def ended(self) -> str | None:
        """Why the service has ended; None while it has not."""
        return self._session.ended

    @property
    def is_busy(self) -> bool:
        """Whether an operation is under way, in any thread."""
        return self._session.interrupts.is_entered

    def open(self) -> Self:
        """Say hello to the server, and connect to the workers. Where it fails, all is let go of."""
        session = self._session
        try:
            with session.interrupts:
                session.open()
                welcome = self._core.welcome
                self.replicas = welcome.replicas
                self.parameter_device = welcome.parameter_device
                self.compute_devices = tuple(worker.device for worker in welcome.workers)
        except BaseException:  # as garbage the channel would wait for ever for sockets that nobody closes
            session.release()
            session.join()
            raise
        return self

    @property
    def workers(self) -> tuple[messages.Worker, ...]:
        """The workers in replica order."""
        return self._core.workers

    @property
    def last_death(self) -> messages.Died | None:
        """The death that matters: the first for good, else the last."""
        return self._core.last_death

    @property
    def carries(self) -> bool:
        """Whether this process maps no memory of the service."""
        return self._session.carries

    @property
    def transport(self) -> str:
        """How it talks with the service, in words."""
        return self._session.transport

    @property
    def is_running(self) -> bool:
        """Whether the service runs and this link is open, as far as is known."""
        return self._session.ended is None

    def abandon(self) -> None:
        """Nobody holds the strategy over this link any more: end its service, but for a launcher's. Called by the
        garbage collector in any thread and at any time, so the thread that waits for output does it."""
        self._session.leave_to_listener(self.close)

    def forget_in_child(self) -> None:
        """In a forked child: let go of the connection to the supervisor."""
        self._session.forget_in_child()

    def resolve_handles(
        self,
        resolve: Callable[[str, int], object],
        adopt: Adopt,
        is_held: Callable[[str, int], object],
        made_in_replicas: MadeInReplicas,
        before_first_run: Callable[[], None],
    ) -> None:
        """How handles become objects and back, which object somebody holds, which variables of replicas somebody
        needs, and what the first run calls before it is sent; said once by the strategy over this link."""
        self._runs.before_first = before_first_run
        self._session.resolve = resolve
        self._runs.adopt = adopt
        self._is_held = is_held
        self._made_in_replicas = made_in_replicas

    # --- ControllerBackend --------------------------------------------------------------------------------------

    def run(
        self, function: Callable[..., Any], arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> list[Any]:
        """Run ``function`` once per replica with that replica's (args, kwargs); the results in replica order."""
        session = self._session
        session.require_process()
        with session.lock, session.interrupts:  # as _operation has it, whose generator would cost more, at every run
            self._begin()
            alone = Series(self, 0)
            self._runs.send(alone, function, arguments)
            self._runs.settle(alone)
            return alone.take()

    def series(self, lookahead: int) -> Series:
        """Steps of which ``lookahead`` may be sent before those ahead of them are over."""
        return Series(self, lookahead)

    def send_step(self, series: Series, function: Callable[..., Any], arguments: Arguments, changes: Changes) -> None:
        """Send the next step of ``series``, and wait until at most its lookahead are unanswered."""
        session = self._session
        session.require_process()
        with session.lock, session.interrupts:  # as in run
            self._begin(series)
            if not series.has_failed:
                self._runs.send(series, function, arguments, changes)
            # Nothing of the script's runs beside replicas that share its random state.
            left = series.lookahead if session.threads is None else 0
            if len(series.unanswered) > left:
                try:  # noqa: SIM105  (suppress() is slower, and this runs at every step)
                    self._runs.settle(series, left)
                except Exception:  # noqa: BLE001  (it is among the outcomes, or comes again)
                    pass

    def settle(self, series: Series, left: int = 0, *, cancel: bool = False) -> None:
        """Wait until at most ``left`` steps of ``series`` are unanswered."""
        session = self._session
        with session.lock:
            if session.interrupts.is_entered:
                return  # the garbage collector left a loop in the midst of an operation, which waits for the steps
            if series.unanswered:
                try:
                    session.require_service()
                except ShutdownError as error:
                    series.failed(error)
                    return
            with self._operation(series):
                self._runs.settle(series, left, cancel=cancel)

    def create(self, spec: VariableSpec, value: np.ndarray, site: str) -> messages.Variable:
        """Make a variable. The server checks the plan before a byte of a large value is copied anywhere; zeros are
        there without that."""
        with self._operation():
            inline = self._inline(value)
            request = messages.Create(self._client, self._number(), spec, inline)
            record = self._ask(request, messages.Created).variable
            self._places[record.number] = place_of(record.array)
            if inline is None and not is_zero(value):
                try:
                    self._assign(record.number, "assign", value)
                except BaseException:  # nobody gets to know it
                    self._forgotten.append(("variable", record.number))
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
            return aligned_copy(self._session.view(self._place(number)))

    def sample(self, number: int, most: int) -> np.ndarray | None:
        """At most about ``most`` of the variable's values; None if a run is under way."""
        session = self._session
        session.require_process()
        if not session.lock.acquire(timeout=_FREE_WITHIN):
            return None  # another thread runs something
        try:
            if self._core.has_unanswered or session.interrupts.is_entered:
                return None
            with self._operation():
                array = self._place(number)
                segment = session.lifeline.segment_of(array)
                shape = array.shape
                if isinstance(segment, mapping.Mapping) or not shape or shape[0] <= most:
                    return every(session.view(array), most)
                rows = np.arange(0, shape[0], -(-shape[0] // most))  # of the bytes that come, few
                return every(segment.rows(array, rows), most)
        finally:
            session.lock.release()

    def processes(self) -> list[tuple[str, int, str, str]]:
        """The processes of the service, as far as this one has heard."""
        workers = [(f"worker {worker.replica}", worker.pid, worker.device, worker.node) for worker in self.workers]
        return [("server", self._core.server_pid, self.parameter_device, ""), *workers]

    def read_rows(self, number: int, rows: np.ndarray) -> np.ndarray:
        """A copy of these rows of the variable's current value."""
        with self._operation():
            array = self._place(number)
            return self._session.lifeline.segment_of(array).rows(array, rows)

    def forget(self, kind: str, number: Any) -> None:
        """Free a variable or optimizer before the next operation, unless somebody got a handle of it again. Of a
        function that nobody has any more, ``number`` is the digest."""
        self._forgotten.append((kind, number))

    def settle_names(self) -> None:
        """Free what nobody holds: other variables get its name."""
        if self._forgotten and self.is_running and not self._session.interrupts.is_entered:
            with suppress(ReplicaLostError, ShutdownError), self._operation():
                pass

    def configure(
        self,
        number: int,
        kind: str,
        hyperparameters: Mapping[str, float],
        schedule: Schedule | None,
        iterations: int,
        exempt: tuple[str, ...] | None = None,
        steps: Mapping[int, int] | None = None,
    ) -> int:
        """Make an optimizer (``number`` 0) or change one; its number."""
        with self._operation():
            pairs = tuple(hyperparameters.items())
            counts = tuple((steps or {}).items())
            request = messages.Configure(
                self._client, self._number(), number, kind, pairs, schedule, iterations, exempt, counts
            )
            return self._ask(request, messages.Done).number

    def slot(self, optimizer: int, variable: int, slot: str) -> np.ndarray:
        """A copy of what an optimizer keeps beside a variable."""
        with self._operation():
            found = self._ask(messages.DescribeSlots(self._number(), optimizer, variable), messages.Slots)
            return self._session.copy(found.arrays[found.names.index(slot)])

    def assign_slot(
        self, optimizer: int, variable: int, slot: str, value: np.ndarray, first: int | None = None
    ) -> None:
        """Write a slot once, or its rows from the number ``first`` on."""
        with self._operation():
            mark = self._session.arena.mark()
            try:
                placed = self._session.arena.place(value)
                request = messages.AssignSlot(self._client, self._number(), optimizer, variable, slot, placed, first)
                self._ask(request, messages.Done)
            finally:
                self._session.arena.release(mark)

    def read_all(self, columns: Sequence[Column], *, copied: bool) -> Values:
        """The values of columns: one question, and one for each optimizer. They are of one moment, because the lock is
        held and no run is under way."""
        with self._operation():
            found = iter(values_at(self._places_of(columns), self._session.lifeline.segment, copied=copied))
            return [list(itertools.islice(found, len(each.numbers))) for each in columns]

    def read_in_rows(self, columns: Sequence[Column]) -> list[ReadRows]:
        """How rows of large values are read, one value for each column; of one moment as in :meth:`read_all`."""
        with self._operation():
            places = self._places_of(columns)
            heights = [each.shapes[0][0] for each in columns]
            return list(map(partial(row_reader, self._session.lifeline.segment), places, heights))

    def assign_all(self, columns: Sequence[tuple[Column, memoryview]]) -> None:
        """Set columns: small values together, large ones one after the other."""
        small = []
        for column, values in columns:
            if len(values) > LARGE_NBYTES and max(column.nbytes()) > LARGE_NBYTES:
                assign_each(self, [(column, values)])
            else:
                small.append((column, values))
        for part in in_parts(small):
            with self._operation():
                self._assign_part(part)

    def variable(self, number: int) -> messages.Variable:
        """The variable's record as it stands."""
        with self._operation():
            return self._ask(messages.Describe(self._number(), (number,), ()), messages.Described).variables[0]

    def variables(self) -> tuple[messages.Variable, ...]:
        """Every variable's record, in the order in which they were made."""
        with self._operation():
            return self._ask(messages.Get(self._number(), (), (), False), messages.Got).variables

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Operations of other threads wait for the end of the block."""
        with self._session.lock:
            yield

    def optimizer(self, number: int) -> messages.Optimizer:
        """The optimizer's record as it stands."""
        with self._operation():
            return self._describe_optimizer(number).optimizers[0]

    def slotted(self, optimizer: int) -> tuple[int, ...]:
        """The numbers of the variables beside which an optimizer has slots."""
        with self._operation():
            return self._describe_optimizer(optimizer).slotted[0]

    def steps_of(self, optimizer: int) -> dict[int, int]:
        """How often an optimizer has updated each variable beside which it has slots."""
        with self._operation():
            found = self._describe_optimizer(optimizer)
            return dict(zip(found.slotted[0], found.steps[0], strict=True))

    def carrier(self) -> Carriage:
        """What copies an array to where all workers read it; plain memory where there is none. Beside replicas
        in this process no thread reads: a data set that draws random numbers would draw theirs."""
        session = self._session
        if session.inputs is None and not session.carries:
            with suppress(ShutdownError), self._operation():
                shared = session.lifeline.segment(segment_names.inputs())
                if isinstance(shared, mapping.Mapping):
                    session.inputs = InputSegment(shared)
        return Carriage(np.copy if session.inputs is None else session.inputs.carry, in_thread=session.threads is None)

    @property
    def seed(self) -> int:
        """The strategy's seed."""
        return self._runs.seed

    def steps(self) -> dict[str, int]:
        """The number of runs of each function that have begun, counted from the last :meth:`set_steps`."""
        with self._operation():
            return {name: step for name, step in self._core.steps.items() if step}

    def set_steps(self, steps: Mapping[str, int]) -> None:
        """Continue these counts. A function that is not among them begins at 0."""
        with self._operation():
            self._core.steps = Counter(steps)

    def statistics(self) -> Counters:
        """The server's counters."""
        with self._operation():
            counters = self._ask(messages.Statistics(self._number()), Counters)
            return replace(counters, doorbells=counters.doorbells + self._session.rung)

    def close(self) -> None:
        """Say goodbye, stop the service where it is ours, let go of everything. Idempotent."""
        session = self._session
        try:
            session.require_process()
        except ShutdownError:
            return
        with session.lock:
            is_within = session.interrupts.is_entered  # a handler of a signal has interrupted an operation
            with session.interrupts:
                self._core.forget_write()
                try:
                    with suppress(ReplicaLostError, ShutdownError):
                        self._begin()  # but wait for steps that were sent ahead
                finally:
                    if session.ended is None:
                        session.say_goodbye()
                    session.release()
        if not is_within:  # that operation holds the lock
            session.join()
        after, self.after_close = self.after_close, _nothing
        after()

    # --- parts of the operations ----------------------------------------------------------------------------------

    def _assign(self, number: int, op: WriteOp, value: np.ndarray, rows: np.ndarray | None = None) -> None:
        mark = self._session.arena.mark()  # of a run that is being sent: it may be what takes a local variable along
        try:
            place = self._session.arena.place
            indices = None if rows is None else place(rows)
            request = messages.Assign(self._client, self._number(), number, op, place(value), indices)
            self._ask(request, messages.Done)
        finally:
            self._session.arena.release(mark)

    def _learn_places(self, numbers: Iterable[int]) -> None:
        if missing := tuple(number for number in numbers if number not in self._places):
            got = self._ask(messages.Get(self._number(), missing, (), False), messages.Got)
            self._places |= {n: place_of(array) for n, array in zip(missing, got.arrays, strict=True)}

    def _places_of(self, columns: Sequence[Column]) -> list[Place]:
        """Where the values of columns lie, one column after the other."""
        # The server answers when nothing is half written, also one that has taken the place of another.
        self._ask(messages.Describe(self._number(), (), ()), messages.Described)
        self._learn_places(number for each in columns for number in each.numbers)
        segments = {
            optimizer: self._slot_segments(optimizer, columns) for optimizer in {c.optimizer for c in columns} - {0}
        }
        places: list[Place] = []
        for each in columns:
            own = [self._places[number] for number in each.numbers]
            places += slot_places(each, own, segments[each.optimizer][each.slot]) if each.optimizer else own
        return places

    def _slot_segments(self, optimizer: int, columns: Iterable[Column]) -> dict[str, dict[str, str]]:
        """The segment of each slot by that of its variable. The server names those of one variable of each. For slots
        on a GPU it is asked for all, and brings them to the machine's memory."""
        beside = dict.fromkeys(number for each in columns if each.optimizer == optimizer for number in each.numbers)
        one_of = {self._places[number][0]: number for number in beside}
        asked = tuple(beside if self.parameter_device.startswith("gpu") else one_of.values())
        found = self._ask(messages.DescribeSlots(self._number(), optimizer, asked[0], asked[1:]), messages.Slots)
        count = len(found.names)
        first = {number: place * count for place, number in enumerate(asked)}
        return {
            slot: {segment: _segment(found.arrays[first[number] + place]) for segment, number in one_of.items()}
            for place, slot in enumerate(found.names)
        }

    def _assign_part(self, part: Sequence[Sent]) -> None:
        numbers: dict[tuple[int, str], list[int]] = {(0, ""): []}
        for sent in part:
            numbers.setdefault((sent.optimizer, sent.slot), []).extend(sent.numbers)
        variables = tuple(numbers.pop((0, "")))
        slots = tuple((optimizer, slot, tuple(beside)) for (optimizer, slot), beside in numbers.items())
        mark = self._session.arena.mark()
        try:
            placed = self._session.arena.put_all([image(sent) for sent in part])
            whole = Array("uint8", (sum(array.nbytes for array in placed),), placed[0].place)
            asked = messages.AssignAll(self._client, self._number(), variables, slots, whole)
            self._ask(asked, messages.Done)
        finally:
            self._session.arena.release(mark)

    def _free_forgotten(self) -> None:
        freed: dict[str, list[Any]] = {"variable": [], "optimizer": [], "function": [], "owner": []}
        while self._forgotten and sum(map(len, freed.values())) < _FREED_AT_ONCE:
            kind, number = self._forgotten.popleft()
            if kind == "handle":
                self._runs.drop_stale()  # which may add to what is forgotten
                continue
            handle = None if kind in ("function", "owner") else self._is_held(kind, number)
            if handle is None:
                freed[kind].append(number)
            else:  # it came back, as the result of a run
                handle._cs_keep(self.forget)  # noqa: SLF001
        if functions := self._runs.drop(freed["function"]):
            self._session.carry_out(self._core.forget_functions(functions))
        if (freed["variable"] or freed["owner"]) and self._made_in_replicas and not self._made_in_replicas.is_empty:
            try:
                made = self._ask(messages.Get(self._number(), (), (), False), messages.Got).variables
            except BaseException:  # Ctrl-C, for example: the next operation frees them
                self._forgotten.extend((kind, each) for kind in freed if kind != "function" for each in freed[kind])
                raise
            is_held = partial(self._is_held, "variable")
            freed["variable"] += self._made_in_replicas.unneeded(made, set(freed["variable"]), is_held)
        variables, optimizers = tuple(freed["variable"]), tuple(freed["optimizer"])
        for number in variables:
            self._places.pop(number, None)
        if variables or optimizers:
            asked = messages.Free(self._client, self._number(), variables, optimizers)
            self._rename(self._ask(asked, messages.Done))

    def _rename(self, freed: messages.Done) -> None:
        """Give the variables that somebody holds the names that they got because others were freed."""
        for number, name in freed.renamed:
            if (renamed := self._is_held("variable", number)) is not None:
                renamed.rename(name)

    def _finish_write(self, question: Question) -> None:
        """Wait for the answer to a write that Ctrl-C has left. What it was refused with is nobody's."""
        self._session.wait(question)
        if isinstance(question.answer, messages.Created):
            self._forgotten.append(("variable", question.answer.variable.number))
        elif isinstance(question.answer, messages.Done):
            self._rename(question.answer)

    def _describe_optimizer(self, number: int) -> messages.Described:
        return self._ask(messages.Describe(self._number(), (), (number,)), messages.Described)

    def _inline(self, value: np.ndarray) -> Array | None:
        return self._session.arena.place(value) if value.nbytes <= INLINE_NBYTES else None

    def _place(self, number: int) -> Array:
        return self._ask(messages.Get(self._number(), (number,), (), False), messages.Got).arrays[0]

    @contextmanager
    def _operation(self, series: Series | None = None) -> Iterator[None]:
        """One operation: the lock, the check that the link lives, and Ctrl-C only at safe points. It comes after the
        steps that were sent ahead, unless it is one of the same ``series``."""
        session = self._session
        session.require_process()
        with session.lock, session.interrupts:
            self._begin(series)
            yield

    def _begin(self, series: Series | None = None) -> None:
        """What an operation begins with, once it has the lock."""
        if self._session.ended is not None:
            self._session.require_service()
        if self._core.left_off is not None and (question := self._core.finish_write(time.monotonic())) is not None:
            self._finish_write(question)
        while self._core.latest is not series and (before := self._core.unsettled(series)) is not None:
            self._runs.settle(before)  # a handler of a signal may send more steps ahead meanwhile
        if self._forgotten and series is None and not self._core.has_unanswered:
            self._free_forgotten()


def _segment(array: Array) -> str:
    assert isinstance(array.place, Location)
    return array.place.segment


def _nothing_held(kind: str, number: int) -> object:
    return None


def _nothing() -> None:
    pass
